"""The states of all ranks to one baseline, from which what is left of an epoch is planned anew. Pure.

An elastic resume: under any number of ranks and workers, and, where that is wanted, over files that have changed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from torch_dataloader_utils.checkpoint.compare import TOPOLOGY, FileChanges, compare_files, mismatch
from torch_dataloader_utils.checkpoint.restore import require_each_rank, require_row_groups
from torch_dataloader_utils.checkpoint.run import Run
from torch_dataloader_utils.checkpoint.saved_state import SavedShard, SavedState
from torch_dataloader_utils.errors import CheckpointMismatchError, Difference, RankMismatchError
from torch_dataloader_utils.planning.manifest import Split
from torch_dataloader_utils.planning.plan import DeliveredBaseline, PartialShard, Shard, ShardSlice
from torch_dataloader_utils.planning.row_ranges import FileRows, gaps, merged, splits_of_rows
from torch_dataloader_utils.planning.shuffle import delivery_order

__all__ = ["ON_CHANGED_FILES", "Merged", "OnChangedFiles", "merge_states"]


OnChangedFiles: TypeAlias = Literal["error", "continue"]


ON_CHANGED_FILES: tuple[str, ...] = get_args(OnChangedFiles)


@dataclass(frozen=True, slots=True)
class Merged:
    """What states of all ranks come to.

    Attributes:
        epoch: Their epoch.
        baseline: What was delivered of it.
        added: Files that are new since, by relative path.
        lost_rows: For each file that is gone or was written anew, the rows that cannot be delivered any more; where
            rows are not counted, the bytes.
    """

    epoch: int
    baseline: DeliveredBaseline
    added: tuple[str, ...] = ()
    lost_rows: dict[str, int] = field(default_factory=dict)


def merge_states(states: Sequence[SavedState], run: Run, *, on_changed_files: OnChangedFiles = "error") -> Merged:
    """Merge the states of all ranks.

    Args:
        states: One of each rank, in any order.
        run: What they must belong to, but for ranks, workers and how ranks are balanced.
        on_changed_files: Whether files that have changed are an error, or are left out.

    Returns:
        What was delivered.

    Raises:
        RankMismatchError: If states are missing, or do not fit together; the message names the ranks.
        CheckpointMismatchError: If the plan depends on something else that differs, or files have changed.
        ValueError: If a state cannot have been saved by any run.
    """
    require_each_rank(states)
    _require_together(states)
    first = states[0]
    files = _require_equal(first, run, on_changed_files)
    layout = _layout(first, run, files)
    claims = _Claims(first, layout)
    for state in states:
        claims.add(state, layout)
    claims.require_apart()
    baseline = claims.baseline(states)
    if not files:
        require_row_groups(baseline, run.manifest)
        return Merged(first.epoch, baseline)
    kept, lost = _without_changed(baseline, first, run, {*files.removed, *files.changed}, layout)
    require_row_groups(kept, run.manifest)
    return Merged(first.epoch, kept, files.added, lost)


# What must be equal ------------------------------------------------------------------------------------------------


def _require_together(states: Sequence[SavedState]) -> None:
    """Raise unless states of several ranks are of one dataset, one epoch and one plan."""
    parts: dict[str, Callable[[SavedState], Any]] = {
        "epochs": lambda state: state.epoch,
        "datasets": lambda state: (state.fingerprint, state.settings["rows"]),
        "settings": lambda state: {key: value for key, value in state.settings.items() if key != "rank"},
        "earlier progress": lambda state: state.baseline,
    }
    for name, part in parts.items():
        different = [state.rank for state in states if part(state) != part(states[0])]
        if different:
            msg = f"the states do not fit together: ranks {different} were saved under other {name} than "
            msg += f"rank {states[0].rank}; give the states that all ranks saved at one checkpoint"
            raise RankMismatchError(msg)


def _require_equal(saved: SavedState, run: Run, on_changed_files: OnChangedFiles) -> FileChanges:
    """Return how files differ, if that and who reads is all that differs."""
    settings = run.settings()
    files = compare_files(saved, run.manifest)
    may_differ: tuple[str, ...] = TOPOLOGY
    if files and on_changed_files == "continue":
        may_differ = (*TOPOLOGY, "rows", "split_strategy")  # what a strategy makes of other files is another thing
    differences = [
        Difference(name, value, settings[name])
        for name, value in saved.settings.items()
        if value != settings[name] and name not in may_differ
    ]
    if differences or (files and on_changed_files == "error"):
        raise mismatch(differences, files, None, run.manifest)
    if files and saved.root != run.manifest.root:
        msg = f"files have changed, and with them the directory that all are in: {saved.root!r} then, "
        msg += f"{run.manifest.root!r} now; so they cannot be told from one another: open the same directory as then"
        raise CheckpointMismatchError(msg)
    if files.described[0] != files.described[1]:
        raise mismatch((), files, None, run.manifest)
    return files


def _layout(saved: SavedState, run: Run, files: FileChanges) -> list[FileRows]:
    """Return the files, each with its rows, that the row numbers of a state count."""
    if not files:
        return run.manifest.rows_by_file
    if saved.files is None or any(file.rows is None for file in saved.files):
        msg = "files have changed since the checkpoint, which does not list them: it cannot tell which have"
        raise CheckpointMismatchError(f"{msg}; bring them back, or begin the epoch anew without a state")
    return [(file.path, file.rows or 0) for file in saved.files]


# What was delivered ------------------------------------------------------------------------------------------------


class _Claims:
    """What each rank says it has delivered."""

    def __init__(self, first: SavedState, layout: Sequence[FileRows]) -> None:
        self._done: list[tuple[Split, str]] = []
        self._shards: dict[tuple[Split, ...], Shard] = {}
        self._windows: dict[tuple[Split, ...], list[tuple[int, int, str]]] = defaultdict(list)
        if first.baseline is not None:
            self._claim(
                "an earlier resume",
                splits_of_rows(layout, first.baseline.completed_rows),
                first.baseline.in_progress,
                layout,
            )

    def add(self, state: SavedState, layout: Sequence[FileRows]) -> None:
        """Add what a rank has delivered; what it repeated counts where others deliver it."""
        done = [split for shard in state.completed for split in shard.splits]
        done += splits_of_rows(layout, state.completed_rows)
        self._claim(f"rank {state.rank}", done, state.in_progress, layout)

    def _claim(
        self, who: str, done: Iterable[Split], started: Iterable[SavedShard], layout: Sequence[FileRows]
    ) -> None:
        self._done += [(split, who) for split in done]
        for saved in started:
            if saved.repeats:
                continue
            splits = saved.splits or tuple(splits_of_rows(layout, saved.rows))
            self._shards[splits] = Shard(splits, saved.rounds, saved.missing)
            self._windows[splits] += [(start, stop, who) for start, stop in saved.windows]

    def require_apart(self) -> None:
        """Raise if a row was delivered twice."""
        ranges = [(split.path, split.row_offset, split.row_offset + split.row_length, who) for split, who in self._done]
        for splits, windows in self._windows.items():
            who = " and ".join(dict.fromkeys(who for *_, who in windows))
            ranges += [(split.path, split.row_offset, split.row_offset + split.row_length, who) for split in splits]
            within = [("the shard", *window) for window in windows]
            _require_apart(within, f"of the shard that begins with row {splits[0].row_offset} of {splits[0].path}")
        _require_apart(ranges, "")

    def baseline(self, states: Sequence[SavedState]) -> DeliveredBaseline:
        """Return all of it together."""
        done = [split for split, _ in self._done]
        started = []
        for splits, shard in self._shards.items():
            windows = merged((start, stop) for start, stop, _ in self._windows[splits])
            if gaps(windows, shard.rows):
                started.append(PartialShard(shard, windows))
            else:
                done += [split for place, split in enumerate(splits) if place not in shard.missing]
        baseline = states[0].baseline
        return DeliveredBaseline(
            done=tuple(_joined(done)),
            partial=tuple(sorted(started, key=lambda one: one.shard.splits)),
            left_out=() if baseline is None else baseline.left_out,
            batches=max(state.batches_delivered for state in states),
        )


def _require_apart(ranges: list[tuple[str, int, int, str]], where: str) -> None:
    ordered = sorted(ranges)
    for (path, _, stop, who), (other, start, _, also) in pairwise(ordered):
        if path == other and start < stop:
            msg = f"the states overlap: {who} and {also} both record row {start} {where or f'of {path}'} as delivered, "
            msg += "or as part of a shard under way; give the states that all ranks saved at one checkpoint"
            raise RankMismatchError(msg)


def _joined(splits: Iterable[Split]) -> Iterator[Split]:
    held: Split | None = None
    for split in sorted(splits):
        if held is not None and (held.path, held.row_offset + held.row_length) == (split.path, split.row_offset):
            held = Split(held.path, held.row_offset, held.row_length + split.row_length)
            continue
        if held is not None:
            yield held
        held = split
    if held is not None:
        yield held


# Files that changed ------------------------------------------------------------------------------------------------


def _without_changed(
    baseline: DeliveredBaseline, saved: SavedState, run: Run, changed: set[str], layout: Sequence[FileRows]
) -> tuple[DeliveredBaseline, dict[str, int]]:
    """Return what was delivered of the files that are as they were, and the rows that are lost with each other."""
    lost = {path: rows for path, rows in layout if path in changed and path not in baseline.left_out}
    for split in baseline.done:
        if split.path in lost:
            lost[split.path] -= split.row_length
    started = []
    for one in baseline.partial:
        missing = {place for place, split in enumerate(one.shard.splits) if split.path in changed}
        if missing <= set(one.shard.missing):
            started.append(one)
            continue
        if run.filter_digest is not None or not run.manifest.counts_rows:
            why = "through a filter" if run.filter_digest is not None else "and not counted"
            paths = sorted({one.shard.splits[place].path for place in missing})
            msg = f"{paths} changed while rows of them were being delivered together with others, {why}: "
            msg += "which of the others were delivered cannot be told; bring the files back, or begin the epoch anew"
            raise CheckpointMismatchError(msg, files_changed=tuple(paths))
        kept = _with_absent(one, missing, run, saved.epoch, lost)
        if kept is not None:
            started.append(kept)
    return (
        DeliveredBaseline(
            done=tuple(split for split in baseline.done if split.path not in changed),
            partial=tuple(started),
            left_out=tuple(sorted({*baseline.left_out, *changed})),  # also if they come back
            batches=baseline.batches,
        ),
        lost,
    )


def _with_absent(
    one: PartialShard, missing: set[int], run: Run, epoch: int, lost: dict[str, int]
) -> PartialShard | None:
    """Return a shard that was under way without splits that cannot be read any more; None if nothing is left of it."""
    shard = one.shard
    order = delivery_order(ShardSlice(shard), seed=run.options.row_shuffle_seed, epoch=epoch)
    ends = np.cumsum([split.row_length for split in shard.splits])
    places = np.searchsorted(ends, order, side="right")  # the split of each delivered row
    gone = np.isin(places, sorted(missing))
    delivered = np.zeros(len(order), dtype=bool)
    for start, stop in one.windows:
        delivered[start:stop] = True
    for place in missing:
        path = shard.splits[place].path
        if path in lost:
            lost[path] -= int(np.count_nonzero(delivered & (places == place)))
    before = np.concatenate([[0], np.cumsum(~gone)])
    windows = merged((int(before[start]), int(before[stop])) for start, stop in one.windows)
    left = Shard(shard.splits, shard.rounds, tuple(sorted({*shard.missing, *missing})))
    windows = tuple((start, stop) for start, stop in windows if start < stop)
    return PartialShard(left, windows) if left.rows else None
