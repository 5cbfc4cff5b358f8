"""The rows of one shard in the order of delivery, and the way back from a row to its place in that order. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from torch_dataloader_utils.planning.plan import Shard, ShardSlice
from torch_dataloader_utils.planning.shuffle import round_order, rounds_of, rows_before

Integers: TypeAlias = npt.NDArray[np.int64]

SHARDS_KEPT = 16
"""How many shards' orders are kept: the steps of a rank go back and forth between its workers' shards."""


class FileRows(NamedTuple):
    """Rows of files: each row's file and its number there."""

    files: npt.NDArray[np.str_]
    rows: Integers


class ShardOrder:
    """The order in which a shard delivers its rows, where no filter drops any.

    It keeps the round that was drawn last. Without row-level shuffle the seed is None.
    """

    def __init__(self, shard: Shard, *, seed: int | None, epoch: int) -> None:
        self.shard = shard
        self._seed = seed
        self._epoch = epoch
        self._paths = np.array([split.path for split in shard.splits])
        self._offsets = np.array([split.row_offset for split in shard.splits])
        lengths = np.array([split.row_length for split in shard.splits])
        self._starts = _starts(lengths)  # of the splits among all rows
        lengths[list(shard.missing)] = 0
        self._present = _starts(lengths)  # the same among the rows that can be delivered
        self._drawn: tuple[int, Integers] | None = None
        self._in_file_order = seed is None and shard.rounds == 1 and not any(map(shard.excluded.within, shard.splits))

    def rows(self, start: int, stop: int) -> FileRows:
        """Return the rows that the shard delivers from a first one to an end."""
        if self._in_file_order:
            delivered = np.arange(start, stop)
            splits = np.searchsorted(self._present, delivered, side="right") - 1
            return FileRows(self._paths[splits], self._offsets[splits] + delivered - self._present[splits])
        parts = [np.empty(0, dtype=np.int64)]
        for number, first in rounds_of(ShardSlice(self.shard, start, stop)):
            parts.append(self._round(number)[max(0, start - first) : stop - first])
        delivered = np.concatenate(parts)
        splits = np.searchsorted(self._starts, delivered, side="right") - 1
        return FileRows(self._paths[splits], self._offsets[splits] + delivered - self._starts[splits])

    def place_of(self, split: int, row: int) -> int | None:
        """Return how many rows the shard delivers before a row of a present split; None if the row is excluded."""
        if self._in_file_order:
            return int(self._present[split]) + row
        length, rounds = self.shard.splits[split].row_length, self.shard.rounds
        number = bisect_right(range(rounds), row, key=lambda number: length * number // rounds) - 1
        places = np.flatnonzero(self._round(number) == self._starts[split] + row)
        return rows_before(self.shard, number) + int(places[0]) if len(places) else None

    def _round(self, number: int) -> Integers:
        if self._drawn is None or self._drawn[0] != number:
            self._drawn = number, round_order(self.shard, number, seed=self._seed, epoch=self._epoch)
        return self._drawn[1]


class ShardOrders:
    """The orders of the shards that were needed last."""

    def __init__(self, seed: int | None, epoch: int) -> None:
        self._seed = seed
        self._epoch = epoch
        self._kept: OrderedDict[int, ShardOrder] = OrderedDict()

    def of(self, shard: Shard) -> ShardOrder:
        """Return the order of a shard."""
        key = id(
            shard
        )  # to hash a shard of many splits is slow; the order keeps the shard, so that the id stays its own
        order = self._kept.pop(key, None) or ShardOrder(shard, seed=self._seed, epoch=self._epoch)
        self._kept[key] = order
        if len(self._kept) > SHARDS_KEPT:
            self._kept.popitem(last=False)
        return order


def _starts(lengths: Integers) -> Integers:
    return np.cumsum(lengths) - lengths
