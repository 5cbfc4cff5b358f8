"""The run log: each step that counts, of any run and number of ranks, has the rows that were delivered in it."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
from jobs.ranks import run_ranks, running_ranks
from pairwise import pairwise
from support import open_loader, rows_of, write_dataset
from torch.utils.data import DataLoader

from torch_dataloader_utils import LedgerUnknownError, RunLog, StructuredDataset, UnreadableFileError

pytestmark = [
    pytest.mark.usefixtures("leaves_nothing_behind"),
    pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning"),
]

FILES = ((130, 50), (7, 50), (211, 40), (95, 30))
ROWS = 443
SHUFFLED: dict[str, Any] = {"shuffle": True, "shuffle_seed": 7, "shuffle_buffer_size": 60, "batch_size": 8}

Steps = dict[tuple[int, int, int], list[int]]
"""The rows of each step, by epoch, step and rank."""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    assert write_dataset(tmp_path / "data", FILES) == ROWS
    return tmp_path / "data"


class Training:
    """A training of several runs with one log, in this process."""

    def __init__(self, data: Any, log: Any, **options: Any) -> None:
        self.data, self.log, self.options = data, log, {**SHUFFLED, **options}
        self.committed: Steps = {}

    def open(self, num_ranks: int = 1, rank: int = 0, **options: Any) -> Any:
        given = {**self.options, "num_ranks": num_ranks, "rank": rank, "run_log": self.log, **options}
        return open_loader(self.data, **given)

    def run(
        self, num_ranks: int, steps: int, states: Sequence[Any] = (), *, strict: bool = False, **options: Any
    ) -> list[dict[str, Any]]:
        """Let all ranks make some steps of an epoch from states on; what was delivered after them did not count."""
        opened = [self.open(num_ranks, rank, **options) for rank in range(num_ranks)]
        for rank, (loader, _) in enumerate(opened):
            if states:
                is_own = strict and len(states) == num_ranks and "virtual_ranks" not in self.options
                loader.load_state_dict(states[rank] if is_own else list(states), strict=strict)
        first = opened[0][0].state_dict()["batches_delivered"]
        epoch = opened[0][1].epoch
        rolled_back = [key for key in self.committed if key[:2] >= (epoch, first)]
        for key in rolled_back:
            del self.committed[key]
        saved = []
        for rank, (loader, _) in enumerate(opened):
            step = loader.state_dict()["batches_delivered"]
            for batch in itertools.islice(loader, steps):
                self.committed[epoch, step, rank] = rows_of(batch)
                step += 1
            saved.append(loader.state_dict())
        return saved

    def require_answers(self, dataset: StructuredDataset) -> None:
        """Compare every step that counts with the ledger's answer, and each of its rows too."""
        require_answers(dataset, self.committed)


def require_answers(dataset: StructuredDataset, committed: Steps) -> None:
    assert committed
    first = dataset._opened_files.manifest.first_rows
    for (epoch, step, rank), rows in committed.items():
        found = list(dataset.rows_at(step, epoch, rank))
        assert [first[path] + row for path, row in found] == rows, (epoch, step, rank)
    for (epoch, step, rank), rows in list(committed.items())[::7]:
        path, row = next(iter(dataset.rows_at(step, epoch, rank)))
        at = dataset.step_of(path, row, epoch)
        assert at is not None
        assert (at.epoch, at.step, at.rank, at.place) == (epoch, step, rank, 0)
        assert not at.others
        assert first[path] + row == rows[0]


def files_of(log: Path) -> list[Path]:
    return sorted(log.iterdir())


class TestRunsThatWereKilled:
    @pytest.mark.parametrize("workers", [0, 2], ids=["in process", "2 workers"])
    def test_three_then_two_then_five_ranks_killed_in_between(self, tmp_path, data, workers):
        options = {**SHUFFLED, "uneven_ranks": "drop", "num_workers": workers}
        given = {"data": str(data), "directory": str(tmp_path), "options": options, "epochs": 2, "every": 3}
        for run, (ranks, die) in enumerate([(3, 8), (2, 25), (5, None)]):
            arguments = {**given, "run": run, "die": die}
            if die is None:
                run_ranks("run_log_job.py", ranks, arguments, tmp_path)
                continue
            with running_ranks("run_log_job.py", ranks, arguments, tmp_path) as job:
                assert job.wait(120) == -9, job.output()
                job.end()
        committed, rolled_back = recorded(tmp_path, [3, 2, 5])
        assert rolled_back, "the kills rolled nothing back"
        _, dataset = open_loader(data, **SHUFFLED, run_log=tmp_path / "log")
        require_answers(dataset, committed)
        log = RunLog.read(tmp_path / "log")
        assert [segment.num_ranks for segment in log.segments] == [3, 2, 2, 5]
        assert [segment.began for segment in log.segments] == ["epoch", "elastic state", "epoch", "elastic state"]
        assert [segment.rolled_back for segment in log.segments] == [True, False, True, False]


def recorded(directory: Path, ranks: Sequence[int]) -> tuple[Steps, Steps]:
    """Return the steps of runs that count, and those that were rolled back."""
    committed: Steps = {}
    rolled_back: Steps = {}
    for run, count in enumerate(ranks):
        own: Steps = {}
        for rank in range(count):
            lines = (directory / f"steps-{run}-{rank}.jsonl").read_text().split("\n")[:-1]
            own |= {(epoch, step, rank): rows for epoch, step, rows in map(json.loads, lines)}
        begins = min(key[:2] for key in own)
        for key in [key for key in committed if key[:2] >= begins]:
            rolled_back[key] = committed.pop(key)
        committed |= own
    return committed, rolled_back


class TestRunsInThisProcess:
    def test_every_step_that_counts_is_answered_after_elastic_and_strict_loads(self, tmp_path, data):
        training = Training(data, tmp_path / "log")
        saved = training.run(3, 4)
        saved = training.run(2, 5, saved)
        saved = training.run(2, 3, saved, strict=True)
        training.run(5, 100, saved)
        training.require_answers(training.open()[1])
        log = RunLog.read(tmp_path / "log")
        assert [segment.began for segment in log.segments] == ["epoch", "elastic state", "state", "elastic state"]
        assert [(segment.first_step, segment.stop) for segment in log.segments] == [(0, 4), (4, 9), (9, 12), (12, None)]
        assert log.segment_of(0, 8) == log.segments[1]
        assert log.segment_of(1, 0) is None

    def test_a_crash_after_step_100_that_resumes_at_80_rolls_steps_back(self, tmp_path, data):
        training = Training(data, tmp_path / "log", batch_size=3)
        saved = training.run(1, 80)
        training.run(1, 20, saved, strict=True)
        training.run(1, 30, saved, strict=True)
        first, second, third = RunLog.read(tmp_path / "log").segments
        assert (first.stop, second.stop, third.stop) == (80, 80, None)
        assert second.rolled_back
        training.require_answers(training.open()[1])

    def test_steps_at_which_ranks_stopped_unevenly_end_for_each_rank_where_it_stopped(self, tmp_path, data):
        training = Training(data, tmp_path / "log")
        opened = [training.open(3, rank) for rank in range(3)]
        saved, rows = [], {}
        for rank, (loader, _) in enumerate(opened):
            taken = list(itertools.islice(loader, 4 + rank))
            rows |= {(0, step, rank): rows_of(batch) for step, batch in enumerate(taken)}
            saved.append(loader.state_dict())
        training.run(2, 100, saved)
        _, dataset = training.open()
        require_answers(dataset, rows | training.committed)
        with pytest.raises(ValueError, match="rank 0 makes steps 0 to 3"):
            dataset.rows_at(5, 0, 0)
        [before, _] = RunLog.read(tmp_path / "log").segments
        assert before.rank_stops == (4, 5, 6)

    def test_batches_of_another_size_after_a_strict_load(self, tmp_path, data):
        training = Training(data, tmp_path / "log")
        saved = training.run(2, 4)
        training.run(2, 6, saved, strict=True, batch_size=5)
        training.require_answers(training.open()[1])

    @pytest.mark.parametrize("began", [False, True], ids=["before iter", "after iter"])
    def test_batches_of_another_size_after_a_state_that_was_saved_again_before_the_first_of_them(
        self, tmp_path, data, began
    ):
        training = Training(data, tmp_path / "log")
        saved = training.run(1, 4)
        loader, _ = training.open(batch_size=11)
        loader.load_state_dict(saved[0])
        iterator = iter(loader) if began else None
        again = [loader.state_dict()]
        del iterator
        assert again[0]["batch_size"] == 8
        training.run(1, 4, again, strict=True, batch_size=11)
        training.require_answers(training.open()[1])

    def test_rows_that_were_excluded_on_the_way_and_steps_that_were_skipped(self, tmp_path, data):
        training = Training(data, tmp_path / "log")
        rows: Steps = {}

        def deliver(loader: Any, steps: int, rank: int = 0) -> Any:
            for batch in itertools.islice(loader, steps):
                state = loader.state_dict()  # a batch that lost all of its rows is not delivered, but is a step
                rows[0, state["batches_delivered"] - 1, rank] = rows_of(batch)
            return state

        state = deliver(training.open()[0], 4)
        loader, _ = training.open()
        loader.load_state_dict(state)
        loader.exclude({"part-000.parquet": list(range(0, 130, 2)), "part-002.parquet": list(range(50))})
        loader.skip_steps(6, 8)
        state = deliver(loader, 5)
        assert {(0, 6, 0), (0, 7, 0)}.isdisjoint(rows)
        assert any(len(batch) < 8 for batch in rows.values()), "no excluded row was reached"
        for rank in range(2):
            loader, _ = training.open(2, rank)
            loader.load_state_dict(state, strict=False)
            deliver(loader, 6, rank)
        _, dataset = training.open()
        first_rows = dataset._opened_files.manifest.first_rows
        for (epoch, step, rank), expected in rows.items():
            found = dataset.rows_at(step, epoch, rank)
            assert [first_rows[path] + row for path, row in found] == expected, (step, rank)
        assert [segment.skipped for segment in RunLog.read(tmp_path / "log").segments] == [(), ((6, 8),), ()]

    def test_batches_of_another_size_of_ranks_that_had_made_different_numbers_of_steps(self, tmp_path, data):
        training = Training(data, tmp_path / "log")
        rows: Steps = {}
        states = []
        for rank in range(2):
            loader, _ = training.open(2, rank)
            taken = itertools.islice(loader, 4 + 2 * rank)
            rows |= {(0, step, rank): rows_of(batch) for step, batch in enumerate(taken)}
            states.append(loader.state_dict())
        for rank in range(2):
            loader, _ = training.open(2, rank, batch_size=5)
            loader.load_state_dict(states)
            rows |= {(0, step, rank): rows_of(batch) for step, batch in enumerate(loader, start=4 + 2 * rank)}
        require_answers(training.open()[1], rows)

    def test_skipped_steps_that_are_restored_after_the_last_one_of_an_elastic_load(self, tmp_path, data):
        training = Training(data, tmp_path / "log")
        saved = training.run(2, 3)
        rows = training.committed
        loader, _ = training.open()
        loader.load_state_dict(saved, strict=False)
        loader.skip_steps(5, 7)
        for restores in (False, True):
            if restores:
                loader.restore_skipped()
            for batch in loader:
                rows[0, loader.state_dict()["batches_delivered"] - 1, 0] = rows_of(batch)
        assert sorted(row for batch in rows.values() for row in batch) == list(range(ROWS))
        segments = RunLog.read(tmp_path / "log").segments
        assert [(one.began, one.restores) for one in segments] == [
            ("epoch", False),
            ("elastic state", False),
            ("state", True),
        ]
        require_answers(training.open()[1], rows)

    @pytest.mark.parametrize("ranks", [(4, 2, 1), (1, 2, 4)], ids=["fewer ranks", "more ranks"])
    def test_a_virtual_topology_on_other_ranks(self, tmp_path, data, ranks):
        grid = {"virtual_ranks": 4, "virtual_workers": 2, "uneven_ranks": "drop"}
        training = Training(data, tmp_path / "log", **grid)
        saved: Sequence[Any] = ()
        for count in ranks:
            saved = training.run(count, 3, saved, strict=bool(saved), global_batch_size=32, batch_size=None)
        _, dataset = training.open(global_batch_size=32, batch_size=None)
        training.require_answers(dataset)

    @pytest.mark.parametrize(
        "given_up", ["two ranks", "batches of another size", "other steps skipped", "the next epoch"]
    )
    @pytest.mark.parametrize("ranks", [1, 2])
    def test_a_way_that_was_given_up_for_a_later_checkpoint_does_not_count(self, tmp_path, data, given_up, ranks):
        training = Training(data, tmp_path / "log")
        early = training.run(1, 4)
        late = training.run(1, 4, early, strict=True)
        committed = dict(training.committed)
        if given_up == "two ranks":
            training.run(2, 3, early)
        elif given_up == "batches of another size":
            training.run(1, 3, early, strict=True, batch_size=5)
        elif given_up == "other steps skipped":
            loader, _ = training.open()
            loader.load_state_dict(early[0])
            loader.skip_steps(5, 7)
            assert len(list(itertools.islice(loader, 2))) == 2
        else:
            loader, dataset = training.open()
            dataset.set_epoch(1)
            assert len(list(itertools.islice(loader, 2))) == 2
        training.committed = committed
        training.run(ranks, 4, late, strict=ranks == 1, **({} if ranks == 1 else {"batch_size": 4}))
        _, dataset = training.open(ranks, batch_size=8 if ranks == 1 else 4)
        training.require_answers(dataset)
        counted = [segment for segment in RunLog.read(tmp_path / "log").segments if segment.stop != segment.first_step]
        assert [segment.first_step for segment in counted] == [0, 4, 8]

    def test_epochs_that_one_process_delivers_end_where_it_left_them(self, tmp_path, data):
        training = Training(data, tmp_path / "log")
        loader, dataset = training.open()
        rows: Steps = {}
        for epoch in range(3):
            loader.set_epoch(epoch)
            for step, batch in enumerate(itertools.islice(loader, 5 if epoch == 1 else None)):
                rows[epoch, step, 0] = rows_of(batch)
        segments = RunLog.read(tmp_path / "log").segments
        assert [(one.epoch, one.stop, one.rolled_back) for one in segments] == [
            (0, None, False),
            (1, 5, False),
            (2, None, False),
        ]
        require_answers(training.open()[1], rows)
        require_answers(dataset, rows)

    @pytest.mark.parametrize("breaks", [False, True], ids=["to its end", "to its last batch"])
    def test_ranks_that_make_more_steps_than_the_first_have_all_of_theirs_in_an_ended_epoch(self, tmp_path, breaks):
        write_dataset(tmp_path / "data", ((10, 10), (40, 40)))
        options = {"batch_size": 5, "split_rows": 40, "run_log": str(tmp_path / "log")}
        opened = [open_loader(tmp_path / "data", num_ranks=2, rank=rank, **options) for rank in range(2)]
        rows: Steps = {}
        for epoch in range(2):
            for rank, (loader, _) in enumerate(opened):
                loader.set_epoch(epoch)
                steps = len(loader)
                for step, batch in enumerate(itertools.islice(loader, steps) if breaks else loader):
                    rows[epoch, step, rank] = rows_of(batch)
        assert [len(loader) for loader, _ in opened] == [2, 8]
        require_answers(open_loader(tmp_path / "data", **options)[1], rows)

    @pairwise(most=2, ranks=[1, 2], workers=[0, 2])
    def test_a_scan_tells_the_steps_of_each_batch_size_behind_a_filter(self, tmp_path, data, ranks, workers):
        """Where batches of one size begin, the scan of those before them tells.

        In one process the seven steps are of 35 rows, as seven batches of the last size would be.
        """
        passes = pc.bit_wise_and(pc.field("value"), 3) != 0
        training = Training(data, tmp_path / "log", filters=passes, num_workers=workers)
        states: list[dict[str, Any]] = []
        for size, steps in ((6, 2), (4, 3), (6, 1), (5, 1)):
            states = training.run(ranks, steps, states, strict=True, batch_size=size)
        resumed = training.open(ranks, batch_size=6)
        resumed[0].load_state_dict(states[0])
        for dataset in (training.open(ranks, batch_size=4)[1], resumed[1]):
            first = dataset._opened_files.manifest.first_rows
            for (_, step, rank), rows in training.committed.items():
                found = dataset.rows_at(step, 0, rank, scan=True)
                assert [first[path] + row for path, row in found] == rows, (step, rank)
                if step in (1, 3, 4):  # the others are one of each stretch
                    continue
                path, row = list(found)[-1]
                at = dataset.step_of(path, row, 0, scan=True)
                assert at is not None
                assert (at.step, at.rank, at.place) == (step, rank, len(rows) - 1)

    def test_a_state_loaded_in_the_same_process_rolls_back_too(self, tmp_path, data):
        training = Training(data, tmp_path / "log")
        loader, _ = training.open()
        batches = iter(loader)
        rows = {(0, step, 0): rows_of(next(batches)) for step in range(4)}
        saved = loader.state_dict()
        for _ in range(3):
            next(batches)
        loader.load_state_dict(saved)
        rows |= {(0, step, 0): rows_of(batch) for step, batch in enumerate(loader, start=4)}
        first, _ = RunLog.read(tmp_path / "log").segments
        assert (first.stop, first.reached, first.rolled_back) == (4, 7, True)
        require_answers(training.open()[1], rows)

    def test_the_first_worker_of_a_plain_loader_writes(self, tmp_path, data):
        _, dataset = Training(data, tmp_path / "log").open()
        for _ in DataLoader(dataset, batch_size=None, num_workers=2):
            pass
        [segment] = RunLog.read(tmp_path / "log").segments
        assert (segment.began, segment.settings["num_workers"]) == ("epoch", 2)

    def test_nothing_is_written_before_the_first_iteration_nor_by_other_ranks(self, tmp_path, data):
        training = Training(data, tmp_path / "log")
        loaders = [training.open(2, rank)[0] for rank in range(2)]
        assert not (tmp_path / "log").exists()
        next(iter(loaders[1]))
        assert not (tmp_path / "log").exists()
        next(iter(loaders[0]))
        assert len(files_of(tmp_path / "log")) == 1


class TestWhatTheLogDoesNotKnow:
    def test_steps_before_an_elastic_load_are_unknown_without_a_log(self, data):
        training = Training(data, None)
        saved = training.run(2, 4)
        loader, dataset = training.open()
        loader.load_state_dict(saved, strict=False)
        with pytest.raises(LedgerUnknownError, match="run_log="):
            dataset.rows_at(2, rank=0)

    def test_a_lost_file_makes_what_it_may_have_ended_unknown(self, tmp_path, data):
        training = Training(data, tmp_path / "log")
        saved = training.run(3, 4)
        saved = training.run(2, 5, saved)
        training.run(4, 5, saved)
        files_of(tmp_path / "log")[1].unlink()
        _, dataset = training.open()
        with pytest.raises(LedgerUnknownError, match=r"a file that comes after segment-00000001-\w+\.json is missing"):
            dataset.rows_at(2, 0, 0)
        assert [segment.is_certain for segment in RunLog.read(tmp_path / "log").segments] == [False, True]

    def test_an_epoch_before_the_log_began_is_unknown_and_a_later_one_is_what_is_planned(self, tmp_path, data):
        training = Training(data, tmp_path / "log")
        loader, _ = training.open()
        loader.set_epoch(3)
        next(iter(loader))
        _, dataset = training.open()
        with pytest.raises(LedgerUnknownError, match="epoch 1 is not in the run log"):
            dataset.rows_at(0, 1)
        assert len(dataset.rows_at(0, 4)) == 8

    def test_other_files_or_another_filter_than_those_of_the_log_are_refused(self, tmp_path, data):
        training = Training(data, tmp_path / "log")
        saved = training.run(2, 4)
        training.run(3, 4, saved)
        write_dataset(data, (*FILES, (10, 5)))
        _, dataset = training.open()
        with pytest.raises(LedgerUnknownError, match=r"with other \['files'\] than this dataset has"):
            dataset.rows_at(2, 0, 0)

    def test_steps_of_this_process_are_known_where_those_of_the_log_had_other_files(self, tmp_path, data):
        training = Training(data, tmp_path / "log")
        saved = training.run(1, 4)
        write_dataset(data, (*FILES, (10, 5)))
        loader, dataset = training.open()
        loader.load_state_dict(saved, strict=False, on_changed_files="continue")
        delivered = rows_of(next(iter(loader)))
        first = dataset._opened_files.manifest.first_rows
        assert [first[path] + row for path, row in dataset.rows_at(4)] == delivered
        assert len(dataset.rows_at(20)) == 8
        with pytest.raises(LedgerUnknownError, match=r"with other \['files'\] than this dataset has"):
            dataset.rows_at(3)


class TestItsFiles:
    def test_a_log_that_cannot_be_written_is_an_error_and_changes_nothing(self, tmp_path, data):
        (tmp_path / "log").write_text("a file")
        loader, _ = Training(data, tmp_path / "log").open()
        before = loader.state_dict()
        with pytest.raises(OSError, match=re.escape(str(tmp_path / "log"))):
            iter(loader)
        assert loader.state_dict() == before
        (tmp_path / "log").unlink()
        assert len(list(loader)) == 56

    def test_a_file_that_is_cut_short_is_left_out_and_a_damaged_one_is_refused(self, tmp_path, data, caplog):
        training = Training(data, tmp_path / "log")
        saved = training.run(2, 4)
        training.run(3, 4, saved)
        first, last = files_of(tmp_path / "log")
        whole = last.read_text()
        last.write_text(whole[: len(whole) // 2])
        assert len(RunLog.read(tmp_path / "log").segments) == 1
        assert "is cut short" in caplog.text
        last.write_text(whole.replace('"num_ranks": 3', '"num_ranks": 4'))
        with pytest.raises(ValueError, match=f"{last.name} is damaged or foreign: .*checksum"):
            RunLog.read(tmp_path / "log")
        last.write_text('{"format": "other"}')
        with pytest.raises(ValueError, match=r"expected 'torch_dataloader_utils\.RunLog'"):
            RunLog.read(tmp_path / "log")
        last.write_text(whole)
        (tmp_path / "log" / "notes.txt").write_text("of the user")
        assert len(RunLog.read(tmp_path / "log").segments) == 2
        assert first.exists()

    def test_two_runs_that_write_at_the_same_time_are_told(self, tmp_path, data):
        for name in ("one", "other"):
            Training(data, tmp_path / name).run(1, 1)
        [other] = files_of(tmp_path / "other")
        other.rename(tmp_path / "one" / other.name)
        with pytest.raises(ValueError, match="two runs wrote into this log at the same time: segment-00000001"):
            RunLog.read(tmp_path / "one")

    def test_a_log_that_does_not_exist_has_no_segments(self, tmp_path):
        assert RunLog.read(tmp_path / "none").segments == ()

    def test_names_rise_and_are_never_used_again(self, tmp_path, data):
        training = Training(data, tmp_path / "log")
        names = []
        for _ in range(3):
            training.run(1, 1)
            names += [path.name for path in files_of(tmp_path / "log") if path.name not in names]
        assert names == sorted(names)
        files_of(tmp_path / "log")[-1].unlink()
        training.run(1, 1)
        [new] = {path.name for path in files_of(tmp_path / "log")} - set(names)
        assert new.startswith("segment-00000003-")


def test_on_s3_with_the_storage_options_of_the_data_and_without_a_secret_in_it(tmp_path, data, s3):
    bucket = s3.new_bucket(data)
    options = s3.storage_options()
    training = Training(f"s3://{bucket}", f"s3://{bucket}/runs/first", storage_options=options, format="parquet")
    training.data = [f"s3://{bucket}/part-{number:03d}.parquet" for number in range(len(FILES))]
    saved = training.run(3, 4)
    training.run(2, 100, saved)
    training.require_answers(training.open()[1])
    log = RunLog.read(f"s3://{bucket}/runs/first", options)
    assert [segment.num_ranks for segment in log.segments] == [3, 2]
    client = s3.client()
    found = client.list_objects_v2(Bucket=bucket, Prefix="runs/first/")["Contents"]
    contents = [client.get_object(Bucket=bucket, Key=one["Key"])["Body"].read().decode() for one in found]
    assert len(contents) == 2
    assert not any(secret in content for content in contents for secret in (options["key"], options["secret"]))


def test_a_bucket_that_does_not_exist_is_an_error_that_names_the_file(data, s3):
    bucket = s3.new_bucket(data)
    training = Training(
        [f"s3://{bucket}/part-000.parquet"], "s3://no-such-bucket/log", storage_options=s3.storage_options()
    )
    with pytest.raises((UnreadableFileError, FileNotFoundError), match="no-such-bucket/log/segment-00000001"):
        iter(training.open()[0])
