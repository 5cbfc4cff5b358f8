"""What a run excludes after it has loaded a state."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch_dataloader_utils.checkpoint.compare import excluded_in_workers_alone, unknown_expression
from torch_dataloader_utils.checkpoint.progress import RemovedRows
from torch_dataloader_utils.checkpoint.removed_rows import saved_removed
from torch_dataloader_utils.checkpoint.run import Run
from torch_dataloader_utils.checkpoint.saved_state import SavedState
from torch_dataloader_utils.formats.opened_files import Opened
from torch_dataloader_utils.planning.excluded import Exclusions
from torch_dataloader_utils.planning.manifest import Layout


def loaded_exclusions(
    states: Sequence[SavedState], run: Run, opened_files: Opened, changed: Collection[str] = ()
) -> Exclusions:
    """Return what states of an epoch exclude and, from that epoch on, what the run excludes as well.

    It is the state of the run's rank that counts, or the first where there is none of it. What a state excludes of
    changed files is no longer excluded: its row numbers are those of other rows now.

    Raises:
        CheckpointMismatchError: If a state excludes rows by an expression that the run does not know.
    """
    saved = _own(states, run)
    exclusions = saved.excluded.exclusions(_files(saved, run))
    unknown = [one for one in exclusions.expressions if one.digest not in opened_files.expressions]
    if unknown:
        raise unknown_expression(unknown[0])
    return exclusions.without_files(changed).joined(run.exclusions, saved.epoch)


def require_own_exclusions(loaded: Exclusions, run: Run) -> None:
    """Raise unless the run itself excludes all rows that it would exclude after a load.

    Raises:
        CheckpointMismatchError: If a state excludes more.
    """
    more = loaded.all_rows.minus(run.exclusions.all_rows)
    if more:
        raise excluded_in_workers_alone(more.rows)


def loaded_removed(
    states: Sequence[SavedState], run: Run, *, strict: bool, changed: Collection[str] = ()
) -> RemovedRows:
    """Return which rows of the current epoch states exclude, and which of them were delivered before.

    In a strict load it is the state of the run's rank that counts, or all of them where other ranks saved them: then a
    rank continues virtual ranks of several.
    """
    saved = _own(states, run)
    is_own_alone = strict and saved.num_ranks == run.topology.num_ranks
    removed = saved_removed([saved] if is_own_alone else states, _files(saved, run))
    return replace(removed, delivered=removed.delivered.without_files(changed))


def _own(states: Sequence[SavedState], run: Run) -> SavedState:
    return next((state for state in states if state.rank == run.topology.rank), states[0])


def _files(saved: SavedState, run: Run) -> Layout:
    """Return the files to which row numbers of a state refer."""
    if saved.fingerprint != run.manifest.fingerprint and saved.files is not None:
        return Layout((file.path, file.rows or 0) for file in saved.files)
    return run.manifest.rows_by_file
