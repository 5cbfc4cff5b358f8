"""A strict load of skipped steps: from what states record to marks in the streams of a plan. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from torch_dataloader_utils.checkpoint.progress import Progress, Restored, StreamProgress
from torch_dataloader_utils.checkpoint.saved_state import SavedSkips, SavedState
from torch_dataloader_utils.checkpoint.skipped_steps import Place, SkippedSteps, Streams, ends_of
from torch_dataloader_utils.errors import RankMismatchError
from torch_dataloader_utils.planning.plan import Plan
from torch_dataloader_utils.planning.topology import Topology

Saved: TypeAlias = list[tuple[SavedState, SavedSkips]]
"""The states that a progress was made of: this rank's, or under a virtual topology those of all ranks."""


def place_skips(progress: Progress, states: Sequence[SavedState], topology: Topology) -> Progress:
    """Return the progress with the skipped steps that the states record which it was made of.

    Raises:
        RankMismatchError: If states of several ranks skip different steps.
        ValueError: If a state records steps or places that its streams do not have.
    """
    saved = [(state, state.skips) for state in states if state.skips is not None]
    if not saved:
        return progress
    first = saved[0][1]
    if len(saved) < len(states) or any(_in_common(skips) != _in_common(first) for _, skips in saved):
        raise RankMismatchError("the states do not fit together: their ranks skip different steps")
    skips = []
    for number, skip in enumerate(first.skips):
        begin = _own_places(progress, topology, saved, [skips.skips[number].begin.places for _, skips in saved])
        end = _own_places(progress, topology, saved, [skips.skips[number].end.places for _, skips in saved])
        skips.append(SkippedSteps(replace(skip.begin, places=begin), replace(skip.end, places=end)))
    progress = progress._replace(skip_requests=first.steps, skips=tuple(skips), restores=first.restores)
    for mark in (mark for skip in skips for mark in (skip.begin, skip.end)):
        _require_places(mark.places, progress.planned)
        if mark.turn >= progress.count_of_turns:
            raise _wrong(f"worker {mark.turn} makes a step, and there are {progress.count_of_turns} workers")
    _require_sides(progress)
    return progress if first.restored is None else _with_restored(progress, topology, saved)


def with_carried(progress: Progress, topology: Topology, skipped_plan: Plan | None) -> Progress:
    """Return the progress with the rows that were skipped before its baseline, as this rank would deliver them."""
    skipped = None if progress.baseline is None else progress.baseline.skipped
    if skipped is None:
        return progress
    carried = () if skipped_plan is None else topology.own_streams(skipped_plan)
    balanced = None if skipped_plan is None else skipped_plan.balanced
    dropped = () if balanced is None or 0 not in topology.own_ranks else balanced.dropped
    return progress._replace(carried=carried, carried_dropped=dropped, restores=skipped.restores)


def _in_common(skips: SavedSkips) -> tuple[object, ...]:
    """Return what the states of all ranks of a virtual topology have in common."""
    steps = [(skip.begin.step, skip.begin.turn, skip.end.step, skip.end.turn) for skip in skips.skips]
    restored = None if skips.restored is None else (skips.restored.number, skips.restored.next_worker)
    return skips.steps, steps, skips.restores, restored


def _own_places(
    progress: Progress, topology: Topology, saved: Saved, places: Sequence[tuple[Place, ...]]
) -> tuple[Place, ...]:
    """Return the places of this rank's streams, given those of each saved state's streams."""
    turns, known = progress.count_of_turns, {}
    for (state, _), own in zip(saved, places, strict=True):
        together, rest = divmod(topology.planned_ranks * topology.sources, state.num_ranks)
        if rest or len(own) != turns * together:
            raise _wrong(f"there are places of {len(own)} streams of rank {state.rank}")
        for index, place in enumerate(own):
            turn, number = divmod(index, together)
            known[turn, state.rank * together + number] = place
    return tuple(known[turn, rank] for turn in range(turns) for rank in topology.own_ranks)


def _require_places(places: Sequence[Place], planned: Streams) -> None:
    """Raise unless streams have these places."""
    for (index, row), slices in zip(places, planned, strict=True):
        has_place = index <= len(slices) if not row else index < len(slices)
        if not has_place or (row and not slices[index].start < row < slices[index].stop):
            raise _wrong(f"a stream has no row {row} of its slice {index}")


def _require_sides(progress: Progress) -> None:
    """Raise unless each range of skipped steps is behind the progress, or lies ahead of it, in all streams."""
    mark = progress.mark
    for skip in progress.skips:
        pairs = zip(skip.end.places, mark.places, strict=True)
        if skip.end.step <= mark.step and all(place <= reached for place, reached in pairs):
            continue
        pairs = zip(mark.places, skip.begin.places, strict=True)
        if skip.begin.step >= mark.step and all(reached <= place for reached, place in pairs):
            continue
        raise _wrong(f"steps {skip.begin.step} to {skip.end.step - 1} are neither passed nor ahead of step {mark.step}")


def _with_restored(progress: Progress, topology: Topology, saved: Saved) -> Progress:
    """Return the progress within the skipped rows that come after the last step."""
    places = [skips.restored.places for _, skips in saved if skips.restored is not None]
    restored = saved[0][1].restored
    groups = progress.restorable
    if restored is None or restored.number >= len(groups) or restored.next_worker >= progress.count_of_turns:
        raise _wrong("there are no such skipped rows after the last step")
    if progress.mark.places != ends_of(progress.planned):
        raise _wrong("skipped rows were delivered before the last step was made")
    planned = groups[restored.number][1]
    own = _own_places(progress, topology, saved, places)
    _require_places(own, planned)
    streams = tuple(StreamProgress(slices, slices).at(place) for slices, place in zip(planned, own, strict=True))
    return progress._replace(restored=Restored(restored.number, streams, restored.next_worker))


def _wrong(problem: str) -> ValueError:
    return ValueError(f"not a state of this package: {problem}, as state['skipped'] says")
