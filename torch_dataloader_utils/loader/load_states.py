"""From saved states to the epoch that a rank continues: its plans, and its progress. Nothing is changed here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.utils.data import get_worker_info

from torch_dataloader_utils.checkpoint.delivered_hash import loaded_hashes
from torch_dataloader_utils.checkpoint.merge.states import Merged, OnChangedFiles, merge_states
from torch_dataloader_utils.checkpoint.progress import Progress
from torch_dataloader_utils.checkpoint.restore import check_states, place_states
from torch_dataloader_utils.checkpoint.restore_skips import with_carried
from torch_dataloader_utils.checkpoint.run import Run
from torch_dataloader_utils.checkpoint.saved_state import SavedState
from torch_dataloader_utils.loader.epoch_plans import EpochPlans
from torch_dataloader_utils.loader.exclusions import loaded_exclusions, loaded_removed, require_own_exclusions
from torch_dataloader_utils.loader.mixture import placed, reweighted, with_changed_passes
from torch_dataloader_utils.loader.skip_requests import requests_left, require_same_batches
from torch_dataloader_utils.loader.user_warnings import warn_of_lost_rows, warn_of_touched_files, warn_of_unknown_hashes
from torch_dataloader_utils.planning.planner import PLAN_ALGORITHMS


@dataclass(frozen=True)
class LoadedEpoch:
    """An epoch that states continue.

    Attributes:
        plans: What it, and later ones, are planned from.
        progress: Its progress.
    """

    plans: EpochPlans
    progress: Progress


def load_strictly(states: Sequence[SavedState], plans: EpochPlans, *, adopts_num_workers: bool) -> LoadedEpoch:
    """Return the epoch of a run that continues exactly where it saved the states.

    `adopts_num_workers` says that the states' number of workers replaces that of the topology.
    """
    epoch, plans = states[0].epoch, _placed(plans, states[0], strict=True)
    run = _run_of(states, plans)
    own, run = run, replace(run, exclusions=loaded_exclusions(states, run, plans.opened_files))
    if get_worker_info() is not None:  # a loader that loads states in its workers restores their turns as well
        require_own_exclusions(run.exclusions, own)
        plans = plans.of_run(run)
        progress = _restored(states, run, plans).with_turn_restored(run.topology.processes)
    else:
        if adopts_num_workers and run.topology.virtual_workers is None:
            run = replace(run, topology=replace(run.topology, num_workers=states[0].num_workers))
        plans = plans.of_run(run)
        progress = _restored(states, run, plans)
    progress = progress._replace(removed=loaded_removed(states, run, strict=True))
    mixture = states[0].mixture
    plans = replace(plans, next_weights=None if mixture is None else mixture.next_weights)
    return LoadedEpoch(plans, _with_hashes(progress, states, plans, epoch, strict=True))


def load_elastically(
    states: Sequence[SavedState], plans: EpochPlans, *, on_changed_files: OnChangedFiles
) -> LoadedEpoch:
    """Return the epoch of a run that plans again what other ranks and workers have not delivered."""
    epoch, plans = states[0].epoch, _placed(plans, states[0], strict=False)
    before = _run_of(states, plans)
    run = replace(before, exclusions=loaded_exclusions(states, before, plans.opened_files))
    merged = merge_states(states, run, on_changed_files=on_changed_files)
    run = replace(run, exclusions=loaded_exclusions(states, before, plans.opened_files, merged.changed))
    loaded = _planned_again(states, run, plans, merged)
    progress = loaded.progress._replace(removed=loaded_removed(states, run, strict=False, changed=merged.changed))
    plans = replace(loaded.plans, next_weights=None)
    return LoadedEpoch(plans, _with_hashes(progress, states, plans, epoch, strict=False))


def _placed(plans: EpochPlans, saved: SavedState, *, strict: bool) -> EpochPlans:
    """Return the plans of a mixture whose sources stand where a state's do; those of a single dataset as they are."""
    planner = placed(plans.planner, saved, plans.topology, strict=strict)
    if plans.next_weights is not None:
        planner = reweighted(planner, plans.next_weights, saved.epoch, plans.topology, is_loaded=True)
    return replace(plans, planner=planner)


def _run_of(states: Sequence[SavedState], plans: EpochPlans) -> Run:
    """Return the run that states are compared with. Their algorithm plans their epoch."""
    run, algorithm = plans.run(states[0].epoch), states[0].settings["plan_algorithm"]
    return replace(run, plan_algorithm=algorithm) if algorithm in PLAN_ALGORITHMS else run  # else it is a difference


def _restored(states: Sequence[SavedState], run: Run, plans: EpochPlans) -> Progress:
    """Return the progress that states record, in the plan that they were saved under."""
    checked = check_states(states, run)
    epoch, baseline = checked.epoch, checked.baseline
    progress = place_states(checked, plans.plan(epoch, baseline), plans.plan_skipped(epoch, baseline))
    counts_rows = plans.unknown_steps(epoch) is None
    quotas = plans.quotas(epoch, progress.baseline)
    require_same_batches(progress, states[0], plans.read_options, quotas, counts_rows=counts_rows)
    warn_of_touched_files(states[0], run)
    return progress


def _planned_again(states: Sequence[SavedState], run: Run, plans: EpochPlans, merged: Merged) -> LoadedEpoch:
    epoch, baseline = states[0].epoch, merged.baseline
    plans = replace(plans.of_run(run), planner=with_changed_passes(plans.planner, merged))
    plan = plans.plan(epoch, baseline)
    plans = replace(plans, planner=plans.planner.reaching(plan, run.topology))
    warn_of_touched_files(states[0], run)
    period = "epoch" if run.mixture is None else "pass"
    warn_of_lost_rows(merged.lost_rows, period, counts_rows=run.manifest.counts_rows)
    progress = Progress.fresh(run.topology.own_streams(plan), run.topology.streams_per_turn, baseline)
    progress = with_carried(progress, run.topology, plans.plan_skipped(epoch, baseline))
    if plans.unknown_steps(epoch) is not None:
        progress = progress._replace(skip_requests=requests_left(states[0], baseline))
    return LoadedEpoch(plans, progress)


def _with_hashes(
    progress: Progress, states: Sequence[SavedState], plans: EpochPlans, epoch: int, *, strict: bool
) -> Progress:
    """Return a progress with the hashes of what was delivered before it, if the run has hashes."""
    if not plans.read_options.fingerprint:
        return progress
    progress = progress._replace(hashes=loaded_hashes(states, plans.topology, is_strict=strict))
    warn_of_unknown_hashes(epoch, progress)
    return progress
