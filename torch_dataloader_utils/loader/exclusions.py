"""What a run excludes after it has loaded a state."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch_dataloader_utils.checkpoint.compare import unknown_expression
from torch_dataloader_utils.checkpoint.run import Run
from torch_dataloader_utils.checkpoint.saved_state import SavedState
from torch_dataloader_utils.formats.base import Opened
from torch_dataloader_utils.planning.excluded import Exclusions


def loaded_exclusions(
    states: Sequence[SavedState], run: Run, opened_files: Opened, changed: Collection[str] = ()
) -> Exclusions:
    """Return what states of an epoch exclude and, from that epoch on, what the run excludes as well.

    It is the state of the run's rank that counts, or the first where there is none of it. What a state excludes of
    changed files is no longer excluded: its row numbers are those of other rows now.

    Raises:
        CheckpointMismatchError: If a state excludes rows by an expression that the run does not know.
    """
    saved = next((state for state in states if state.rank == run.topology.rank), states[0])
    files = run.manifest.rows_by_file
    if saved.fingerprint != run.manifest.fingerprint and saved.files is not None:
        files = [(file.path, file.rows or 0) for file in saved.files]
    exclusions = saved.excluded.exclusions(files)
    unknown = [one for one in exclusions.expressions if one.digest not in opened_files.expressions]
    if unknown:
        raise unknown_expression(unknown[0])
    return exclusions.without_files(changed).joined(run.exclusions, saved.epoch)
