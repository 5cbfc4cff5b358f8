"""States to progress where nothing has changed: each place in today's plan by what was delivered. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from torch_dataloader_utils.checkpoint.compare import FileChanges, compare_files, mismatch
from torch_dataloader_utils.checkpoint.progress import Progress, StreamProgress
from torch_dataloader_utils.checkpoint.run import Run
from torch_dataloader_utils.checkpoint.saved_state import SavedBaseline, SavedShard, SavedState
from torch_dataloader_utils.errors import Difference, RankMismatchError
from torch_dataloader_utils.planning.manifest import Manifest, Split
from torch_dataloader_utils.planning.plan import DeliveredBaseline, PartialShard, Plan, Shard, ShardSlice
from torch_dataloader_utils.planning.row_ranges import Coverage, Windows, merged, splits_of_rows

__all__ = ["require_each_rank", "require_row_groups", "restore_progress"]


OWN = ("num_workers", "num_ranks", "rank")
"""Settings that may differ where a grid decides what is delivered when."""


def restore_progress(
    states: Sequence[SavedState], run: Run, plan_epoch: Callable[[int, DeliveredBaseline | None], Plan]
) -> Progress:
    """Return the progress that states record, placed in today's plan.

    Args:
        states: This rank's state, or those of all ranks.
        run: What they must belong to.
        plan_epoch: Plans an epoch of this run, or what a baseline left of it.

    Returns:
        The progress, ready for an iteration that continues.

    Raises:
        CheckpointMismatchError: If anything that the plan depends on differs.
        RankMismatchError: If states of a grid are not one of each rank, taken at one step.
        ValueError: If a state records a shard twice, or what no run can have delivered.
    """
    topology, manifest = run.topology, run.manifest
    everybody = topology.virtual_ranks is not None and not _is_own(states, run)
    states = states if everybody else [_own(states, run)]
    first = states[0]
    may_differ = () if topology.virtual_ranks is None else OWN
    differences = list(dict.fromkeys(found for state in states for found in _differences(state, run, but=may_differ)))
    files = compare_files(first, manifest)
    if everybody and not differences:
        require_each_rank(states)
        _require_one_step(states)
    baseline = None if first.baseline is None else _load_baseline(first.baseline, manifest)
    if baseline is not None and not differences and not files:
        require_row_groups(baseline, manifest)
    plan = plan_epoch(first.epoch, baseline)
    ranks = range(topology.planned_ranks) if everybody else topology.own_ranks
    streams = {(rank, worker): plan.stream(rank, worker) for worker in range(plan.streams) for rank in ranks}
    recorded = _Recorded(states, manifest)
    lost = recorded.first_unplaced(list(streams.values()))
    if differences or files or lost:
        raise mismatch(differences, files, lost, manifest)
    placed = {key: _placed(stream, recorded) for key, stream in streams.items()}
    recorded.require_matched(placed.values(), run)
    progress = Progress(
        streams=tuple(placed[rank, worker] for worker in range(plan.streams) for rank in topology.own_ranks),
        next_turn=first.next_worker,
        batches_delivered=first.batches_delivered,
        streams_per_turn=topology.streams_per_turn,
        baseline=baseline,
    )
    _require_possible(progress)
    return progress


def _load_baseline(saved: SavedBaseline, manifest: Manifest) -> DeliveredBaseline:
    """Return what a state records of the epoch before it was planned anew."""
    return DeliveredBaseline(
        done=tuple(splits_of_rows(manifest.rows_by_file, saved.completed_rows)),
        partial=tuple(
            PartialShard(Shard(_splits_of(one, manifest), one.rounds, one.missing), one.windows)
            for one in saved.in_progress
        ),
        left_out=saved.left_out,
        batches=saved.batches_delivered,
    )


def _splits_of(saved: SavedShard, manifest: Manifest) -> tuple[Split, ...]:
    """Return the row ranges of a shard, however a state records them."""
    return saved.splits or tuple(splits_of_rows(manifest.rows_by_file, saved.rows))


def require_each_rank(states: Sequence[SavedState]) -> None:
    """Raise unless there is one state of each rank.

    Raises:
        RankMismatchError: If there is not; the message names the ranks.
    """
    counts = sorted({state.num_ranks for state in states})
    if len(counts) > 1:
        saved = ", ".join(f"rank {state.rank} of {state.num_ranks}" for state in states)
        msg = f"the states were saved under different numbers of ranks: {saved}"
        raise RankMismatchError(msg)
    ranks = [state.rank for state in states]
    missing = sorted(set(range(counts[0])).difference(ranks))
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if twice:
        msg = f"the states of ranks {twice} are there more than once: give each of the {counts[0]} ranks' states once"
        raise RankMismatchError(msg)
    if missing:
        msg = f"the states of ranks {missing} are missing: all {counts[0]} ranks' states are needed, and {ranks} given"
        raise RankMismatchError(msg)


def require_row_groups(baseline: DeliveredBaseline, manifest: Manifest) -> None:
    """Raise unless what was done, or was under way, is whole row groups of today's files."""
    bounds = {
        file.path: set(accumulate((group.rows for group in file.row_groups), initial=0)) for file in manifest.files
    }
    present = [
        split
        for started in baseline.partial
        for place, split in enumerate(started.shard.splits)
        if place not in started.shard.missing
    ]
    for split in [*baseline.done, *present]:
        ends = {split.row_offset, split.row_offset + split.row_length}
        if not ends <= bounds.get(split.path, set()):
            raise mismatch((), FileChanges(), (split,), manifest)


def _is_own(states: Sequence[SavedState], run: Run) -> bool:
    """Whether there is one state, of this very rank."""
    own = (run.topology.num_ranks, run.topology.rank)
    return len(states) == 1 and (states[0].num_ranks, states[0].rank) == own


def _own(states: Sequence[SavedState], run: Run) -> SavedState:
    """Return this rank's state, or one whose differences say why there is none."""
    if len(states) == 1:
        return states[0]
    require_each_rank(states)
    return next((state for state in states if state.rank == run.topology.rank), states[0])


def _differences(saved: SavedState, run: Run, but: Iterable[str]) -> Iterator[Difference]:
    settings = run.settings()
    for name, value in saved.settings.items():
        if value != settings[name] and name not in but:
            yield Difference(name, value, settings[name])


def _require_one_step(states: Sequence[SavedState]) -> None:
    for one, other in pairwise(states):
        if (one.epoch, one.batches_delivered, one.baseline) != (other.epoch, other.batches_delivered, other.baseline):
            steps = ", ".join(f"rank {s.rank} epoch {s.epoch} step {s.batches_delivered}" for s in states)
            msg = f"the states of a grid are taken at one step by all ranks; these are not: {steps}"
            raise RankMismatchError(msg)


class _Recorded:
    """What states record as delivered, by shard."""

    def __init__(self, states: Sequence[SavedState], manifest: Manifest) -> None:
        completed = [split for state in states for shard in state.completed for split in shard.splits]
        by_number = [split for state in states for split in splits_of_rows(manifest.rows_by_file, state.completed_rows)]
        self._coverage = Coverage([*completed, *by_number])
        self._rows = sum(split.row_length for split in [*completed, *by_number])
        self._started: dict[tuple[Split, ...], Windows] = {}
        self._repeated: dict[tuple[Split, ...], Windows] = {}
        for shard in (shard for state in states for shard in state.in_progress):
            splits = _splits_of(shard, manifest)
            held = self._repeated if shard.repeats else self._started
            windows = [*held.get(splits, ()), *shard.windows]
            held[splits] = merged(windows)
            if not shard.repeats:
                self._rows += sum(stop - start for start, stop in shard.windows)
                if _size(held[splits]) != _size(windows):
                    msg = "not a state of this package: it records a shard in progress twice"
                    raise ValueError(msg)

    def windows(self, shard_slice: ShardSlice) -> Windows:
        """Return which rows of a slice's shard were delivered."""
        splits = shard_slice.shard.splits
        if shard_slice.repeats:
            return self._repeated.get(splits, ())
        if splits in self._started:
            return self._started[splits]
        return ((0, shard_slice.shard.rows),) if all(map(self._coverage.covers, splits)) else ()

    def require_matched(self, placed: Iterable[StreamProgress], run: Run) -> None:
        """Raise if more is recorded than these streams have delivered."""
        matched = Counter[tuple[Split, ...]]()
        for shard_slice in (shard_slice for stream in placed for shard_slice in stream.done if not shard_slice.repeats):
            matched[shard_slice.shard.splits] += shard_slice.rows
        if matched.total() == self._rows:
            return
        started = {splits: _size(windows) for splits, windows in self._started.items()}
        whole = {splits: sum(split.row_length for split in splits) for splits in matched if splits not in started}
        lost = next(splits for splits, rows in (started | whole).items() if matched[splits] != rows)
        raise mismatch((), FileChanges(), lost, run.manifest)

    def first_unplaced(self, streams: Sequence[Sequence[ShardSlice]]) -> tuple[Split, ...] | None:
        """Return something recorded that is no shard of these streams, or None."""
        shards = list(dict.fromkeys(shard_slice.shard for stream in streams for shard_slice in stream))
        today = {shard.splits for shard in shards}
        for splits in self._started:
            if splits not in today or any(map(self._coverage.covers, splits)):
                return splits
        present = [shard for shard in shards if not shard.missing]
        half_done = [
            shard for shard in present if 0 < sum(map(self._coverage.covers, shard.splits)) < len(shard.splits)
        ]
        if half_done:
            return half_done[0].splits
        lost = self._coverage.without(present)
        return None if lost is None else (lost,)


def _size(windows: Iterable[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in windows)


def _placed(stream: tuple[ShardSlice, ...], recorded: _Recorded) -> StreamProgress:
    return StreamProgress(stream, tuple(_left(stream, recorded)))


def _left(stream: Iterable[ShardSlice], recorded: _Recorded) -> Iterator[ShardSlice]:
    """Yield what is left of a stream, whose slices were done in their order."""
    under_way = False
    for shard_slice in stream:
        windows = recorded.windows(shard_slice)
        until = next((stop for start, stop in windows if start <= shard_slice.start < stop), shard_slice.start)
        until = min(until, shard_slice.stop)
        later = any(until < start < shard_slice.stop for start, _ in windows)
        if later or (under_way and until > shard_slice.start):
            msg = "not a state of this package: a worker's shards are done in their order, and these are not"
            raise ValueError(msg)
        if until < shard_slice.stop:
            under_way = True
            yield replace(shard_slice, start=until)


def _require_possible(progress: Progress) -> None:
    """Raise unless there were as many rows as batches."""
    planned = sum(shard_slice.rows for stream in progress.streams for shard_slice in stream.planned)
    rows = planned - progress.rows_left
    before = 0 if progress.baseline is None else progress.baseline.batches
    if progress.batches_delivered - before > rows:
        msg = f"not a state of this package: it records {progress.batches_delivered - before} batches of {rows} rows"
        raise ValueError(msg)
