"""The orders of a shard's rows under row-level shuffle, as indices into the tables that are read."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from torch_dataloader_utils.planning.plan import Shard
from torch_dataloader_utils.planning.shuffle import left_bounds, permutation

MISSING = (1 << 32) - 1
"""Stands for a row of a missing split. It is above the number of any row of a table in memory."""


class RowOrders:
    """Draws the orders of an epoch.

    Args:
        seed: The seed of the permutation inside shards.
        epoch: The epoch.
    """

    def __init__(self, seed: int, epoch: int) -> None:
        self._seed = seed
        self._epoch = epoch

    def of_rounds(self, shard: Shard, rounds: range) -> pa.Array:
        """Return the order of the rows of rounds, where it is known how many they have."""
        if shard.rounds == 1 and not shard.missing:
            return self.of_read(shard, 0, shard.rows_read)
        begins, ends = left_bounds(shard, rounds[0]), left_bounds(shard, rounds[-1])
        offsets: list[int | None] = []  # from a row's number in its row group to its index in the tables, by split
        rows = 0
        for split, ((begin, _), (_, end)) in enumerate(zip(begins, ends, strict=True)):
            missing = split in shard.missing
            offsets.append(None if missing else rows - begin)
            rows += 0 if missing else end - begin
        orders = []
        for number in rounds:
            parts = [
                np.full(stop - start, MISSING) if offset is None else np.arange(start + offset, stop + offset)
                for (start, stop), offset in zip(left_bounds(shard, number), offsets, strict=True)
            ]
            indices = np.concatenate(parts)
            order = indices[self._permutation(shard, number, len(indices))]
            orders.append(_in_few_bytes(order[order != MISSING] if shard.missing else order, rows))
        return pa.array(np.concatenate(orders))

    def of_read(self, shard: Shard, number: int, rows: int) -> pa.Array:
        """Return the order of a round of which so many rows were read, and none is missing."""
        return pa.array(_in_few_bytes(self._permutation(shard, number, rows), rows))

    def _permutation(self, shard: Shard, number: int, rows: int) -> npt.NDArray[np.intp]:
        return permutation(rows, seed=self._seed, epoch=self._epoch, shard=shard, number=number)


def _in_few_bytes(indices: npt.NDArray[np.intp], rows: int) -> npt.NDArray[np.integer[Any]]:
    """Return indices into so many rows in as few bytes as may be."""
    return indices.astype(np.uint32) if rows < MISSING else indices
