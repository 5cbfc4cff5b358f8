"""Warnings about an epoch and about loaded states, in the words that the user reads."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache

from torch_dataloader_utils.checkpoint.compare import shorten
from torch_dataloader_utils.checkpoint.file_changes import touched_files
from torch_dataloader_utils.checkpoint.progress import Progress
from torch_dataloader_utils.checkpoint.run import Run
from torch_dataloader_utils.checkpoint.saved_state import SavedState
from torch_dataloader_utils.errors import (
    ChangedFilesWarning,
    LostRowsWarning,
    SkippedStepsWarning,
    SlowTransportWarning,
    SmallWeightWarning,
    UnevenRanksWarning,
    UnusedStateWarning,
    warn_user,
)
from torch_dataloader_utils.planning.row_ranges import Windows, in_words

LOG = logging.getLogger("torch_dataloader_utils")

SHOWN_RANKS = 16
"""Of how many ranks a warning tells each one's count."""


def warn_of_uneven_ranks(epoch: int, batches: Sequence[int], rows: Sequence[int], unit: str) -> None:
    """Warn that ranks have different numbers of batches, given each rank's batches and rows, or other units."""
    shown = f"batches {_of_ranks(batches)}, {unit} {_of_ranks(rows)}"
    text = f"ranks make different numbers of steps in epoch {epoch}: {shown}"
    _warn_of_waiting_ranks(text, "uneven_ranks='drop' or 'pad'")


def _of_ranks(counts: Sequence[int]) -> str:
    """Return the count of each rank; of many ranks the least and the greatest."""
    if len(counts) <= SHOWN_RANKS:
        return str(list(counts))
    least, most = min(counts), max(counts)
    return f"{least} (rank {counts.index(least)}) to {most} (rank {counts.index(most)})"


def warn_of_unknown_lengths(reason: str) -> None:
    """Warn that ranks may have different numbers of batches, because the numbers of rows are not known."""
    text = f"the number of batches of each rank is not known ahead: {reason}"
    _warn_of_waiting_ranks(text, "distributed.in_step, an adapter for its framework")


def _warn_of_waiting_ranks(text: str, remedy: str) -> None:
    warn_user(f"{text}; a DDP loop needs {remedy}, or join(); else ranks wait for one another", UnevenRanksWarning)


def warn_of_small_weights(weights: Mapping[str, float], rows: int) -> None:
    """Warn of sources of which an epoch delivers nothing, given their weights and the rows of a rank in it."""
    named = ", ".join(f"{name!r} ({weight:.3g})" for name, weight in weights.items())
    text = f"an epoch delivers no row of {named}: each rank has {rows} rows in it, of which that is less than one, and "
    warn_user(
        f"{text}shares are counted anew in each epoch; make rows_per_epoch or the weight larger", SmallWeightWarning
    )


@cache
def warn_of_slow_transport() -> None:
    """Warn, once in a process, that workers cannot send batches in shared memory."""
    msg = "the system has or grants no anonymous shared memory (memfd_create): worker processes send batches through "
    warn_user(msg + "a pipe, which is slower; num_workers=0 sends nothing", SlowTransportWarning)


def warn_of_forgotten_skips(steps: Windows, *, forgets_restore: bool) -> None:
    """Warn of steps that were to be skipped, and of a request to restore them, if a load forgets them."""
    if steps:
        msg = f"load_state_dict: steps {in_words(steps)} were to be skipped, and the loaded state does not skip them: "
        warn_user(f"{msg}call skip_steps after load_state_dict", SkippedStepsWarning)
    if forgets_restore:
        msg = "load_state_dict: skipped steps were to be restored, and the loaded state does not restore them: call "
        warn_user(f"{msg}restore_skipped after load_state_dict", SkippedStepsWarning)


def warn_of_unrestored_steps(epoch: int, framework: str) -> None:
    """Warn that a framework ended an epoch before its skipped steps were restored."""
    msg = f"restore_skipped: {framework} ended epoch {epoch} before all of its skipped steps were delivered again: it "
    warn_user(f"{msg}plans the length of an epoch ahead, and may have a limit", SkippedStepsWarning)


def warn_of_unused_state(loaded: int, batches: int, epoch: int) -> None:
    """Warn of a loaded state, given by its epoch and the batches before it, that another epoch takes the place of."""
    msg = f"set_epoch({epoch}) gives up the loaded state, of epoch {loaded} after {batches} batches, from which no "
    warn_user(f"{msg}iteration has continued: begin the loop over epochs at dataset.epoch", UnusedStateWarning)


def warn_of_touched_files(saved: SavedState, run: Run) -> None:
    """Warn of files of which only the modification time differs from a loaded state's."""
    touched = touched_files(saved, run)
    if touched:
        text = "files have a new modification time since the checkpoint, with the same size and footer"
        advice = "if their rows were changed, begin the epoch without the state"
        warn_user(f"{text}: {shorten(touched)}; {advice}", ChangedFilesWarning)


def warn_of_lost_rows(lost_rows: Mapping[str, int], period: str, *, counts_rows: bool) -> None:
    """Warn of rows that can no longer be delivered, given their number for each removed or rewritten file.

    The period is what begins anew with the new rows: an epoch, or a pass of a source.
    """
    if not lost_rows:
        return
    files, count = list(lost_rows), "an unknown number of"
    if counts_rows:
        files = [f"{path} ({rows} rows)" for path, rows in lost_rows.items()]
        count = str(sum(lost_rows.values()))
    text = f"{count} rows can no longer be delivered: their files were removed or rewritten since the checkpoint"
    warn_user(f"{text}: {shorten(files)}; the new rows of these files come in the next {period}", LostRowsWarning)


def warn_of_unknown_hashes(epoch: int, progress: Progress) -> None:
    """Log a warning if a loaded state does not tell which rows were delivered before it."""
    if progress.hashes is None:
        unknown = f"the hash of the rows delivered in epoch {epoch} is not known, and begins with the next epoch"
        LOG.warning("the loaded state was saved without fingerprint=True: %s", unknown)


def log_uneven_rows(epoch: int, uneven_rows: Mapping[str, Sequence[tuple[str, int]]]) -> None:
    """Log the rows that were dropped or repeated so that all ranks have equally many."""
    for verb, rows in uneven_rows.items():
        if rows:
            shown = shorten([f"{path} row {row}" for path, row in rows])
            LOG.info("epoch %d: %d rows %s so that all ranks have equally many: %s", epoch, len(rows), verb, shown)
