"""A strict load: saved states to progress in a plan that has not changed. Pure.

The caller runs three steps, one after the other. `check_states` compares the states with the run and returns what to
plan. The caller's planner makes that plan. `place_states` finds in the plan's streams what the states record. The
settings are compared in the first step, but a difference is raised in the last: then the error can also name a shard
that the plan does not have.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch_dataloader_utils.checkpoint.compare import (
    compare_settings,
    mismatch,
    require_each_rank,
    require_possible_windows,
    require_row_groups,
)
from torch_dataloader_utils.checkpoint.file_changes import FileChanges, compare_files
from torch_dataloader_utils.checkpoint.progress import Progress, StreamProgress
from torch_dataloader_utils.checkpoint.restore_skips import place_skips, with_carried
from torch_dataloader_utils.checkpoint.run import Run
from torch_dataloader_utils.checkpoint.saved_state import SavedBaseline, SavedShard, SavedState
from torch_dataloader_utils.checkpoint.skipped_steps import rows_in
from torch_dataloader_utils.errors import Difference, RankMismatchError, shown
from torch_dataloader_utils.planning.excluded import ExcludedRows
from torch_dataloader_utils.planning.manifest import Manifest, Split
from torch_dataloader_utils.planning.plan import (
    TO_THE_END,
    DeliveredBaseline,
    PartialShard,
    Plan,
    Shard,
    ShardSlice,
    SkippedRows,
)
from torch_dataloader_utils.planning.row_ranges import (
    Coverage,
    RowRange,
    Windows,
    first_overlap,
    merged,
    size_of,
    splits_of_rows,
)

REAL_TOPOLOGY = ("num_workers", "num_ranks", "rank")
"""Settings that may differ where a virtual topology determines which batch has which rows."""


@dataclass(frozen=True, slots=True)
class CheckedStates:
    """States that were compared with a run, how they differ from it, and what to plan so that they can be placed.

    They are this rank's state, or those of all ranks, saved at one step under a virtual topology.
    """

    run: Run
    states: tuple[SavedState, ...]
    of_all_ranks: bool
    baseline: DeliveredBaseline | None
    differences: tuple[Difference, ...]
    files: FileChanges

    @property
    def epoch(self) -> int:
        """The epoch to plan."""
        return self.states[0].epoch


# Check -------------------------------------------------------------------------------------------------------------


def check_states(states: Sequence[SavedState], run: Run) -> CheckedStates:
    """Compare this rank's state, or those of all ranks, with the run that loads them.

    Raises:
        CheckpointMismatchError: If what was delivered before is no longer whole row groups.
        RankMismatchError: If some rank's state is missing or given twice, if states are of several epochs, or if those
            of a virtual topology were not saved at one step.
    """
    of_all_ranks = run.topology.virtual_ranks is not None and not _is_of_this_rank(states, run)
    states = tuple(states) if of_all_ranks else (_state_of_this_rank(states, run),)
    may_differ = () if run.topology.virtual_ranks is None else REAL_TOPOLOGY
    files = compare_files(states[0], run)
    differences = dict.fromkeys(found for state in states for found in compare_settings(state, run, may_differ, files))
    if of_all_ranks and not differences:
        require_each_rank(states)
        differences |= dict.fromkeys(_differing_steps(states))
    saved = states[0].baseline
    left_out = run.exclusions.in_epoch(states[0].epoch).left_out
    is_open = run.options.is_open_ended
    baseline = None if saved is None else load_baseline(saved, run.manifest, left_out, is_open_ended=is_open)
    if baseline is not None and not differences and not files:
        require_row_groups(baseline, run.manifest)
        require_possible_windows(baseline.partial)
    return CheckedStates(run, states, of_all_ranks, baseline, tuple(differences), files)


def _is_of_this_rank(states: Sequence[SavedState], run: Run) -> bool:
    """Whether there is one state, which this rank saved under today's number of ranks."""
    this_rank = (run.topology.num_ranks, run.topology.rank)
    return len(states) == 1 and (states[0].num_ranks, states[0].rank) == this_rank


def _state_of_this_rank(states: Sequence[SavedState], run: Run) -> SavedState:
    """Return this rank's state. If there is none, return a state whose differences will say so."""
    if len(states) == 1:
        return states[0]
    require_each_rank(states)
    return next((state for state in states if state.rank == run.topology.rank), states[0])


def _differing_steps(states: Sequence[SavedState]) -> Iterator[Difference]:
    """Yield how the steps differ at which ranks saved their states, if they passed over steps that had lost all rows.

    Raises:
        RankMismatchError: If they differ otherwise.
    """
    reached = [(state.batches_delivered, state.baseline) for state in states]
    if all(other == reached[0] for other in reached):
        return
    steps = ", ".join(f"rank {s.rank} step {s.batches_delivered}" for s in states)
    if not (states[0].excluded.rows or states[0].excluded.expressions):
        msg = f"all ranks of a virtual topology have to save their states at one step; these differ: {steps}; "
        raise RankMismatchError(f"{msg}load_state_dict(states, strict=False) plans the rest again, each row once")
    yield Difference("batches_delivered", steps, "one step of all ranks")


def load_baseline(
    saved: SavedBaseline, manifest: Manifest, left_out: ExcludedRows, *, is_open_ended: bool
) -> DeliveredBaseline:
    """Return a saved baseline by ranges of files. `is_open_ended` is that of the plan's options."""

    def partial_of(shards: Iterable[SavedShard]) -> tuple[PartialShard, ...]:
        return tuple(shard.partial(manifest.rows_by_file, left_out, is_open_ended=is_open_ended) for shard in shards)

    done = tuple(splits_of_rows(manifest.rows_by_file, saved.completed_rows))
    partial = partial_of(saved.in_progress)
    baseline = DeliveredBaseline(
        done, partial, saved.left_out, saved.batches_delivered, hashes=saved.hashes, gone=saved.gone
    )
    if saved.skipped is None:
        return baseline
    rows, steps, restores = saved.skipped
    parts = partial_of(rows.in_progress)
    return replace(baseline, skipped=SkippedRows(tuple(rows.whole(manifest.rows_by_file)), parts, steps, restores))


# Place -------------------------------------------------------------------------------------------------------------


def place_states(checked: CheckedStates, plan: Plan, skipped_plan: Plan | None = None) -> Progress:
    """Return the progress that checked states record in the run's plan of their epoch and baseline.

    `skipped_plan` is that of the rows which were skipped before the baseline.

    Raises:
        CheckpointMismatchError: If settings or files differ, or the plan does not have what a state records.
        ValueError: If a state records a shard twice, or what no run can have delivered.
    """
    topology, manifest = checked.run.topology, checked.run.manifest
    ranks = range(plan.num_ranks) if checked.of_all_ranks else topology.own_ranks
    streams = {(rank, worker): plan.stream(rank, worker) for worker in range(plan.streams) for rank in ranks}
    recorded = _Recorded(checked.states, manifest)
    recorded.end_with(part.shard for stream in streams.values() for part in stream)
    lost = recorded.first_unplaced(streams.values())
    if checked.differences or checked.files or lost:
        raise mismatch(checked.differences, checked.files, lost, manifest)
    placed = {key: StreamProgress(stream, tuple(_left(stream, recorded))) for key, stream in streams.items()}
    recorded.require_matched(placed.values(), manifest)
    first = checked.states[0]
    own = tuple(placed[rank, worker] for worker in range(plan.streams) for rank in topology.own_ranks)
    progress = Progress(
        own, first.next_worker, first.batches_delivered, None, topology.streams_per_turn, checked.baseline
    )
    progress = place_skips(with_carried(progress, topology, skipped_plan), checked.states, topology)
    _require_possible(progress)
    return progress


class _Recorded:
    """The rows that states record as delivered, by shard."""

    def __init__(self, states: Sequence[SavedState], manifest: Manifest) -> None:
        completed = [split for state in states for split in state.done(manifest.rows_by_file)]
        self._coverage = Coverage(completed)
        # A range that two states record would look like one in the coverage, which merges ranges.
        self._shared = None if len(states) == 1 else first_overlap(map(RowRange.of, completed))
        recorded: list[defaultdict[tuple[Split, ...], list[tuple[int, int]]]] = [defaultdict(list), defaultdict(list)]
        for shard in (shard for state in states for shard in state.in_progress):
            recorded[shard.repeats][shard.partial(manifest.rows_by_file).shard.splits] += shard.windows
        self._partial, self._repeated = ({key: merged(held[key]) for key in held} for held in recorded)
        if any(size_of(self._partial[splits]) != size_of(windows) for splits, windows in recorded[0].items()):
            raise ValueError("not a state of this package: it records a shard in progress twice")

    def end_with(self, shards: Iterable[Shard]) -> None:
        """Let windows end with these shards, where it is known what they deliver, and states record an open end."""
        for shard in shards:
            if shard.delivers is None or shard.delivers == TO_THE_END:
                continue
            for held in (self._partial, self._repeated):
                windows = held.get(shard.splits, ())
                if windows and windows[-1][1] == TO_THE_END:
                    start = windows[-1][0]
                    last = ((start, shard.rows),) if start < shard.rows else ()
                    held[shard.splits] = (*windows[:-1], *last)

    def windows(self, shard_slice: ShardSlice) -> Windows:
        """Return the rows of a slice's shard that were delivered."""
        splits = shard_slice.shard.splits
        if shard_slice.repeats:
            return self._repeated.get(splits, ())
        if splits in self._partial:
            return self._partial[splits]
        return ((0, shard_slice.shard.rows),) if all(map(self._coverage.covers, splits)) else ()

    def first_unplaced(self, streams: Iterable[Iterable[ShardSlice]]) -> tuple[Split, ...] | None:
        """Return a recorded shard or range that these streams do not have, or None."""
        if self._shared is not None:
            path, start, stop, _ = self._shared[1]
            return (Split(path, start, stop - start),)
        shards = list(dict.fromkeys(shard_slice.shard for stream in streams for shard_slice in stream))
        planned = {shard.splits for shard in shards}
        for splits in self._partial:
            if splits not in planned or any(map(self._coverage.covers, splits)):
                return splits
        present = [shard for shard in shards if not shard.missing]
        for shard in present:
            if 0 < sum(map(self._coverage.covers, shard.splits)) < len(shard.splits):
                return shard.splits
        lost = self._coverage.without(present)
        return None if lost is None else (lost,)

    def require_matched(self, placed: Iterable[StreamProgress], manifest: Manifest) -> None:
        """Raise if more is recorded than these streams have delivered."""
        wanted = {splits: size_of(windows) for splits, windows in self._partial.items()}
        matched = Counter[tuple[Split, ...]]()
        for stream in placed:
            for shard in (part.shard for part in stream.planned if part.shard.splits not in wanted):
                if all(map(self._coverage.covers, shard.splits)):
                    wanted[shard.splits] = shard.rows
            for part in (part for part in stream.done if not part.repeats):
                matched[part.shard.splits] += part.rows
        lost = next((splits for splits, rows in wanted.items() if matched[splits] != rows), None)
        if lost is not None:
            raise mismatch((), FileChanges(), lost, manifest)


def _left(stream: Iterable[ShardSlice], recorded: _Recorded) -> Iterator[ShardSlice]:
    """Yield the undelivered part of a stream. A stream delivers its slices in order, so that this part is its end."""
    reached_end = False
    for shard_slice in stream:
        windows = recorded.windows(shard_slice)
        until = next((stop for start, stop in windows if start <= shard_slice.start < stop), shard_slice.start)
        until = min(until, shard_slice.stop)
        later = any(until < start < shard_slice.stop for start, _ in windows)
        if later or (reached_end and until > shard_slice.start):
            msg = "not a state of this package: a worker's shards are done in their order, and these are not"
            raise ValueError(msg)
        if until < shard_slice.stop or reached_end:  # a shard that delivers nothing is done once those before it are
            reached_end = True
            yield replace(shard_slice, start=until)


def _require_possible(progress: Progress) -> None:
    """Raise if there were more batches than rows."""
    rows = sum(shard_slice.rows for stream in progress.streams for shard_slice in stream.done)
    if progress.restored is not None:
        rows += sum(rows_in(slices) for _, slices in progress.restorable)
        rows -= sum(map(rows_in, progress.restorable_left))
    batches = progress.batches_delivered - (0 if progress.baseline is None else progress.baseline.batches)
    if batches > rows:
        raise ValueError(f"not a state of this package: it records {shown(batches)} batches of {rows} rows")
