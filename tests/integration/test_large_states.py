"""How large a state is, and how long it takes, where an epoch has very many row ranges."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from deliveries import Delivery, plain_delivery, through_json

from torch_dataloader_utils.checkpoint import epoch_record
from torch_dataloader_utils.checkpoint.checksum import checksum_of
from torch_dataloader_utils.checkpoint.dump import dump_state
from torch_dataloader_utils.checkpoint.epoch_record import EpochRecord
from torch_dataloader_utils.checkpoint.progress import Progress, StreamProgress
from torch_dataloader_utils.planning.assignment import Receipt
from torch_dataloader_utils.planning.manifest import DataFile, Manifest, RowGroup, Split
from torch_dataloader_utils.planning.plan import DeliveredBaseline, PlanOptions
from torch_dataloader_utils.planning.row_ranges import merged_row_numbers, row_numbers


def _many_row_groups(files: int, groups: int, rows: int, root: str = "s3://bucket/data") -> Manifest:
    row_groups = (RowGroup(rows, 1000),) * groups
    return Manifest(
        root, tuple(DataFile(f"part-{number:05d}.parquet", 10**8, "0" * 16, row_groups) for number in range(files))
    )


def _size(state: dict[str, Any]) -> int:
    """Bytes of a state in JSON, the file table apart."""
    return len(json.dumps({**state, "files": None}))


def _delivered(delivery: Delivery, shards: int) -> Progress:
    """The progress once a stream's first shards are done."""
    return delivery.fresh().advanced(Receipt(0, shards, 0, rows=1))


many_ranges = pytest.mark.parametrize("ranges", [20_000, pytest.param(100_000, marks=pytest.mark.soak)])


@many_ranges
def test_completed_ranges_that_cannot_be_merged_take_at_most_1_mb_and_32_bytes_each(ranges):
    """Every second row group is another rank's, so no two ranges are neighbours; row numbers are long."""
    manifest = _many_row_groups(files=100, groups=ranges // 50, rows=10_000_019)
    delivery = plain_delivery(manifest, PlanOptions(1), num_ranks=2)
    progress = _delivered(delivery, ranges - 1)
    state = delivery.state(progress)
    assert _size(state) <= 10**6 + 32 * ranges
    restored = delivery.restored(through_json(state))
    assert [stream.left for stream in restored.streams] == [stream.left for stream in progress.streams]


@many_ranges
def test_completed_ranges_that_can_be_merged_take_next_to_nothing(ranges):
    delivery = plain_delivery(_many_row_groups(files=10, groups=ranges // 5, rows=10), PlanOptions(1))
    assert _size(delivery.state(_delivered(delivery, ranges))) < 2000


@pytest.mark.timeout(120)  # loading it once took time quadratic in the row groups of a file
@pytest.mark.parametrize("ranges", [50_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_a_shard_of_very_many_ranges_in_progress_takes_at_most_1_mb_and_32_bytes_each(ranges):
    """Rows are mixed from row groups of one row: a single shard has as many ranges as the buffer has rows."""
    options = PlanOptions(2**40, shuffle=True, shuffle_buffer_size=ranges)
    delivery = plain_delivery(_many_row_groups(files=1, groups=ranges, rows=1), options)
    progress = delivery.fresh().advanced(Receipt(0, 0, 5, rows=5))
    state = delivery.state(progress)
    assert _size(state) <= 10**6 + 32 * ranges
    restored = delivery.restored(through_json(state))
    assert [stream.left for stream in restored.streams] == [stream.left for stream in progress.streams]


@pytest.mark.parametrize("completed", [100, 2000, 2048, 2049])
def test_long_paths_do_not_take_a_state_over_its_limit(completed):
    manifest = _many_row_groups(files=3, groups=2000, rows=10, root="s3://bucket/" + "long/" * 190)
    delivery = plain_delivery(manifest, PlanOptions(1), num_ranks=2)
    assert _size(delivery.state(_delivered(delivery, completed))) <= 10**6 + 32 * completed


def _by_hand(delivery: Delivery, progress: Progress) -> list[int]:
    """The completed rows, from the slices that are done."""
    splits = [
        split for stream in progress.streams for part in stream.done if part.is_whole for split in part.shard.splits
    ]
    return merged_row_numbers(delivery.run.manifest, splits)


LARGE = {
    "in order": PlanOptions(1),
    "shards shuffled": PlanOptions(1, shuffle=True),
    "rows shuffled": PlanOptions(2**27, shuffle=True, shuffle_buffer_size=100),
    "balanced": PlanOptions(1, shuffle=True, uneven_ranks="pad", batch_size=7),
}


@pytest.mark.parametrize("groups", [650, pytest.param(900, marks=pytest.mark.soak)])
@pytest.mark.parametrize("how", LARGE)
def test_states_of_many_ranges_are_the_same_with_and_without_what_was_prepared(how, groups):
    """And they are right: the rows are those of the slices that are done."""
    delivery = plain_delivery(_many_row_groups(files=20, groups=groups, rows=10), LARGE[how], num_ranks=2)
    beginning = delivery.fresh()
    record = EpochRecord(delivery.run.manifest, beginning)
    slices = len(beginning.streams[0].slices)
    for share in (1, slices // 20, slices // 2, slices - 1, slices):
        reached = beginning.advanced(Receipt(0, share, 0, rows=1))
        state = dump_state(delivery.run, 0, reached, None, record)
        assert record.is_of(reached)
        assert state == dump_state(delivery.run, 0, reached)
        assert state["checksum"] == checksum_of(through_json(state))
        if "completed_rows" in state and how != "balanced":
            assert state["completed_rows"] == _by_hand(delivery, reached)
        restored = delivery.restored(through_json(state))
        assert [stream.left for stream in restored.streams] == [stream.left for stream in reached.streams]
    assert "completed_rows" in state


@pytest.mark.parametrize(
    "options",
    [
        PlanOptions(8_000_000),
        PlanOptions(8_000_000, shuffle=True),
        PlanOptions(2**27, shuffle=True, shuffle_buffer_size=80_000),
        PlanOptions(8_000_000, uneven_ranks="drop", batch_size=7),
    ],
    ids=["in order", "shards shuffled", "rows shuffled", "balanced"],
)
def test_an_unfinished_shard_of_thousands_of_ranges_is_recorded_by_the_rows_of_its_splits(options):
    manifest = _many_row_groups(files=40_000, groups=1, rows=10)
    delivery = plain_delivery(manifest, options, num_ranks=2)
    beginning = delivery.fresh()
    record = EpochRecord(manifest, beginning)
    slices = beginning.streams[0].slices
    assert len(slices[0].shard.splits) >= 5000
    for place, begun in enumerate(slices):
        progress = beginning.advanced(Receipt(0, place, 1, rows=1))
        (entry,) = dump_state(delivery.run, 0, progress, None, record)["in_progress"]
        assert entry["rows"] == row_numbers(manifest, begun.shard.splits)


def test_a_state_goes_through_no_more_slices_than_it_lists(monkeypatch):
    """However many are done: rows are numbered once for an epoch, and a baseline is."""
    delivery = plain_delivery(_many_row_groups(files=20, groups=3000, rows=10), PlanOptions(1, shuffle=True))
    progress = delivery.fresh(DeliveredBaseline((Split("part-00003.parquet", 0, 10),), (), (), 1))
    record = EpochRecord(delivery.run.manifest, progress)
    record.prepare()
    seen = []
    number_rows = EpochRecord._row_numbers

    def count(self: EpochRecord, splits: Sequence[Split]) -> Any:
        seen.append(len(splits))
        return number_rows(self, splits)

    def no_merging(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(EpochRecord, "_row_numbers", count)
    monkeypatch.setattr(epoch_record, "merged_row_numbers", no_merging)
    monkeypatch.setattr(StreamProgress, "done", property(no_merging))
    for done in range(10_000, 50_000, 10_000):
        state = dump_state(delivery.run, 0, progress.advanced(Receipt(0, done, 5, rows=1)), None, record)
        assert len(state["completed_rows"]) > 10_000
        assert state["base"]["completed_rows"] == [90_000, 90_010]
    assert seen == [0] * 4
