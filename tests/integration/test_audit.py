"""`audit`: what saved states say of real files, and how these files differ today."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from deltalake import write_deltalake
from icebergs import config_of, new_catalog
from pairwise import pairwise
from support import edited, open_loader, rows_of, write_dataset
from text_files import SMALL, csv_of, open_text, write_text

from torch_dataloader_utils import Audit, CheckpointStore, DeltaDataset, IcebergDataset, UnreadableFileError, audit
from torch_dataloader_utils.distributed import save_rank_state

pytestmark = [
    pytest.mark.usefixtures("leaves_nothing_behind"),
    pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

FILES = ((130, 50), (7, 50), (211, 40), (95, 30))
ROWS = 443
SHUFFLED: dict[str, Any] = {"shuffle": True, "shuffle_buffer_size": 60, "batch_size": 8}
ROW_GROUPS = {"shuffle": True, "batch_size": 8}
ORDERS = {"rows": SHUFFLED, "row groups": ROW_GROUPS, "in order": {"shuffle": False, "batch_size": 8}}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    assert write_dataset(tmp_path / "data", FILES) == ROWS
    return tmp_path / "data"


def train(data: Any, ranks: int, steps: int, **options: Any) -> tuple[list[int], list[Any]]:
    """Let each rank make some steps: the rows, and the loaders."""
    rows, loaders = [], []
    for rank in range(ranks):
        loader, _ = open_loader(data, num_ranks=ranks, rank=rank, **{**SHUFFLED, **options})
        rows += [row for batch in itertools.islice(loader, steps) for row in rows_of(batch)]
        loaders.append(loader)
    return rows, loaders


def by_file(rows: Iterable[int]) -> dict[str, int]:
    ends = list(itertools.accumulate(count for count, _ in FILES))
    counts = Counter(next(number for number, end in enumerate(ends) if row < end) for row in rows)
    return {f"part-{number:03d}.parquet": counts[number] for number in range(len(FILES))}


def ids(rows: Iterable[tuple[str, int]]) -> list[int]:
    """Return the numbers of rows that are given by path and row number."""
    firsts = dict(zip(by_file([]), itertools.accumulate((count for count, _ in FILES), initial=0), strict=False))
    return [firsts[path] + row for path, row in rows]


def named(rows: Iterable[int]) -> list[tuple[str, int]]:
    """Return rows as pairs of a path and a row number."""
    first, pairs = 0, []
    for number, (count, _) in enumerate(FILES):
        pairs += [(f"part-{number:03d}.parquet", row - first) for row in rows if first <= row < first + count]
        first += count
    return pairs


def delivered(found: Audit) -> dict[str, int]:
    return {file.path: file.done + file.under_way for file in found.files}


@pairwise(most=3, order=ORDERS, workers=[0, 2])
def test_the_counts_of_each_file_are_the_rows_that_its_ranks_delivered(data, order, workers):
    rows, loaders = train(data, 3, 7, num_workers=workers, **{"shuffle_buffer_size": None, **ORDERS[order]})
    states = [loader.state_dict() for loader in loaders]
    found = audit(states, data)
    assert delivered(found) == by_file(rows)
    assert found.total.left == ROWS - len(rows)
    assert found.files_match
    assert found.is_fine
    assert (found.epoch, found.batches, found.unit, found.num_ranks) == (0, 7, "rows", 3)


def test_a_directory_of_rank_files_a_store_and_a_file_are_audited_alike(tmp_path, data, s3):
    rows, [loader] = train(data, 1, 9)
    expected = audit(loader.state_dict(), data)
    assert delivered(expected) == by_file(rows)
    save_rank_state(loader, tmp_path / "ranks")
    torch.save({"loader": loader.state_dict(), "model": torch.ones(3)}, tmp_path / "last.pt")
    store = CheckpointStore(tmp_path / "store")
    store.save(9, loader=loader)
    for source in (tmp_path / "ranks", tmp_path / "last.pt", store, tmp_path / "store"):
        assert audit(source, data) == audit(source, loader) == audit(source, loader.dataset) == expected
    bucket = s3.new_bucket(tmp_path)
    remote = audit(f"s3://{bucket}/ranks", f"s3://{bucket}/data", s3.storage_options())
    assert delivered(remote) == delivered(expected)
    assert remote.files_match


def test_an_epoch_goes_on_under_other_ranks_and_every_row_is_counted_once(data):
    rows, loaders = train(data, 3, 4)
    states = [loader.state_dict() for loader in loaders]
    later, loader_of = list(rows), []
    for rank in range(2):
        loader, _ = open_loader(data, num_ranks=2, rank=rank, **SHUFFLED)
        loader.load_state_dict(states, strict=False)
        later += [row for batch in itertools.islice(loader, 5) for row in rows_of(batch)]
        loader_of.append(loader)
    found = audit([loader.state_dict() for loader in loader_of], data)
    assert delivered(found) == by_file(later)
    assert found.total.twice == 0
    both = audit([loader_of[0].state_dict(), states[1]], data)
    assert both.problems
    assert both.total.twice == 32, "the four batches of rank 1 are also in the earlier progress of the other state"
    assert not both.is_fine


def test_rows_that_balancing_drops_and_repeats_are_told(data):
    for uneven, name in (("drop", "dropped"), ("pad", "repeated")):
        rows, loaders = train(data, 5, 1000, uneven_ranks=uneven)
        found = audit([loader.state_dict() for loader in loaders], data)
        assert (found.total.left, found.total.unknown) == (0, 0)
        assert getattr(found.total, name) == abs(ROWS - len(rows)) > 0


class TestTodaysFiles:
    def test_a_rewritten_a_removed_and_an_added_file_are_told_by_name(self, data):
        _, [loader] = train(data, 1, 9)
        table = pq.read_table(data / "part-000.parquet")
        pq.write_table(table.slice(0, 100), data / "part-000.parquet", row_group_size=50)
        (data / "part-002.parquet").unlink()
        pq.write_table(table, data / "part-004.parquet")
        found = audit(loader.state_dict(), data)
        changes = {file.path: file.change for file in found.files if file.change}
        assert changes["part-002.parquet"] == "removed since the checkpoint"
        assert changes["part-004.parquet"] == "added since the checkpoint"
        assert "bytes, has" in changes["part-000.parquet"]
        assert found.files_match is False
        assert sum(file.missing for file in found.files) == found.total.missing > 0
        assert found.files[1].missing == found.files[3].missing == 0
        assert {line.split(":")[0] for line in found.differences} == {
            "files changed since the checkpoint",
            "files removed since the checkpoint",
            "files added since the checkpoint",
        }

    def test_a_new_modification_time_alone_is_a_note(self, data):
        _, [loader] = train(data, 1, 9)
        os.utime(data / "part-001.parquet", (1, 1))
        found = audit(loader.state_dict(), data)
        assert found.is_fine
        assert "part-001.parquet" in found.notes[-1]

    def test_rows_are_not_read(self, data):
        rows, [loader] = train(data, 1, 9)
        for path in data.iterdir():
            footer = pq.read_metadata(path).serialized_size
            content = bytearray(path.read_bytes())
            content[4 : len(content) - footer - 8] = bytes(len(content) - footer - 12)
            times = path.stat()
            path.write_bytes(content)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        with pytest.raises(UnreadableFileError):
            list(open_loader(data)[0])
        found = audit(loader.state_dict(), data)
        assert found.files_match
        assert delivered(found) == by_file(rows)

    def test_a_filter_rules_out_row_groups_that_a_dataset_with_it_tells_apart(self, data):
        options = {"filters": pc.field("value") < 60, "shuffle": False, "shuffle_buffer_size": None}
        rows, [loader] = train(data, 1, 1000, **options)
        assert len(rows) == 60
        by_path = audit(loader.state_dict(), data)
        assert (by_path.total.done, by_path.total.left) == (100, ROWS - 100)
        assert any("rules out count as left" in note for note in by_path.notes)
        with_filter = audit(loader.state_dict(), loader)
        assert (with_filter.total.left, with_filter.total.ruled_out) == (0, ROWS - 100)
        other, _ = open_loader(data, filters=pc.field("value") < 70)
        assert any(line.startswith("filters changed") for line in audit(loader.state_dict(), other).differences)


class TestText:
    @pytest.fixture
    def text(self, tmp_path: Path) -> Path:
        directory = tmp_path / "text"
        directory.mkdir()
        (directory / "a.csv").write_bytes(csv_of(range(40)))
        (directory / "b.csv").write_bytes(csv_of(range(40, 100)))
        return directory

    def test_rows_that_are_not_counted_are_audited_in_bytes(self, text):
        loader, _ = open_text(text, format="csv", **SMALL)
        list(itertools.islice(loader, 6))
        found = audit(loader.state_dict(), text)
        assert found.unit == "bytes"
        assert found.files_match
        assert "bytes of uncompressed text" in " ".join(found.notes)
        assert 0 < found.total.done + found.total.under_way < found.total.rows
        [rank] = found.ranks
        assert rank.rows == found.total.done + found.total.under_way > 48
        list(loader)
        done = audit(loader.state_dict(), text).total
        assert (done.left, done.under_way) == (0, 0)

    def test_rows_that_are_counted_are_audited_in_rows_without_being_counted_again(self, text):
        loader, _ = open_text(text, format="csv", count_rows=True, **SMALL)
        list(itertools.islice(loader, 6))
        found = audit(loader.state_dict(), text)
        assert (found.unit, found.total.rows) == ("rows", 100)
        assert found.total.done + found.total.under_way == 48
        assert found.is_fine

    def test_counted_rows_of_a_file_that_cannot_be_cut_are_audited_after_a_shuffle(self, tmp_path):
        files = write_text(tmp_path / "files", "csv", suffixes=(".gz",) * 4)
        loader, _ = open_text(files, format="csv", count_rows=True, shuffle=True, shuffle_buffer_size=20)
        list(itertools.islice(loader, 6))
        found = audit(loader.state_dict(), files)
        assert found.total.done + found.total.under_way == 48
        assert found.is_fine
        assert found.files_match

    def test_a_text_file_that_was_written_again_is_told(self, text):
        loader, _ = open_text(text, format="csv", count_rows=True, **SMALL)
        list(itertools.islice(loader, 6))
        state = json.loads(json.dumps(loader.state_dict()))
        with (text / "b.csv").open("ab") as file:
            file.write(b"1,1,row\n")
        found = audit(state, text)
        assert [bool(file.change) for file in found.files] == [False, True]


class TestTables:
    def test_a_snapshot_of_iceberg_is_audited_with_its_dataset(self, tmp_path):
        catalog = new_catalog(tmp_path)
        rows = pa.table({"row": pa.array(range(300))})
        table = catalog.create_table("db.events", rows.schema)
        table.append(rows.slice(0, 200))
        options = {"catalog_config": config_of(tmp_path), "batch_size": 8, "num_workers": 0}
        loader, dataset = IcebergDataset.create_dataloader("db.events", **options)
        taken = [row for batch in itertools.islice(loader, 5) for row in rows_of(batch)]
        state = loader.state_dict()
        found = audit(state, dataset)
        assert found.total.done + found.total.under_way == len(taken) == 40
        assert found.is_fine
        with pytest.raises(ValueError, match=r"open it with IcebergDataset.create_dataloader\(\.\.\., snapshot_id=\d+"):
            audit(state, tmp_path / "warehouse")
        table.append(rows.slice(200))
        _, newer = IcebergDataset.create_dataloader("db.events", **options)
        found = audit(state, newer)
        assert found.files_match is False
        assert any(line.startswith("snapshot_id changed") for line in found.differences)

    def test_a_version_of_delta_lake_is_audited_with_its_dataset(self, tmp_path):
        write_deltalake(tmp_path / "table", pa.table({"row": pa.array(range(200))}))
        loader, dataset = DeltaDataset.create_dataloader(tmp_path / "table", batch_size=8, num_workers=0)
        list(itertools.islice(loader, 5))
        found = audit(loader.state_dict(), dataset)
        assert found.total.done + found.total.under_way == 40
        assert found.is_fine
        with pytest.raises(ValueError, match=r"open it with DeltaDataset.create_dataloader\(\.\.\., version=0"):
            audit(loader.state_dict(), tmp_path / "table")


@pytest.mark.parametrize(
    ("states", "message"),
    [({"step": 1}, "holds no state of a loader"), ([], "holds no state of a loader")],
    ids=["another dictionary", "an empty list"],
)
def test_what_is_no_state_is_refused(states, message):
    with pytest.raises(ValueError, match=message):
        audit(states)


def test_a_damaged_state_is_refused(data):
    state = open_loader(data)[0].state_dict()
    with pytest.raises(ValueError, match="checksum"):
        audit(state | {"batches_delivered": 3})


class TestSkippedAndExcludedRows:
    @pairwise(most=6, order=ORDERS, seed=range(4))
    def test_delivered_skipped_excluded_and_left_rows_are_the_epoch(self, data, order, seed):
        draw = random.Random(seed)
        settings = {"shuffle_buffer_size": None, "num_workers": draw.choice([0, 2]), **ORDERS[order]}
        firsts = dict(zip(by_file([]), itertools.accumulate((count for count, _ in FILES), initial=0), strict=False))
        gone = sorted(draw.sample(range(ROWS), 30))
        by_path = {
            path: [row - first for row in gone if first <= row < first + count]
            for (path, first), (count, _) in zip(firsts.items(), FILES, strict=True)
        }
        opened = [open_loader(data, num_ranks=2, rank=rank, **{**SHUFFLED, **settings}) for rank in range(2)]
        skipped: list[int] = []
        seen: list[int] = []
        begins = draw.randrange(4)
        for loader, dataset in opened:
            loader.exclude({path: rows for path, rows in by_path.items() if rows})
            loader.set_epoch(1)
            loader.skip_steps(begins, begins + 3)
            skipped += [firsts[path] + row for step in range(begins, begins + 3) for path, row in dataset.rows_at(step)]
            seen += [row for batch in itertools.islice(loader, 2 + draw.randrange(9)) for row in rows_of(batch)]
        states = [loader.state_dict() for loader, _ in opened]
        self.require(audit(states, data), seen, skipped, gone)
        loader, _ = open_loader(data, **{**SHUFFLED, **settings})
        loader.load_state_dict(states, strict=False)
        seen += [row for batch in itertools.islice(loader, draw.randrange(20)) for row in rows_of(batch)]
        self.require(audit(loader.state_dict(), data), seen, skipped, gone)

    def require(self, found: Audit, seen: list[int], skipped: list[int], excluded: list[int]) -> None:
        assert delivered(found) == by_file(seen)
        assert {file.path: file.skipped for file in found.files} == by_file(skipped)
        assert {file.path: file.excluded for file in found.files} == by_file(excluded)
        assert found.total.left == ROWS - len(seen) - len(skipped) - len(excluded)
        assert found.is_fine

    @pytest.mark.parametrize("options", [SHUFFLED, ROW_GROUPS], ids=["rows", "row groups"])
    def test_rows_that_are_excluded_before_they_are_reached_are_not_left(self, data, options):
        loader, _ = open_loader(data, **{**SHUFFLED, "shuffle_buffer_size": None, **options})
        seen = [row for batch in itertools.islice(loader, 20) for row in rows_of(batch)]
        state = loader.state_dict()
        loader, _ = open_loader(data, **{**SHUFFLED, "shuffle_buffer_size": None, **options})
        loader.load_state_dict(state)
        loader.exclude({"part-002.parquet": list(range(60))})
        gone = set(range(137, 137 + 60))
        self.require(audit(loader.state_dict(), data), seen, [], sorted(gone - set(seen)))
        rest = iter(loader)
        seen += rows_of(next(rest))
        self.require(audit(loader.state_dict(), data), seen, [], sorted(gone - set(seen)))
        seen += [row for batch in rest for row in rows_of(batch)]
        found = audit(loader.state_dict(), data)
        self.require(found, seen, [], sorted(gone - set(seen)))
        assert found.total.left == 0
        assert not found.notes

    def test_states_that_do_not_record_what_was_delivered_before_its_exclusion_say_so(self, data):
        """States of earlier releases. Rows whose step is passed count as delivered, then and after a load."""
        loader, _ = open_loader(data, **SHUFFLED)
        loader.exclude({"part-002.parquet": list(range(60))})
        iterator = iter(loader)
        for _ in range(20):
            next(iterator)
        state = loader.state_dict()
        rows = state["excluded"]
        older = edited(state, excluded={name: rows[name] for name in ("rows", "expressions")})
        found, now = audit(older, data), audit(state, data)
        assert any("states of earlier releases do not tell" in note for note in found.notes)
        passed = found.total.done + found.total.under_way
        assert passed == 8 * state["batches_delivered"] > now.total.done + now.total.under_way
        assert found.total.left == now.total.left
        loader, _ = open_loader(data, **SHUFFLED)
        loader.load_state_dict(older)
        assert audit(loader.state_dict(), data).total == found.total

    @pytest.mark.parametrize("options", ORDERS)
    @pytest.mark.parametrize("uneven", ["allow", "drop", "pad"])
    @pytest.mark.parametrize("run", [0, *(pytest.param(run, marks=pytest.mark.soak) for run in range(1, 40))])
    def test_every_row_is_delivered_skipped_excluded_dropped_or_left_under_every_resume(
        self, data, options, uneven, run
    ):
        """Rows are excluded and steps skipped before each leg, also while an iterator runs."""
        draw = random.Random(f"{options} {uneven} {run}")
        settings = {**SHUFFLED, "shuffle_buffer_size": None, **ORDERS[options], "uneven_ranks": uneven}
        states: list[Any] = []
        seen, excluded, skipped, ranks, epoch = set[int](), set[int](), set[int](), 2, draw.randrange(2)
        for leg in range(4):
            strict = draw.random() < 0.5
            ranks = ranks if strict else draw.randint(1, 3)
            opened = [open_loader(data, num_ranks=ranks, rank=rank, **settings) for rank in range(ranks)]
            new, late = (draw.sample(range(ROWS), draw.choice([0, 20])) for _ in range(2))
            first_step, count = max([state["batches_delivered"] for state in states], default=0), draw.choice([0, 3])
            steps = range(first_step + 1, first_step + 1 + count)
            for loader, _ in opened:
                if states:
                    loader.load_state_dict(states, strict=strict)
                else:
                    loader.set_epoch(epoch)
                loader.exclude(named(new))
            excluded |= set(new)
            if len(loader) > steps.stop and uneven != "allow":
                for _, dataset in opened:
                    skipped |= set(ids(row for step in steps for row in dataset.rows_at(step)))
                for loader, _ in opened:
                    if steps:
                        loader.skip_steps(steps.start, steps.stop)
            stop = None if leg == 3 else draw.randrange(12)
            taken = [itertools.islice(iter(loader), stop) for loader, _ in opened]
            seen |= {row for batches in taken for batch in batches for row in rows_of(batch)}
            for loader, _ in opened:
                loader.exclude(named(late))  # from the next iterator on
            excluded |= set(late)
            states = [json.loads(json.dumps(loader.state_dict())) for loader, _ in opened]
            found = audit(states, data)
            assert delivered(found) == by_file(seen)
            assert {file.path: file.skipped + file.excluded for file in found.files} == by_file(
                (skipped | excluded) - seen
            )
            assert len(skipped) <= found.total.skipped <= len(skipped) + len(excluded - seen)
            assert skipped or not found.total.skipped
            assert found.total.left + found.total.dropped == ROWS - len(seen | excluded | skipped)
            assert found.is_fine
        assert found.total.left == 0
