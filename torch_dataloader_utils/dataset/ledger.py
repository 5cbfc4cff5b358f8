"""What a dataset answers about its steps: their rows, the steps of a row, and a batch again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from torch_dataloader_utils.checkpoint.parse.states import MOST_EPOCHS
from torch_dataloader_utils.dataset.base import BatchDataset
from torch_dataloader_utils.dataset.discovery import with_filters
from torch_dataloader_utils.formats.opened_files import Opened, OpenedFiles
from torch_dataloader_utils.loader.arguments import require_count, require_flag
from torch_dataloader_utils.loader.ledger import Ledger
from torch_dataloader_utils.planning.assignment import Assignment, StreamAssignment
from torch_dataloader_utils.planning.excluded import EpochExclusions
from torch_dataloader_utils.planning.ledger.row_steps import Rows, RowStep
from torch_dataloader_utils.planning.ledger.segment import Segment
from torch_dataloader_utils.reading.batching import Batch


class LedgerDataset(BatchDataset):
    """A dataset that knows which rows its steps have, delivered or yet to come."""

    def rows_at(self, step: int, epoch: int | None = None, rank: int | None = None, *, scan: bool = False) -> Rows:
        """Return the rows of a step of a rank, without reading data.

        They are the rows that the plan delivers, for steps that were delivered and for those that are yet to come. What
        a training loop really took is what its last state says. After a load, the steps before it are answered
        where they are known: see the guide.

        Args:
            step: The step: how many batches the rank delivers before it in the epoch.
            epoch: The epoch; None for the current one.
            rank: The rank; None for this one.
            scan: Whether to read what it takes where only reading tells: with a filter the columns of the filter, of
                the rank's streams from the last known state to the step.

        Returns:
            The files and the numbers of the rows, in the order of the batch.

        Raises:
            LedgerUnknownError: If only reading tells and `scan` is False, or if the step is before a load and what was
                delivered then is not known. The message names the reason.
            ValueError: If the rank does not make the step, or there is no such rank.
        """
        fresh = self._fresh(epoch)
        rank = self._rank if rank is None else require_count(rank, "rank", least=0)
        return self._ledger(fresh.epoch, scan=scan).rows_at(fresh, require_count(step, "step", least=0), rank)

    def step_of(self, path: str, row: int, epoch: int | None = None, *, scan: bool = False) -> RowStep | None:
        """Return the step that has a row, without reading data.

        Args:
            path: The row's file, relative to the root, as in `rows_at`.
            row: The row's number in the file, from 0. Deleted rows of a table do not count.
            epoch: The epoch; None for the current one.
            scan: See `rows_at`.

        Returns:
            The step, its rank and worker, and the row's number in the batch; None if the epoch leaves the row out.

        Raises:
            LedgerUnknownError: As in `rows_at`.
            ValueError: If there is no such file, or no such row in it.
        """
        if not isinstance(path, str):
            raise TypeError(f"path={path!r:.80}, expected a path relative to the dataset's root")
        fresh = self._fresh(epoch)
        return self._ledger(fresh.epoch, scan=scan).step_of(fresh, path, require_count(row, "row", least=0))

    def batch_at(self, step: int, epoch: int | None = None, *, scan: bool = False) -> Any:
        """Return a batch of this rank again: see `StructuredDataLoader.batch_at`."""
        fresh = self._fresh(epoch)
        ledger = self._ledger(fresh.epoch, scan=scan)
        segment, windows = ledger.windows_at(fresh, require_count(step, "step", least=0), self._rank)
        is_mixed = segment.mixture is not None
        turn = tuple(
            StreamAssignment(number, slices, np.array([sum(part.rows for part in slices)]) if is_mixed else None)
            for number, slices in windows.streams.items()
        )
        removal = segment.removal_at(step)
        left_out_by = self._epoch_state.excluded_in(segment.epoch).left_out_by
        excluded = EpochExclusions(segment.left_out, removal.rows, left_out_by, removal.expressions)
        assignment = Assignment(0, windows.worker, segment.epoch, (turn,), excluded)
        options = replace(self._stream.options, batch_size=segment.batch_size, drop_last=False)
        contents = replace(self._stream, options=options).batches(assignment)
        try:
            batch = next(contents)
            if isinstance(batch, Batch):
                return batch.data
        finally:
            contents.close()
        raise ValueError(f"step={step}: all rows of this step are excluded, so that it has no batch")

    @property
    def _rank(self) -> int:
        return self._epoch_state.topology.rank

    def _fresh(self, epoch: int | None) -> Segment:
        """Return the segment with which this process would begin an epoch."""
        if epoch is None:
            return self._epoch_state.segment(self._epoch_state.epoch)
        epoch = require_count(epoch, "epoch", least=0)
        if epoch > MOST_EPOCHS:
            raise ValueError(f"epoch={epoch}: at most {MOST_EPOCHS} is possible")
        return self._epoch_state.segment(epoch)

    def _ledger(self, epoch: int, *, scan: bool) -> Ledger:
        require_flag(scan, "scan")
        state = self._epoch_state
        progress = state.owner.progress
        current = None if progress is None else (state.epoch, progress)
        files: Opened = self._opened_files
        if isinstance(files, OpenedFiles):
            files = with_filters(files, state.excluded_in(epoch).left_out_by)
        return Ledger(files, self._stream.options, state.segments, current, scan=scan)
