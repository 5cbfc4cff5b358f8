"""What skips steps of an epoch, and delivers them after its last one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

from torch_dataloader_utils.checkpoint.parts import schedule_of
from torch_dataloader_utils.checkpoint.progress import Progress
from torch_dataloader_utils.loader.progress_owner import ProgressOwner
from torch_dataloader_utils.loader.segments import Segments
from torch_dataloader_utils.loader.skip_requests import SkipRequests, require_steps
from torch_dataloader_utils.planning.ledger import Segment
from torch_dataloader_utils.planning.quotas import Quotas
from torch_dataloader_utils.reading.scan import ReadOptions


class SkipsSteps(ABC):
    """A rank's current epoch, as far as its steps are skipped and restored.

    Attributes:
        owner: The epoch and its progress.
        segments: What the ledger knows of epochs.
    """

    owner: ProgressOwner
    segments: Segments
    _skips: SkipRequests
    _read_options: ReadOptions

    @property
    @abstractmethod
    def epoch(self) -> int:
        """The epoch."""

    @property
    @abstractmethod
    def progress(self) -> Progress:
        """The progress in it."""

    @property
    @abstractmethod
    def unknown_steps(self) -> str | None:
        """Why it is unknown, before the epoch is read, which rows each step has; None where it is known."""

    @abstractmethod
    def _all_ranks(self) -> list[Progress]:
        """Return the progress of this rank and, if they may make more steps, of the others at the beginning."""

    @abstractmethod
    def _quotas_of(self, progress: Progress) -> Quotas | None:
        """Return the quotas of the plan of a progress, in a mixture; else None."""

    @abstractmethod
    def segment(self, epoch: int) -> Segment:
        """Return the segment of an epoch that begins now."""

    def skip_steps(self, start: int, stop: int) -> None:
        """Skip steps from the next iteration on: see the loader's."""
        progress = self.progress
        require_steps(start, stop, progress, self._most_steps())
        self._skips = self._skips.adding(start, stop)
        if self.owner.iteration is None:  # else the iteration goes on without it, and the next one begins the epoch
            self.segments.skip(self.segment(self.epoch))
            self.owner.take_over("skip_steps", self.epoch, self._skipping(progress))

    def restore_skipped(self) -> None:
        """Deliver skipped steps after the last one: see the loader's."""
        self._skips = replace(self._skips, restores=True)
        iteration = self.owner.iteration
        if iteration is None:
            self.segments.skip(self.segment(self.epoch))
            if self.owner.loaded is not None:
                self.owner.take_over("restore_skipped", self.epoch, replace(self.owner.loaded, restores=True))
            return
        iteration.progress = replace(iteration.progress, restores=True)
        steps = iteration.progress.skip_requests  # those that were requested since then are of the next iteration
        self.segments.skip(replace(self.segment(self.epoch), skipped=steps))
        if iteration.finished():
            self._keep_restorable()

    def _keep_restorable(self) -> None:
        """Let the next iteration deliver what is to be restored, if the newest one has made all other steps."""
        iteration = self.owner.iteration
        if iteration is not None and iteration.will_restore and not any(s.left for s in iteration.progress.streams):
            self.owner.take_over("restore_skipped", self.epoch, iteration.progress)

    def _skipping(self, progress: Progress) -> Progress:
        """Return the progress with what the user wants skipped and restored."""
        if self._skips.are_of(progress):
            return progress
        quotas, counts_rows = self._quotas_of(progress), self.unknown_steps is None
        return self._skips.applied(progress, self._read_options, quotas, counts_rows=counts_rows)

    def _most_steps(self) -> int | None:
        """Return the largest number of steps of a rank, skipped ones included; None if only reading tells."""
        if self.unknown_steps is not None:
            return None
        size, drop_last = self._read_options.batch_size, self._read_options.drop_last
        ranks = self._all_ranks()
        return max(schedule_of(rank, size, self._quotas_of(rank), drop_last=drop_last).steps.stop for rank in ranks)
