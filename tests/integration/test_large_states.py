"""How large a state is, and how long it takes, where an epoch has very many row ranges."""

from __future__ import annotations

import json
from typing import Any

import pytest
from deliveries import Delivery, plain_delivery, through_json

from torch_dataloader_utils.checkpoint.progress import Progress
from torch_dataloader_utils.planning.assignment import Receipt
from torch_dataloader_utils.planning.manifest import DataFile, Manifest, RowGroup
from torch_dataloader_utils.planning.plan import PlanOptions


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


@pytest.mark.parametrize("ranges", [40_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_completed_ranges_that_cannot_be_merged_take_at_most_1_mb_and_32_bytes_each(ranges):
    """Every second row group is another rank's, so no two ranges are neighbours; row numbers are long."""
    manifest = _many_row_groups(files=100, groups=ranges // 50, rows=10_000_019)
    delivery = plain_delivery(manifest, PlanOptions(1), num_ranks=2)
    progress = _delivered(delivery, ranges - 1)
    state = delivery.state(progress)
    assert _size(state) <= 10**6 + 32 * ranges
    restored = delivery.restored(through_json(state))
    assert [stream.left for stream in restored.streams] == [stream.left for stream in progress.streams]


def test_100_000_completed_ranges_that_can_be_merged_take_next_to_nothing():
    delivery = plain_delivery(_many_row_groups(files=10, groups=20_000, rows=10), PlanOptions(1))
    assert _size(delivery.state(_delivered(delivery, 100_000))) < 2000


@pytest.mark.timeout(120)  # loading it once took time quadratic in the row groups of a file
def test_a_shard_of_100_000_ranges_in_progress_takes_at_most_1_mb_and_32_bytes_each():
    """Rows are mixed from row groups of one row: a single shard has as many ranges as the buffer has rows."""
    options = PlanOptions(2**40, shuffle=True, shuffle_buffer_size=100_000)
    delivery = plain_delivery(_many_row_groups(files=1, groups=100_000, rows=1), options)
    progress = delivery.fresh().advanced(Receipt(0, 0, 5, rows=5))
    state = delivery.state(progress)
    assert _size(state) <= 10**6 + 32 * 100_000
    restored = delivery.restored(through_json(state))
    assert [stream.left for stream in restored.streams] == [stream.left for stream in progress.streams]


@pytest.mark.parametrize("completed", [100, 2000, 2048, 2049])
def test_long_paths_do_not_take_a_state_over_its_limit(completed):
    manifest = _many_row_groups(files=3, groups=2000, rows=10, root="s3://bucket/" + "long/" * 190)
    delivery = plain_delivery(manifest, PlanOptions(1), num_ranks=2)
    assert _size(delivery.state(_delivered(delivery, completed))) <= 10**6 + 32 * completed
