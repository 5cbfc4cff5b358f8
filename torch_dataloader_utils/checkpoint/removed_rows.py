"""Which of the rows that were excluded in the current epoch had been delivered before. Pure.

Batches lose such rows from a step on. States record which of them were delivered before it, as ranges of rows: that is
the same under every number of ranks and workers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from torch_dataloader_utils.checkpoint.progress import Progress, RemovedRows
from torch_dataloader_utils.checkpoint.saved_state import SavedShard, SavedState
from torch_dataloader_utils.planning.excluded import NONE_EXCLUDED, ExcludedRows, bounds_of
from torch_dataloader_utils.planning.ledger.shard_order import ShardOrders
from torch_dataloader_utils.planning.manifest import Layout, Split
from torch_dataloader_utils.planning.plan import PartialShard, ShardSlice
from torch_dataloader_utils.planning.row_ranges import merged, splits_of_rows


class RowsWithin:
    """Finds which of some rows are among those that an epoch has passed.

    Where a filter drops rows, or rows are not counted, only reading tells which rows of a shard were passed if not all
    of them were: then all of them are, if `counts_parts`, else none.
    """

    def __init__(self, rows: ExcludedRows, *, seed: int | None, epoch: int, is_exact: bool) -> None:
        self._rows = rows
        self._orders = ShardOrders(seed, epoch)
        self._is_exact = is_exact

    def of(self, whole: Iterable[Split], slices: Iterable[ShardSlice], *, counts_parts: bool = True) -> ExcludedRows:
        """Return those in whole ranges, and in slices of shards."""
        ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
        if not self._rows:
            return NONE_EXCLUDED
        splits = list(filter(self._rows.within, whole))
        for part in slices:
            in_part = list(filter(self._rows.within, part.shard.present))
            if part.rows == part.shard.rows or (counts_parts and not self._is_exact and part.rows):
                splits += in_part
            elif self._is_exact and in_part:
                self._add(ranges, part)
        for split in splits:
            ranges[split.path].append((split.row_offset, split.row_offset + split.row_length))
        bounds = {path: np.array(merged(of_file), dtype=np.int64).reshape(-1) for path, of_file in ranges.items()}
        return self._rows.both(ExcludedRows(bounds))

    def _add(self, ranges: dict[str, list[tuple[int, int]]], part: ShardSlice) -> None:
        files, rows = self._orders.of(part.shard).rows(part.start, part.stop)
        for path in {split.path for split in part.shard.present if self._rows.within(split)}:
            of_file = rows[files == path]
            bounds = bounds_of(of_file[self._rows.contains(path, of_file)]).reshape(-1, 2)
            ranges[path] += [(start, stop) for start, stop in bounds.tolist()]


def with_removed(progress: Progress, rows: ExcludedRows, *, seed: int | None, epoch: int, is_exact: bool) -> Progress:
    """Return the progress with the rows that batches lose from its next step on.

    Of those that it did not know of, it records which were delivered.
    """
    known = progress.removed
    new = NONE_EXCLUDED if rows == known.rows else rows.minus(known.rows)
    if not new:
        return progress
    within = RowsWithin(new, seed=seed, epoch=epoch, is_exact=is_exact)
    delivered = known.delivered.union(_delivered(progress, within))
    return progress._replace(removed=RemovedRows(known.rows.union(rows), delivered))


def _delivered(progress: Progress, within: RowsWithin) -> ExcludedRows:
    """Return the rows that were delivered, by this rank or before an elastic load. Skipped rows were not."""
    passed = within.of((), chain.from_iterable(stream.done for stream in progress.streams))
    skipped = chain.from_iterable(chain.from_iterable(progress.skipped))
    delivered = passed.minus(within.of((), skipped, counts_parts=False))
    if progress.restored is not None:
        to_restore = (slices for _, slices in progress.restorable)
        groups = (to_restore, progress.restorable_left)
        of_all, left = (within.of((), chain.from_iterable(chain.from_iterable(group))) for group in groups)
        delivered = delivered.union(of_all.minus(left))
    if (baseline := progress.baseline) is not None:
        before = within.of(baseline.done, _slices(baseline.partial))
        if baseline.skipped is not None:
            whole, partial = baseline.skipped.whole, baseline.skipped.partial
            before = before.minus(within.of(whole, _slices(partial), counts_parts=False))
        delivered = delivered.union(before)
    return delivered


def _slices(partial: Iterable[PartialShard]) -> Iterable[ShardSlice]:
    return (ShardSlice(part.shard, *window) for part in partial for window in part.windows)


def saved_removed(states: Sequence[SavedState], files: Layout) -> RemovedRows:
    """Return which rows batches lose from where states stand on, and which of them the states record as delivered.

    `files` are those to which row numbers refer. Where a state of an earlier release does not record it, no row is
    known: then those that were passed count as delivered.
    """
    recorded = [state.excluded_delivered for state in states]
    if None in recorded:
        return RemovedRows()
    first, delivered = states[0], NONE_EXCLUDED
    for numbers in dict.fromkeys(recorded):
        own = ExcludedRows.of_row_numbers(np.frombuffer(numbers or b"", "<i8"), files)
        delivered = delivered.union(own) if delivered else own
    return RemovedRows(first.excluded.exclusions(files).in_epoch(first.epoch).removed, delivered)


def passed_in(states: Sequence[SavedState], within: RowsWithin, files: Layout, left_out: ExcludedRows) -> ExcludedRows:
    """Return the rows that some ranks' states record as passed: delivered, skipped, or excluded before."""
    whole: list[Split] = []
    parts: list[SavedShard] = []
    if (baseline := states[0].baseline) is not None:
        whole += splits_of_rows(files, baseline.completed_rows)
        parts += baseline.in_progress
    for state in states:
        whole += state.done(files)
        parts += state.in_progress
    return within.of(whole, _slices(part.partial(files, left_out) for part in parts))
