"""Which rows the steps of a dataset have, and which step has a row: for what was delivered and what is to come."""

from __future__ import annotations

import difflib
from dataclasses import replace

from torch_dataloader_utils.errors import LedgerUnknownError, cut
from torch_dataloader_utils.formats.base import OpenedFiles
from torch_dataloader_utils.loader.segments import Segments
from torch_dataloader_utils.planning.ledger import Rows, RowStep, Segment, SegmentLedger, StepWindows


class Ledger:
    """Answers about the steps of all ranks of a dataset, without reading data.

    `fresh` is the segment of an epoch's plan from its beginning, as this process would begin the epoch now.
    """

    def __init__(self, opened_files: OpenedFiles, segments: Segments) -> None:
        self._files = opened_files
        self._segments = segments

    def rows_at(self, fresh: Segment, step: int, rank: int) -> Rows:
        """Return the rows of a step of a rank: see `StructuredDataset.rows_at`."""
        return self._ledger_of(fresh, step, rank).rows_at(rank, step)

    def windows_at(self, fresh: Segment, step: int, rank: int) -> tuple[Segment, StepWindows]:
        """Return the segment of a step, and where the rows of the step come from."""
        ledger = self._ledger_of(fresh, step, rank)
        return ledger.segment, ledger.windows(rank, step)

    def step_of(self, fresh: Segment, path: str, row: int) -> RowStep | None:
        """Return where a row is delivered: see `StructuredDataset.step_of`."""
        self._require_row(path, row)
        self._require_known_rows()
        segments = self._segments.of(fresh)
        found = [step for segment in segments for step in self._segments.ledger(segment).steps_of(path, row)]
        if found:
            return replace(found[0], others=tuple(found[1:]))
        newest = self._segments.ledger(segments[-1])
        left_out = () if segments[-1].baseline is None else segments[-1].baseline.left_out
        if newest.plans(path, row) or path in left_out:
            return None
        unknown = self._segments.why_unknown(segments[0])
        if unknown is not None:
            msg = f"row {row} of {path} was delivered earlier in the epoch, or by a rank of which nothing is known"
            raise LedgerUnknownError(f"{msg}: {unknown}")
        return None

    def _ledger_of(self, fresh: Segment, step: int, rank: int) -> SegmentLedger:
        """Return the ledger of the segment in which a rank makes a step."""
        segments = self._segments.of(fresh)
        segment = next((one for one in reversed(segments) if one.begin <= step), None)
        if segment is None:
            raise LedgerUnknownError(f"step={step}: {self._segments.why_unknown(segments[0])}")
        if rank >= segment.topology.num_ranks:
            msg = f"rank={rank}: step {step} of epoch {segment.epoch} is one of {segment.topology.num_ranks} ranks"
            raise ValueError(msg)
        self._require_known_rows()
        ledger = self._segments.ledger(segment)
        if not ledger.knows(rank):
            msg = f"step={step}: where rank {rank} stood when rank {segment.topology.rank} loaded its state at step "
            raise LedgerUnknownError(f"{msg}{segment.begin} is not known here: ask on that rank")
        steps = ledger.steps(rank)
        if step not in steps:
            made = f"steps {steps.start} to {steps.stop - 1}" if steps else "no steps"
            since = f" from step {segment.begin} on" if segment.begin else ""
            raise ValueError(f"step={step}: rank {rank} makes {made} of epoch {segment.epoch}{since}")
        return ledger

    def _require_known_rows(self) -> None:
        """Raise if only reading tells which rows are delivered."""
        if self._files.unknown_rows is not None:
            msg = f"which rows a step has is not known: {self._files.unknown_rows}; scan=True reads what it takes"
            raise LedgerUnknownError(msg)

    def _require_row(self, path: str, row: int) -> None:
        """Raise a ValueError unless there is such a row."""
        manifest = self._files.manifest
        rows = manifest.rows_of.get(path)
        if rows is None:
            close = difflib.get_close_matches(path, manifest.rows_of, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            msg = f"path={cut(path)!r} is not a file of the dataset: paths are relative to {manifest.root}{hint}"
            raise ValueError(msg)
        if manifest.counts_rows and row >= rows:
            raise ValueError(f"row={row}: {path} has {rows} rows, from 0")
