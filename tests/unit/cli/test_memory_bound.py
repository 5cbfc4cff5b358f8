"""The memory that `tdu plan` and `tdu mixing` state, as the guide has it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from torch_dataloader_utils.cli.memory_bound import memory_bound

ROW = 10
ROWS = 100
SIZE = ROWS * ROW
ORDER = 8 * ROWS


def bound_of(shards: int, rounds: int, read_ahead_bytes: int, fetched: float = 0) -> int:
    shard = SimpleNamespace(rows_read=ROWS, rounds=rounds)
    stream = [SimpleNamespace(shard=shard, rows=ROWS)] * shards
    plan: Any = SimpleNamespace(num_ranks=1, rank_streams=lambda _: [stream])
    return memory_bound(
        plan, shuffles_rows=True, row_bytes=ROW, read_ahead_bytes=read_ahead_bytes, fetched_row_bytes=fetched
    )


@pytest.mark.parametrize(("shards", "expected"), [(0, 0), (1, SIZE), (2, 2 * SIZE), (5, 2 * SIZE)])
@pytest.mark.parametrize("rounds", [1, 4])
def test_two_small_shards_are_in_memory_or_the_only_one(shards, expected, rounds):
    assert bound_of(shards, rounds, 4 * (SIZE + ORDER)) == expected


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_a_shard_that_may_be_read_as_a_whole_has_the_memory_for_itself(shards):
    assert bound_of(shards, 4, 2 * (SIZE + ORDER)) == 2 * (SIZE + ORDER)
    assert bound_of(shards, 4, 3 * (SIZE + ORDER)) == 3 * SIZE + ORDER


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_of_a_shard_in_rounds_three_blocks_are_in_memory_and_what_was_fetched(shards):
    assert bound_of(shards, 4, SIZE) == 3 * SIZE // 4
    assert bound_of(shards, 4, SIZE, fetched=2) == 3 * SIZE // 4 + 2 * ROWS
