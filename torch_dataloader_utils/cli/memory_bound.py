"""How much decoded data the processes of a rank hold at most, as the guide to performance states it."""

from __future__ import annotations

from collections.abc import Sequence

from torch_dataloader_utils.planning.plan import Plan, ShardSlice
from torch_dataloader_utils.reading.permuting import COPIES
from torch_dataloader_utils.reading.shuffled import BLOCK_SHARE, ORDER_BYTES, WHOLE_SHARE


def rows_together(plan: Plan) -> int:
    """Return how many rows a row-level shuffle permutes together, at most."""
    return max((-(-part.shard.rows_read // part.shard.rounds) for part in plan.slices), default=0)


def memory_bound(
    plan: Plan, *, shuffles_rows: bool, row_bytes: float, read_ahead_bytes: int, fetched_row_bytes: float
) -> int:
    """Return the bytes that the workers of a rank hold together, at most: of the rank that holds most.

    Args:
        plan: The plan.
        shuffles_rows: Whether rows are shuffled within shards.
        row_bytes: Decoded bytes of a row.
        read_ahead_bytes: The loader's option.
        fetched_row_bytes: Stored bytes of a row, where files are not mapped into memory; else 0.
    """

    def of_stream(slices: Sequence[ShardSlice]) -> float:
        if not shuffles_rows:
            return min(read_ahead_bytes, row_bytes * sum(part.rows for part in slices))
        bounds = [_of_shard(part, row_bytes, read_ahead_bytes, fetched_row_bytes) for part in slices]
        largest = sorted(beside for beside, _ in bounds)[-2:]  # one is delivered while the other is shuffled
        return max(sum(largest), *(alone for _, alone in bounds), 0)

    return round(max(sum(map(of_stream, plan.rank_streams(rank))) for rank in range(plan.num_ranks)))


def _of_shard(
    part: ShardSlice, row_bytes: float, read_ahead_bytes: int, fetched_row_bytes: float
) -> tuple[float, float]:
    """Return what a shard takes beside another one, and what it takes in any case, which may be both's memory."""
    shard = part.shard
    whole = shard.rows_read * (row_bytes + fetched_row_bytes + ORDER_BYTES)
    if shard.rounds == 1 or whole <= read_ahead_bytes / WHOLE_SHARE:
        return shard.rows_read * row_bytes, shard.rows_read * row_bytes
    size = _in_rounds(part, row_bytes, read_ahead_bytes, fetched_row_bytes)
    if whole <= read_ahead_bytes:  # whether it is read as a whole depends on its columns, which are not known here
        size = max(size, min(read_ahead_bytes, whole + COPIES * shard.rows_read * row_bytes))
    return size / 2, size


def _in_rounds(part: ShardSlice, row_bytes: float, read_ahead_bytes: int, fetched_row_bytes: float) -> float:
    """Return what shards take that are read round by round, one after the other."""
    shard = part.shard
    rows = -(-shard.rows_read // shard.rounds)
    together = max(1, int(read_ahead_bytes // (BLOCK_SHARE * rows * row_bytes + 1)))
    # Two blocks of rounds, and as many rows as one has of the row groups that are being decoded.
    return 3 * min(shard.rows_read, together * rows) * row_bytes + shard.rows_read * fetched_row_bytes
