"""Which rows the steps of a dataset have, and which step has a row: for what was delivered and what is to come."""

from __future__ import annotations

import difflib
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import numpy as np

from torch_dataloader_utils.checkpoint.progress import Progress
from torch_dataloader_utils.errors import LedgerUnknownError, cut
from torch_dataloader_utils.formats.opened_files import Opened, OpenedFiles, files_of
from torch_dataloader_utils.loader.ledger_scan import ScannedStep, StepScan
from torch_dataloader_utils.loader.segments import Segments, have_one_plan
from torch_dataloader_utils.loader.user_warnings import LOG
from torch_dataloader_utils.planning.ledger.lookup import Holder, SegmentLedger, StepWindows
from torch_dataloader_utils.planning.ledger.row_steps import Rows, RowStep
from torch_dataloader_utils.planning.ledger.segment import Removal, Segment, without_removed
from torch_dataloader_utils.reading.scan import ReadOptions

RESTORED_UNKNOWN = (
    "restore_skipped delivers skipped steps after the last one, and where only reading tells the rows of steps, a scan "
    "does not know these: rows_at and batch_at answer for the skipped steps under their own numbers"
)


@dataclass(frozen=True, slots=True)
class Ledger:
    """Answers about the steps of all ranks of a dataset.

    Each method takes `fresh`, the segment of an epoch's plan from its beginning as this process would begin it now.

    Attributes:
        files: The files.
        options: How this process reads them.
        segments: What is known of epochs.
        progress: The current epoch and this rank's progress in it; None at its beginning.
        scan: Whether to read what it takes where only reading tells. Else nothing is read.
    """

    files: Opened
    options: ReadOptions
    segments: Segments
    progress: tuple[int, Progress] | None
    scan: bool

    def rows_at(self, fresh: Segment, step: int, rank: int) -> Rows:
        """Return the rows of a step of a rank: see `StructuredDataset.rows_at`."""
        ledger = self._ledger_of(fresh, step, rank)
        _require_known_removals([ledger.segment.removal_at(step)])
        if self.files.unknown_rows is None:
            return ledger.rows_at(rank, step)
        scan, scanned = self._scan_to(ledger, step, rank)
        found = scan.file_rows(scanned.rows)
        _log(scan, f"step {step} of rank {rank}")
        rows = Rows(*found, scan.bytes_read)
        return without_removed(rows, ledger.segment.removed_of(rank, step, rows))

    def windows_at(self, fresh: Segment, step: int, rank: int) -> tuple[Segment, StepWindows]:
        """Return the segment of a step, and where the rows of the step come from."""
        ledger = self._ledger_of(fresh, step, rank)
        if self.files.unknown_rows is None:
            return ledger.segment, ledger.windows(rank, step)
        scan, scanned = self._scan_to(ledger, step, rank)
        _log(scan, f"step {step} of rank {rank}")
        processes = ledger.segment.topology.processes
        return ledger.segment, StepWindows(scanned.stream % processes, {scanned.stream: scanned.slices})

    def step_of(self, fresh: Segment, path: str, row: int) -> RowStep | None:
        """Return where a row is delivered: see `StructuredDataset.step_of`."""
        segments = self.segments.of(fresh)
        self._require_row(segments[-1], path, row)
        if self._is_ruled_out(path, row):
            return None
        self._require_known_rows()
        _require_known_removals([removal for segment in segments for removal in segment.removals])
        if self.files.unknown_rows is not None:
            found = self._scanned_steps(fresh, path, row)
            segments = self.segments.of(fresh)
        else:
            found = [step for segment in segments for step in self.segments.ledger(segment).steps_of(path, row)]
        if found:
            return replace(found[0], others=tuple(found[1:]))
        left_out = () if segments[-1].baseline is None else segments[-1].baseline.left_out
        unknown = self.segments.why_unknown(segments[0])
        if unknown is None or path in left_out:
            return None
        if self.files.unknown_rows is None:
            is_planned = any(self.segments.ledger(segment).plans(path, row) for segment in segments)
            if is_planned or self.segments.was_skipped(segments[-1], path, row):
                return None
        msg = f"row {row} of {path} is not among what the known steps of epoch {fresh.epoch} have"
        raise LedgerUnknownError(f"{msg}: {unknown}")

    # Steps -----------------------------------------------------------------------------------------------------------

    def _ledger_of(self, fresh: Segment, step: int, rank: int) -> SegmentLedger:
        """Return the ledger of the segment in which a rank makes a step, as far as that is known without reading."""
        segments = self.segments.of(fresh)
        if self.scan and self.files.unknown_rows is not None and self._disproves(segments, step):
            segments = self.segments.of(fresh)
        segment = next((one for one in reversed(segments) if one.begin_of(rank) <= step), None)
        if segment is None:
            raise LedgerUnknownError(f"step={step}: {self.segments.why_unknown(segments[0])}")
        num_ranks = segment.topology.num_ranks
        if rank >= num_ranks:
            there_are = "there is 1 rank" if num_ranks == 1 else f"there are {num_ranks} ranks"
            raise ValueError(f"rank={rank}: {there_are}, from 0, at step {step} of epoch {fresh.epoch}")
        self._require_known_rows()
        ledger = self.segments.ledger(segment)
        if not ledger.knows(rank):
            msg = (
                f"step={step}: where rank {rank} stood at step {segment.begin}, from which on the batches have another "
            )
            raise LedgerUnknownError(f"{msg}size, is known on that rank alone: ask there")
        if self.files.unknown_rows is None and step not in ledger.steps(rank):
            unknown = self.segments.why_unknown_after(segment)
            if unknown is not None:
                raise LedgerUnknownError(f"step={step}: {unknown}")
            raise _no_such_step(step, rank, segment, ledger.steps(rank))
        return ledger

    def _require_known_rows(self) -> None:
        """Raise if only reading tells which rows are delivered, and nothing is to be read, or that would not tell."""
        if self.options.unknown_batches is not None:
            msg = f"which step has which rows is not known: {self.options.unknown_batches}; row_id_column delivers "
            raise LedgerUnknownError(f"{msg}with each row which one it is")
        if self.files.unknown_made is not None or self.files.tokens is not None:
            raise LedgerUnknownError("which step has which rows is not known: a sequence has tokens of many rows")
        msg = f"which step has which rows is not known: {self.files.unknown_rows}"
        if self.files.transform is not None:
            raise LedgerUnknownError(
                f"{msg}, and not of which rows of files it makes them; row_id_column in its table can tell"
            )
        if self.files.unknown_rows is not None and not self.scan:
            what = f"the columns that {self.files.filter_name} needs, of the rank's rows,"
            what = "the rank's text" if self.files.filter is None else what
            msg = f"which step has which rows is not known: {self.files.unknown_rows}; scan=True reads {what} from the "
            raise LedgerUnknownError(f"{msg}last known state to the step")

    def _require_row(self, segment: Segment, path: str, row: int) -> None:
        """Raise a ValueError unless there is such a row, as far as that is known without reading."""
        manifest = self.segments.manifest(segment)
        rows = manifest.rows_of.get(path)
        if rows is None:
            close = difflib.get_close_matches(path, manifest.rows_of, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            msg = f"path={cut(path)!r} is no file of the dataset: paths are relative to {manifest.root}{hint}"
            raise ValueError(msg)
        if manifest.counts_rows and row >= rows:
            raise ValueError(f"row={row}: {path} has {rows} rows, numbered from 0")

    def _is_ruled_out(self, path: str, row: int) -> bool:
        """Whether statistics or partition values show that the filter drops a row."""
        if self.files.selection is None:
            return False
        number = next(number for number, file in enumerate(self.files.manifest.files) if file.path == path)
        stops = accumulate(group.rows for group in self.files.manifest.files[number].row_groups)
        return bisect_right(list(stops), row) not in self.files.selection[number]

    @property
    def _single(self) -> OpenedFiles:
        return files_of(self.files, "a scan")  # the rows of a mixture are counted

    # Scans -----------------------------------------------------------------------------------------------------------

    def _scan_to(self, ledger: SegmentLedger, step: int, rank: int) -> tuple[StepScan, ScannedStep]:
        """Read what it takes to know a step of a rank."""
        segment = ledger.segment
        start = self._start(ledger, rank, lambda progress: progress.batches_delivered <= step)
        scan = StepScan(self._single, self.options, segment)
        steps = scan.steps(start)
        last = start.batches_delivered - 1
        try:
            for scanned in steps:
                if scanned.step == step:
                    return scan, scanned
                last = scanned.step
        finally:
            steps.close()
        if segment.restores:
            msg = f"step={step} comes after those that epoch {segment.epoch} plans for rank {rank}: "
            raise LedgerUnknownError(msg + RESTORED_UNKNOWN)
        raise _no_such_step(step, rank, segment, range(segment.begin, last + 1))

    def _scanned_steps(self, fresh: Segment, path: str, row: int) -> list[RowStep]:
        """Read what it takes to know the step of a row; return none where no known step has it."""
        segments = self.segments.of(fresh)
        scan = StepScan(self._single, self.options, segments[-1])
        in_file: int | None = row
        if not self.files.manifest.counts_rows:
            in_file = scan.uncounted(path, row)
            if in_file is None:
                raise ValueError(f"row={row}: {path} has fewer rows")
        assert in_file is not None  # noqa: S101
        bytes_read = scan.bytes_read
        for segment in reversed(segments):
            ledger = self.segments.ledger(replace(segment, first_step=None, starts=None))
            for holder in ledger.holders(path, in_file):
                start = self._start(ledger.of(segment), holder.rank, partial(_is_before, holder))
                if self._disproves(segments, start.batches_delivered):
                    return self._scanned_steps(fresh, path, row)
                scan = StepScan(self._single, self.options, segment)
                found = self._scan_for(scan, start, holder, path, in_file)
                bytes_read += scan.bytes_read
                if found is not None:
                    LOG.info("read %d bytes to find row %d of %s", bytes_read, row, path)
                    return [replace(found, bytes_read=bytes_read)]
        LOG.info("read %d bytes to find row %d of %s", bytes_read, row, path)
        return []

    def _scan_for(self, scan: StepScan, start: Progress, holder: Holder, path: str, in_file: int) -> RowStep | None:
        """Read a rank's steps until the stream that may have a row is past it."""
        segment = scan.segment
        number = self.files.manifest.first_rows[path] + in_file
        steps = scan.steps(start)
        try:
            for scanned in steps:
                if segment.stops is not None and scanned.step >= segment.stops[holder.rank]:
                    return None
                (places,) = np.nonzero(scanned.rows == number)
                if len(places) and segment.skips(scanned.step):
                    if segment.restores:
                        msg = f"row {in_file} of {path} is in the skipped step {scanned.step} of rank {holder.rank}: "
                        raise LedgerUnknownError(msg + RESTORED_UNKNOWN)
                    return None
                if len(places):
                    rows = Rows(*scan.file_rows(scanned.rows[: places[0] + 1]))
                    removed = segment.removed_of(holder.rank, scanned.step, rows)
                    worker, place = holder.stream % segment.topology.processes, int((~removed[:-1]).sum())
                    return None if removed[-1] else RowStep(segment.epoch, scanned.step, holder.rank, worker, place)
                if scanned.stream == holder.stream and scanned.position > holder.position:
                    return None
        finally:
            steps.close()
        return None

    def _disproves(self, segments: tuple[Segment, ...], step: int) -> bool:
        """Read whether the steps before a loaded state lead there, if that is to be known for a step; note it if not.

        Skipped steps that were delivered again lie after them: then it is taken for granted.
        """
        epoch = segments[-1].epoch
        loaded = self.segments.unproved(epoch)
        if loaded is None or step >= loaded.batches_delivered or loaded.restored is not None:
            return False
        rank, last = segments[-1].topology.rank, loaded.batches_delivered - 1
        segment = next((one for one in reversed(segments) if one.begin_of(rank) <= last), None)
        if segment is None or segment.starts is not None or segment.topology != segments[-1].topology:
            return False
        if self.segments.logs_other_batches(segment, last):
            self.segments.prove(epoch, leads_there=False)
            return True
        scan = StepScan(self._single, self.options, segment)
        steps = scan.steps(self._fresh(self.segments.ledger(segment), rank))
        try:
            is_there = any(scanned.step == last for scanned in steps)
        finally:
            steps.close()
        _log(scan, f"the steps before step {last + 1} of rank {rank}")
        arrived = () if scan.progress is None else scan.progress.streams
        leads_there = is_there and all(
            own.left in {(), one.left} for own, one in zip(loaded.streams, arrived, strict=True)
        )
        self.segments.prove(epoch, leads_there=leads_there)
        return not leads_there

    @staticmethod
    def _fresh(ledger: SegmentLedger, rank: int) -> Progress:
        """Return the progress of a rank at the beginning of a segment's plan."""
        topology = replace(ledger.segment.topology, rank=rank)
        return Progress.fresh(topology.own_streams(ledger.plan), topology.streams_per_turn, ledger.segment.baseline)

    def _start(self, ledger: SegmentLedger, rank: int, fits: Callable[[Progress], bool]) -> Progress:
        """Return the last known progress of a rank in a segment that fits, else where the rank begins in it."""
        segment = ledger.segment
        known = []
        if segment.starts is None:
            known.append(self._fresh(ledger, rank))
        is_newest = segment.stops is None
        for epoch, progress in filter(None, (self.segments.loaded, self.progress)):
            if epoch == segment.epoch and is_newest and rank == segment.topology.rank:
                known.append(progress)
        fitting = [progress for progress in known if fits(progress)]
        if segment.starts is not None and not fitting:
            fitting = known[:1]  # all of the segment comes after it
        if not fitting:
            fitting = self._reached(ledger, rank)
        if not fitting:
            msg = f"where rank {rank} stood at step {segment.begin} of epoch {segment.epoch} is not known here"
            raise LedgerUnknownError(f"{msg}: ask on that rank, or about what came after its state")
        return max(fitting, key=lambda progress: progress.batches_delivered)

    def _reached(self, ledger: SegmentLedger, rank: int) -> list[Progress]:
        """Read the steps of a rank before a segment, in which batches had another size; return where it then stood.

        That is only possible where the plan, and what the rank reads of it, was the same before.
        """
        segment = ledger.segment
        known, first = self.segments.of(segment), segment.begin_of(rank)
        before = next((one for one in reversed(known) if one.begin_of(rank) < first), None)
        if before is None or not have_one_plan(before, segment) or not _have_one_topology(before, segment):
            return []
        start = self._start(ledger.of(before), rank, lambda progress: progress.batches_delivered <= first)
        if start.batches_delivered == first:
            return [start]
        scan = StepScan(self._single, self.options, before)
        steps = scan.steps(start)
        try:
            is_there = any(scanned.step == first - 1 for scanned in steps)
        finally:
            steps.close()
        _log(scan, f"the steps before step {first} of rank {rank}")
        return [scan.progress] if is_there and scan.progress is not None else []


def _have_one_topology(segment: Segment, other: Segment) -> bool:
    """Whether the ranks and workers of two segments are the same."""
    return replace(segment.topology, rank=0) == replace(other.topology, rank=0)


def _require_known_removals(removals: Iterable[Removal]) -> None:
    """Raise if batches lose rows that only reading tells."""
    if any(removal.expressions for removal in removals):
        msg = "which rows of a step are excluded is not known: an expression excludes rows of this epoch after its "
        raise LedgerUnknownError(f"{msg}batches are cut, and only reading tells which; batch_at(step) reads a batch")


def _is_before(holder: Holder, progress: Progress) -> bool:
    """Whether a slice's stream has delivered nothing of it."""
    done, part = progress.streams[holder.stream].reached
    return done < holder.position or (done == holder.position and part is None)


def _no_such_step(step: int, rank: int, segment: Segment, steps: range) -> ValueError:
    made = f"steps {steps.start} to {steps.stop - 1}" if steps else "no step"
    since = f" from step {segment.begin_of(rank)} on" if segment.begin_of(rank) else ""
    return ValueError(f"step={step}: rank {rank} makes {made} of epoch {segment.epoch}{since}")


def _log(scan: StepScan, what: str) -> None:
    LOG.info("read %d bytes to find the rows of %s", scan.bytes_read, what)
