"""A `_metadata` file beside the data: it spares a plan all other footers, and is never trusted with rows."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from logged import LoggedFileSystem
from pairwise import pairwise
from support import all_rows_of, batches_of, open_loader, write_dataset

from torch_dataloader_utils import CheckpointMismatchError, ColumnError, MetadataFileWarning, UnreadableFileError

FILES = ((130, 50), (40, 40), (211, 40), (95, 30))


def write_metadata(directory: Path) -> None:
    """Write `_metadata` as pyarrow's documentation says: every file's footer with its path, in one."""
    whole = None
    for file in sorted(directory.rglob("*.parquet")):
        metadata = pq.read_metadata(file)
        metadata.set_file_path(str(file.relative_to(directory)))
        if whole is None:
            whole = metadata
        else:
            whole.append_row_groups(metadata)
    assert whole is not None
    whole.write_metadata_file(directory / "_metadata")


@pytest.fixture
def plain(tmp_path):
    write_dataset(tmp_path / "plain", FILES)
    return tmp_path / "plain"


@pytest.fixture
def described(tmp_path):
    """The same files, one of them deeper, with `_metadata`."""
    write_dataset(tmp_path / "described", FILES)
    write_metadata(tmp_path / "described")
    return tmp_path / "described"


class Logged:
    """Opens a directory as a storage that is not local, and tells what was read of which file."""

    def __init__(self, log: Path) -> None:
        fsspec.register_implementation("logged", LoggedFileSystem, clobber=True)
        self.log = log
        self.options = {"storage_options": {"log": str(log)}}

    def entries(self) -> list[list[object]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def take(self) -> list[str]:
        """Return the names of the files that were opened or read since the last call."""
        names = [Path(str(entry[1])).name for entry in self.entries()]
        self.log.unlink(missing_ok=True)
        return names


@pytest.fixture
def logged(tmp_path):
    return Logged(tmp_path / "log")


OPTIONS = [
    {},
    {"num_workers": 2},
    {"shuffle": True, "shuffle_seed": 3},
    {"shuffle": True, "shuffle_buffer_size": 120},
    {"filters": pc.field("value") >= 170, "columns": ["name"]},
    {"filters": pc.field("score") < 20.0, "num_workers": 2},
]


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_the_batches_are_those_of_the_same_files_without_it(plain, described, logged, options, remote):
    expected = batches_of(open_loader(plain, **options)[0])
    if remote:
        loader, _ = open_loader(f"logged://{described}", **logged.options, **options)
    else:
        loader, _ = open_loader(described, **options)
    for _ in range(2):
        assert batches_of(loader) == expected


def test_a_plan_reads_it_and_no_other_footer_and_a_file_is_read_when_its_rows_are_due(described, logged):
    loader, dataset = open_loader(f"logged://{described}", **logged.options, shuffle=True, read_ahead_bytes=2000)
    assert len(loader) == -(-sum(rows for rows, _ in FILES) // 16)
    dataset.set_epoch(1)
    assert set(logged.take()) == {"_metadata"}
    assert len(all_rows_of(loader)) == sum(rows for rows, _ in FILES)
    assert set(logged.take()) == {f"part-{number:03d}.parquet" for number in range(len(FILES))}


def test_a_footer_is_read_once_however_many_epochs_there_are(described, logged):
    loader, _ = open_loader(f"logged://{described}", **logged.options)
    ends = {str(file): file.stat().st_size for file in described.glob("*.parquet")}

    def footers() -> int:
        entries = [entry for entry in logged.entries() if entry[0] == "range"]
        logged.take()
        return sum(entry[3] == ends.get(str(entry[1])) for entry in entries)

    all_rows_of(loader)
    assert footers() == len(FILES)
    all_rows_of(loader)
    assert footers() == 0


def test_a_run_resumes_with_it_at_any_batch(described):
    whole = batches_of(open_loader(described, shuffle=True, shuffle_buffer_size=90)[0])
    for stop in range(0, len(whole), 3):
        loader, _ = open_loader(described, shuffle=True, shuffle_buffer_size=90)
        batches = iter(loader)
        for _ in range(stop):
            next(batches)
        again, _ = open_loader(described, shuffle=True, shuffle_buffer_size=90)
        again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        assert batches_of(again) == whole[stop:]


def test_a_filter_rules_out_the_same_row_groups(plain, described):
    filters = (pc.field("value") > 60) & (pc.field("value") < 150)
    read = []
    for path in (plain, described):
        loader, dataset = open_loader(path, filters=filters)
        assert len(all_rows_of(loader)) == 89
        read.append(dataset.get_metrics()["bytes_read"])
    assert read[0] == read[1]


def test_nulls_that_it_announces_are_an_error_at_once(tmp_path):
    for name in ("a", "b"):
        values = pa.array([1, None if name == "b" else 2, 3])
        pq.write_table(pa.table({"x": values}), tmp_path / f"{name}.parquet")
    write_metadata(tmp_path)
    with pytest.raises(ColumnError, match=r"'x'.*row group 0 of .*b\.parquet"):
        open_loader(tmp_path)


def test_directories_below_are_described_too(tmp_path):
    write_dataset(tmp_path / "a", ((30, 10),))
    write_dataset(tmp_path / "b" / "c", ((20, 10),))
    write_metadata(tmp_path)
    _, dataset = open_loader(tmp_path)
    assert {entry[2][:10] for entry in dataset.state_dict()["files"]} == {"_metadata:"}
    assert len(all_rows_of(open_loader(tmp_path)[0])) == 50


def test_globs_lists_and_files_do_without_it(described):
    for path in (described / "*.parquet", [described / "part-000.parquet"], described / "part-000.parquet"):
        _, dataset = open_loader(path)
        assert not any(entry[2].startswith("_metadata:") for entry in dataset.state_dict()["files"])


@pytest.mark.parametrize("options", [{}, {"filters": pc.field("value") >= 100}])
def test_a_manifest_takes_it_along(described, logged, options):
    path = f"logged://{described}"
    loader, dataset = open_loader(path, **logged.options)
    all_rows_of(loader)  # footers that were read meanwhile make no difference
    manifest = dataset.dump_manifest()
    logged.take()
    copy, other = open_loader(path, manifest=manifest, **logged.options, **options)
    assert logged.take() == []
    assert all_rows_of(copy) == all_rows_of(open_loader(path, **logged.options, **options)[0])
    assert other.dump_manifest() == manifest


# Where it does not fit ------------------------------------------------------------------------------------------------


def changed_by_a_rewrite(directory: Path) -> None:
    table = pq.read_table(directory / "part-001.parquet")
    pq.write_table(table, directory / "part-001.parquet", row_group_size=20)


def changed_in_place(directory: Path) -> None:
    """Other rows, as many row groups of as many rows."""
    table = pq.read_table(directory / "part-001.parquet")
    other = table.set_column(2, "name", pa.array(["another name"] * len(table)))
    pq.write_table(other, directory / "part-001.parquet", row_group_size=40)


@pairwise(
    change=[changed_by_a_rewrite, changed_in_place],
    options=[{}, {"num_workers": 2}, {"shuffle": True, "shuffle_buffer_size": 99}],
    remote=[False, True],
)
def test_a_file_that_is_newer_is_an_error_before_any_of_its_rows(described, logged, change, options, remote):
    change(described)
    path = f"logged://{described}" if remote else described
    loader, _ = open_loader(path, **(logged.options if remote else {}), **options)
    delivered: list[int] = []
    with pytest.raises(UnreadableFileError, match=r"part-001\.parquet is not the file that `_metadata` describes"):
        delivered.extend(row for batch in loader for row in batch["row"].tolist())
    assert not set(delivered) & set(range(130, 170))


@pytest.mark.parametrize("remote", [False, True])
def test_a_file_that_a_filter_rules_out_by_it_is_looked_at_all_the_same(described, logged, remote):
    table = pq.read_table(described / "part-003.parquet")
    matching = pa.array(np.zeros(len(table), np.int64))
    pq.write_table(table.set_column(0, "value", matching), described / "part-003.parquet", row_group_size=30)
    path = f"logged://{described}" if remote else described
    options = logged.options if remote else {}
    with pytest.raises(UnreadableFileError, match=r"part-003\.parquet is not the file that `_metadata` describes"):
        open_loader(path, filters=pc.field("value") < 10, **options)
    write_metadata(described)
    loader, _ = open_loader(path, filters=pc.field("value") < 10, **options)
    assert len(all_rows_of(loader)) == 10 + len(table)


@pytest.mark.parametrize("statistics", [False, True])
def test_another_type_and_other_statistics_in_the_same_place_are_noticed(tmp_path, statistics):
    numbers = np.arange(50)
    plain = {"use_dictionary": False, "compression": "none", "write_statistics": statistics, "store_schema": False}
    pq.write_table(pa.table({"x": numbers}), tmp_path / "a.parquet", **plain)
    write_metadata(tmp_path)
    other = numbers + 1000 if statistics else numbers.astype(float)
    before = (tmp_path / "a.parquet").stat().st_size
    pq.write_table(pa.table({"x": other}), tmp_path / "a.parquet", **plain)
    assert (tmp_path / "a.parquet").stat().st_size == before
    loader, _ = open_loader(tmp_path)
    with pytest.raises(UnreadableFileError, match="not the file that `_metadata` describes"):
        next(iter(loader))


def added(directory: Path) -> None:
    write_dataset(directory / "new", ((10, 10),))


def removed(directory: Path) -> None:
    (directory / "part-002.parquet").unlink()


def not_parquet(directory: Path) -> None:
    (directory / "_metadata").write_text("{}")


def cut_off(directory: Path) -> None:
    content = (directory / "_metadata").read_bytes()
    (directory / "_metadata").write_bytes(content[: len(content) // 2] + content[-8:])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (added, r"it does not describe new/part-000\.parquet\. Write it again"),
        (removed, r"it describes missing part-002\.parquet\. Write it again"),
        (not_parquet, "is not a Parquet file"),
        (cut_off, "_metadata is not used"),
    ],
)
def test_one_that_does_not_fit_is_left_aside_with_a_warning(described, change, text):
    change(described)
    with pytest.warns(MetadataFileWarning, match=text):
        loader, _ = open_loader(described)
    rows = sum(len(pq.read_table(file)) for file in described.rglob("*.parquet"))
    assert all_rows_of(loader) == list(range(rows))


def test_one_that_fits_gives_no_warning(described):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_loader(described)


def test_a_state_from_before_it_was_written_is_refused_and_the_message_says_so(described):
    (described / "_metadata").rename(described / "away")
    loader, _ = open_loader(described)
    next(iter(loader))
    before = loader.state_dict()
    (described / "away").rename(described / "_metadata")
    loader, _ = open_loader(described)
    with pytest.raises(CheckpointMismatchError, match="`_metadata` describes the files now and did not then"):
        loader.load_state_dict(before)
    next(iter(loader))
    after = loader.state_dict()
    (described / "_metadata").unlink()
    with pytest.raises(CheckpointMismatchError, match="`_metadata` described the files then and does not now"):
        open_loader(described)[0].load_state_dict(after)
