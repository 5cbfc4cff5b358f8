"""The steps of the current epoch that the user wants skipped, and whether they are delivered after the last one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch_dataloader_utils.checkpoint.parts import schedule_of, with_skips
from torch_dataloader_utils.checkpoint.progress import Progress
from torch_dataloader_utils.checkpoint.saved_state import SavedState
from torch_dataloader_utils.checkpoint.skipped_steps import Mark, SkippedSteps
from torch_dataloader_utils.errors import CheckpointMismatchError, Difference, ProgressUnknownError
from torch_dataloader_utils.planning.plan import DeliveredBaseline
from torch_dataloader_utils.planning.quotas import Quotas
from torch_dataloader_utils.planning.row_ranges import Windows, in_words, merged, without
from torch_dataloader_utils.reading.scan import ReadOptions


@dataclass(frozen=True, slots=True)
class SkipRequests:
    """What was requested for an epoch.

    Attributes:
        steps: Start and stop of each range of steps, in rising order; no two ranges touch.
        restores: Whether skipped steps are delivered after the last one.
    """

    steps: Windows = ()
    restores: bool = False

    @property
    def contents(self) -> tuple[Windows, bool] | tuple[()]:
        """What digests of the epoch cover; nothing where nothing was requested."""
        return (self.steps, self.restores) if self.steps or self.restores else ()

    def adding(self, start: int, stop: int) -> SkipRequests:
        """Return the same with more steps to skip."""
        return replace(self, steps=merged([*self.steps, (start, stop)]))

    def forgotten(self, loaded: Progress, saved: Iterable[SavedState]) -> Windows:
        """Return the steps ahead of a loaded progress that were to be skipped, and that no state skips."""
        if not loaded.rows_left or any(state.baseline is not None and state.baseline.skipped for state in saved):
            return ()  # an elastic load before them knows skipped rows, and not of which steps they were
        of_states = [steps for state in saved if state.skips is not None for steps in state.skips.steps]
        behind = (0, loaded.batches_delivered)
        return without(self.steps, merged([behind, *loaded.skip_requests, *of_states]))

    def forget_restore(self, loaded: Progress, saved: Iterable[SavedState]) -> bool:
        """Whether skipped steps were to be restored, and the states have such steps and do not restore them."""
        skips = any(
            (state.skips is not None and state.skips.steps) or (state.baseline is not None and state.baseline.skipped)
            for state in saved
        )
        return self.restores and skips and not loaded.restores

    def are_of(self, progress: Progress) -> bool:
        """Whether a progress has these requests."""
        return (self.steps, self.restores) == (progress.skip_requests, progress.restores)

    def applied(
        self, progress: Progress, options: ReadOptions, quotas: Quotas | None, *, counts_rows: bool
    ) -> Progress:
        """Return a progress with these requests, as far as the steps are not behind it.

        `counts_rows` says that it is known which rows each step has. The quotas are those of a mixture.
        """
        size, drop_last = options.batch_size, options.drop_last
        schedule = schedule_of(progress, size, quotas, drop_last=drop_last) if counts_rows else None
        return with_skips(progress, self.steps, schedule)._replace(restores=self.restores)

    def require_none(self, progress: Progress) -> None:
        """Raise if steps are to be skipped or restored where worker processes of a plain DataLoader deliver them."""
        ahead = any(stop > progress.batches_delivered for _, stop in self.steps)
        if ahead or (self.restores and any(progress.restorable_left)):
            msg = "worker processes of a plain DataLoader cannot skip steps: none of them knows the others' batches; "
            raise ProgressUnknownError(msg + "use the loader that create_dataloader returns, or num_workers=0")


def require_steps(start: int, stop: int, progress: Progress, most: int | None) -> None:
    """Raise unless these steps lie ahead of a progress.

    `most` is the largest number of steps of a rank; None if only reading tells.
    """
    called = f"skip_steps({start}, {stop})"
    if start >= stop:
        raise ValueError(f"{called} skips nothing: stop is the step after the last one to skip, more than start")
    if start < progress.batches_delivered:
        msg = f"{called}: step {start} is in the past, the next one is {progress.batches_delivered}; load a state that "
        raise ValueError(f"{msg}was saved before step {start}, or begin the epoch again with set_epoch")
    if most is not None and start >= most:
        raise ValueError(f"{called}: the epoch has {most} steps, the last one is {most - 1}")


def require_same_batches(
    progress: Progress, saved: SavedState, options: ReadOptions, quotas: Quotas | None, *, counts_rows: bool
) -> None:
    """Raise unless the skipped steps ahead of a loaded progress have the rows that its state records.

    Where only reading tells which rows a step has, raise unless batches are cut as those of the state were.
    """
    if counts_rows:
        requests = SkipRequests(progress.skip_requests, restores=progress.restores)
        applied = requests.applied(progress, options, quotas, counts_rows=True)
        is_same = _rows_of(progress.skips_ahead) == _rows_of(applied.skips_ahead)
    else:
        size = None if options.batching is not None else options.batch_size
        is_ahead = any(stop > progress.batches_delivered for _, stop in progress.skip_requests)
        is_unknown = saved.drop_last is None  # a state of an earlier release
        is_same = not is_ahead or is_unknown or (saved.batch_size, saved.drop_last) == (size, options.drop_last)
        if is_ahead and saved.batching is not None and options.batching is not None:
            is_same = options.batching.cuts_as(saved.batching)
    if not is_same:
        steps = in_words(progress.skip_requests)
        batches = f"batch_size={options.batch_size}" if options.batching is None else repr(options.batching)
        msg = f"the checkpoint skips steps {steps}, and with {batches} and drop_last={options.drop_last} these have "
        own = "its batch_size or batching" if saved.batching is None else f"its batching={saved.batching!r}"
        msg += f"other rows than when it was saved: create the loader with {own}, and drop_last; or "
        msg += "load_state_dict(states, strict=False) with the states of all ranks, "
        msg += "which skips the same rows" if counts_rows else "which skips these steps"
        budgets = Difference("batching", saved.batching, options.batching)
        raise CheckpointMismatchError(msg, differences=() if saved.batching in (None, options.batching) else (budgets,))


def _rows_of(skips: Iterable[SkippedSteps]) -> list[tuple[Mark, int, tuple[object, ...]]]:
    """Return which rows are skipped: whose turn follows is no part of it, and at an epoch's end nobody's is."""
    return [(skip.begin, skip.end.step, skip.end.places) for skip in skips]


def requests_left(saved: SavedState, baseline: DeliveredBaseline) -> Windows:
    """Return the steps that are to be skipped after an elastic load, where only reading tells their rows.

    Steps go on with the number of the baseline's batches.
    """
    steps = () if saved.skips is None else saved.skips.steps
    return tuple((max(start, baseline.batches), stop) for start, stop in steps if stop > baseline.batches)
