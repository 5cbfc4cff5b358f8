"""Loaded states to an epoch's progress: compared, planned, placed."""

from __future__ import annotations

from collections.abc import Sequence

from torch_dataloader_utils.checkpoint.merge import OnChangedFiles, merge_states
from torch_dataloader_utils.checkpoint.progress import Progress
from torch_dataloader_utils.checkpoint.restore import check_states, place_states
from torch_dataloader_utils.checkpoint.run import Run
from torch_dataloader_utils.checkpoint.saved_state import SavedState
from torch_dataloader_utils.loader.user_warnings import warn_of_lost_rows, warn_of_touched_files
from torch_dataloader_utils.planning.planner import EpochPlanner

__all__ = ["load_elastically", "load_strictly"]


def load_strictly(states: Sequence[SavedState], run: Run, planner: EpochPlanner) -> Progress:
    """Return the progress of a run that continues exactly where it saved the states.

    Args:
        states: This rank's state, or those of all ranks.
        run: The run that loads them.
        planner: Plans its epochs.

    Raises what `check_states` and `place_states` raise.
    """
    checked = check_states(states, run)
    plan = planner.plan(checked.epoch, run.topology, checked.baseline)
    progress = place_states(checked, plan)
    warn_of_touched_files(states[0], run.manifest)
    return progress


def load_elastically(
    states: Sequence[SavedState], run: Run, planner: EpochPlanner, on_changed_files: OnChangedFiles
) -> Progress:
    """Return the progress of a run that plans again what other ranks and workers have not delivered.

    Args:
        states: The states of all ranks.
        run: The run that loads them.
        planner: Plans its epochs.
        on_changed_files: Whether files that have changed are an error, or are left out.

    Raises what `merge_states` raises.
    """
    merged = merge_states(states, run, on_changed_files=on_changed_files)
    plan = planner.plan(merged.epoch, run.topology, merged.baseline)
    progress = Progress.fresh(run.topology.own_streams(plan), run.topology.streams_per_turn, merged.baseline)
    warn_of_touched_files(states[0], run.manifest)
    warn_of_lost_rows(merged.lost_rows, counts_rows=run.manifest.counts_rows)
    return progress
