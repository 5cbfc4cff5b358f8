"""Rows that batches lose after they are cut: those that were excluded while their epoch was under way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, groupby

import numpy as np
import numpy.typing as npt

from torch_dataloader_utils.columns.convert import ColumnSlice, join, keep, without_column
from torch_dataloader_utils.reading.batching import Batches, EmptyStep, StreamEnd
from torch_dataloader_utils.reading.row_groups.selection import REMOVED_COLUMN


def without_removed(contents: Iterable[Batches | StreamEnd]) -> Iterator[Batches | EmptyStep | StreamEnd]:
    """Yield batches without the rows that `REMOVED_COLUMN` flags, and an `EmptyStep` for each that has no other row."""
    for content in contents:
        if isinstance(content, Batches):
            yield from _shortened(content)
        else:
            yield content
        del content


def _shortened(batches: Batches) -> Iterator[Batches | EmptyStep]:
    columns, removed = without_column(batches.columns, REMOVED_COLUMN)
    batches = replace(batches, columns=columns)
    if not removed.any():
        yield batches
        return
    lost = rows_removed(removed, batches.sizes)
    receipts = [one._replace(rows_excluded=rows) for one, rows in zip(batches.receipts, lost, strict=True)]
    shorter = replace(batches, columns=keep(columns, ~removed), receipts=tuple(receipts))
    del columns, removed, batches
    yield from _without_empty(shorter)


def rows_removed(removed: npt.NDArray[np.bool_], sizes: Sequence[int]) -> list[int]:
    """Return how many rows of each of several consecutive batches of these sizes are flagged; no size is 0."""
    starts = [*accumulate(sizes, initial=0)][:-1]
    lost: list[int] = np.add.reduceat(removed, starts, dtype=np.int64).tolist()
    return lost


def _without_empty(batches: Batches) -> Iterator[Batches | EmptyStep]:
    """Yield consecutive batches that have rows together, and a step for each batch without rows.

    The first of them has the work, the last that has rows has the lease.
    """
    runs = [(empty, list(run)) for empty, run in groupby(batches.receipts, lambda receipt: not receipt.rows_left)]
    with_rows = [number for number, (empty, _) in enumerate(runs) if not empty]
    if batches.lease is not None and not with_rows:
        batches.lease.release()
    work, start = batches.work, 0
    for number, (empty, receipts) in enumerate(runs):
        if empty:
            for receipt in receipts:
                yield EmptyStep(receipt, work)
                work = None
            continue
        stop = start + sum(receipt.rows_left for receipt in receipts)
        columns = join([ColumnSlice(batches.columns, start, stop)])
        lease = batches.lease if number == with_rows[-1] else None
        yield Batches(columns, tuple(receipts), work, lease)
        work, start = None, stop
