"""An elastic load: the states of all ranks to one baseline, from which the rest of an epoch is planned again. Pure.

The states may have been saved under any number of ranks and workers and, if the caller allows it, over files that have
changed since.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from torch_dataloader_utils.checkpoint.compare import (
    TOPOLOGY,
    compare_settings,
    mismatch,
    require_alike,
    require_each_rank,
    require_row_groups,
    shorten,
)
from torch_dataloader_utils.checkpoint.delivered_hash import all_hashes, have_same_ranks
from torch_dataloader_utils.checkpoint.file_changes import FileChanges, compare_files
from torch_dataloader_utils.checkpoint.merge.claims import Claims
from torch_dataloader_utils.checkpoint.merge.skips import with_skipped
from torch_dataloader_utils.checkpoint.merge.sources import ChangedPasses, begun_passes, changed_roots
from torch_dataloader_utils.checkpoint.run import Run
from torch_dataloader_utils.checkpoint.saved_state import SavedMixture, SavedState
from torch_dataloader_utils.errors import CheckpointMismatchError, shown
from torch_dataloader_utils.planning.excluded import ExcludedRows
from torch_dataloader_utils.planning.manifest import Layout, Split
from torch_dataloader_utils.planning.mixture.passes import rows_of
from torch_dataloader_utils.planning.mixture.source_paths import MIXTURE_KEY, parse_source_path
from torch_dataloader_utils.planning.plan import DeliveredBaseline, PartialShard, Shard
from torch_dataloader_utils.planning.row_ranges import merged, splits_of_rows
from torch_dataloader_utils.planning.shuffle import rows_of_splits

OnChangedFiles: TypeAlias = Literal["error", "continue"]

ON_CHANGED_FILES: tuple[str, ...] = get_args(OnChangedFiles)

MOST_ROWS = 2**63 - 1
"""More rows than any file has, and the most that NumPy counts."""

MOST_MADE_ROWS = 1 << 24
"""More rows than a transform or packing makes of a row group. Those are shuffled as a whole, however many they are."""

ALIKE: dict[str, Callable[[SavedState], Any]] = {
    "datasets": lambda state: (state.fingerprint, state.settings["rows"]),
    "settings": lambda state: {key: value for key, value in state.settings.items() if key != "rank"},
    "earlier progress": lambda state: state.baseline,
    "mixtures": lambda state: state.mixture,
}
"""What the states of all ranks have in common, apart from the epoch."""


class Merged(NamedTuple):
    """What all ranks have delivered of an epoch.

    `lost_rows` has for each file that was removed or rewritten the number of rows that can no longer be delivered;
    where rows are not counted, of bytes. `changed` are the paths of all of these files. The passes are those of a
    mixture, if files have changed.
    """

    baseline: DeliveredBaseline
    lost_rows: dict[str, int]
    changed: frozenset[str]
    passes: ChangedPasses | None = None


def merge_states(states: Sequence[SavedState], run: Run, *, on_changed_files: OnChangedFiles = "error") -> Merged:
    """Merge the states of all ranks.

    They may come in any order, and the run may have other ranks, workers and balancing of ranks than theirs.
    `on_changed_files` says whether files that have changed are an error, or are left out.

    Raises:
        RankMismatchError: If states are missing, or contradict one another; the message names the ranks.
        CheckpointMismatchError: If other settings differ, or files have changed.
        ValueError: If a state cannot have been saved by any run.
    """
    require_each_rank(states)
    require_alike(states, ALIKE)
    first = states[0]
    files = _require_equal(first, run, on_changed_files)
    layout = _layout(first, run, files)
    baseline = _delivered(states, layout, _left_out(first, layout))
    if not have_same_ranks(first, run.topology):
        baseline = replace(baseline, hashes=(*baseline.hashes, *filter(None, [all_hashes(states)])))
    lost: dict[str, int] = {}
    changed = frozenset((*files.removed, *files.changed))
    passes: ChangedPasses | None = None
    if files and first.mixture is not None:
        baseline, lost, passes = _without_changed_passes(
            baseline, first, first.mixture, run, files=files, layout=layout
        )
    elif files:
        baseline, lost = _without_changed(baseline, first, run, changed, layout)
    require_row_groups(baseline, run.manifest)
    return Merged(baseline, lost, changed, passes)


# What must be equal ------------------------------------------------------------------------------------------------


def _require_equal(saved: SavedState, run: Run, on_changed_files: OnChangedFiles) -> FileChanges:
    """Return how files differ. Raise if a setting differs that an elastic load may not change."""
    files = compare_files(saved, run)
    may_differ: tuple[str, ...] = (*TOPOLOGY, "weights")  # and with them the rows of an epoch
    if files and on_changed_files == "continue":
        # A strategy's digest covers the shards, and so the files.
        may_differ = (*may_differ, "rows", "split_strategy", "sources")
    differences = compare_settings(saved, run, may_differ, files)
    if differences or (files and on_changed_files == "error"):
        raise mismatch(differences, files, None, run.manifest)
    for before, now in changed_roots(saved, run) if files else ():
        msg = f"files have changed, and so has the directory that contains all of them: {shown(before)} then, "
        msg += f"{shown(now)} now. Their relative paths cannot be compared: open the same directory as then"
        raise CheckpointMismatchError(msg)
    if files.described[0] != files.described[1]:
        raise mismatch((), files, None, run.manifest)
    return files


def _layout(saved: SavedState, run: Run, files: FileChanges) -> Layout:
    """Return the files, each with its rows, to which the row numbers of a state refer."""
    if not files:
        return run.manifest.rows_by_file
    if saved.mixture is not None and saved.mixture.layout is not None:
        return saved.mixture.layout
    if saved.files is None or any(file.rows is None for file in saved.files):
        msg = "files have changed since the checkpoint, and it does not list them, so that the changed files cannot be "
        msg += "found; restore the files of the checkpoint, or start the epoch from its beginning, without a state"
        raise CheckpointMismatchError(msg)
    return Layout((file.path, file.rows or 0) for file in saved.files)


def _left_out(saved: SavedState, layout: Layout) -> ExcludedRows:
    """Return the excluded rows that the plan of a state's epoch leaves out."""
    return saved.excluded.exclusions(layout).in_epoch(saved.epoch).left_out


# What was delivered ------------------------------------------------------------------------------------------------


def _delivered(states: Sequence[SavedState], layout: Layout, left_out: ExcludedRows) -> DeliveredBaseline:
    """Return what each rank, and the baseline that all of them share, record as delivered or skipped.

    Row numbers in the states refer to the files of the layout. Excluded rows were left out of the shards.
    """
    claims = Claims(layout, left_out, is_open_ended=states[0].is_open_ended)
    saved = states[0].baseline
    if saved is not None:
        claims.claim("an earlier resume", splits_of_rows(layout, saved.completed_rows), saved.in_progress)
    for state in states:
        claims.claim(f"rank {state.rank}", state.done(layout), state.in_progress)
    claims.require_apart("delivered, or as part of a shard in progress")
    done, partial = claims.united()
    gone = () if saved is None else saved.left_out
    hashes = () if saved is None else saved.hashes
    batches = max(state.batches_delivered for state in states)
    rows_gone = 0 if saved is None else saved.gone
    baseline = DeliveredBaseline(done, partial, gone, batches, hashes=hashes, gone=rows_gone)
    return with_skipped(baseline, states, layout, left_out)


# Files that changed ------------------------------------------------------------------------------------------------


def _without_changed(
    baseline: DeliveredBaseline, saved: SavedState, run: Run, changed: frozenset[str], layout: Layout
) -> tuple[DeliveredBaseline, dict[str, int]]:
    """Return what was delivered of the unchanged files, and for each changed file the rows that are lost."""
    excluded = _left_out(saved, layout)
    gone = [Split(path, 0, rows) for path, rows in layout if path in changed and path not in baseline.left_out]
    lost = {whole.path: excluded.left(whole) for whole in gone}
    changes = _Changes(saved, run, changed, excluded)
    done, partial = changes.without(baseline.done, baseline.partial, lost)
    left_out = tuple(sorted({*baseline.left_out, *changed}))  # also if the same files return later in the epoch
    if (skipped := baseline.skipped) is not None:
        kept = dict.fromkeys(lost, 0)
        whole, parts = changes.without(skipped.whole, skipped.partial, kept)
        lost = {path: rows - kept[path] for path, rows in lost.items()}  # skipped rows were not delivered
        skipped = replace(skipped, whole=whole, partial=tuple(part for part in parts if part.windows))
    return replace(baseline, done=done, partial=partial, left_out=left_out, skipped=skipped), lost


def _without_changed_passes(
    baseline: DeliveredBaseline,
    saved: SavedState,
    mixture: SavedMixture,
    run: Run,
    *,
    files: FileChanges,
    layout: Layout,
) -> tuple[DeliveredBaseline, dict[str, int], ChangedPasses]:
    """Return the same for a mixture, and what is left of the passes that had begun and whose files have changed."""
    taken = begun_passes(mixture, baseline, files, layout)
    changed = frozenset(path for paths in taken.changed.values() for path in paths)
    left, lost = _without_changed(baseline, saved, run, changed, layout)
    left = replace(left, gone=baseline.gone + rows_of(baseline) - rows_of(left))
    changes = _Changes(saved, run, changed, _left_out(saved, layout))
    done, partial = changes.without(taken.carried.done, taken.carried.partial, lost)
    carried = DeliveredBaseline(done, partial, (), 0)
    return left, {path: rows for path, rows in lost.items() if rows}, replace(taken, carried=carried)


class _Changes(NamedTuple):
    """Files that have changed since a state was saved, and what was excluded then."""

    saved: SavedState
    run: Run
    changed: Collection[str]
    excluded: ExcludedRows

    def without(
        self, done: Iterable[Split], partial: Iterable[PartialShard], lost: dict[str, int]
    ) -> tuple[tuple[Split, ...], tuple[PartialShard, ...]]:
        """Return rows without those of the changed files, which are subtracted from the lost rows of these files."""
        for split in done:
            if split.path in lost:
                lost[split.path] -= self.excluded.left(split)
        left = []
        for part in partial:
            missing = {index for index, split in enumerate(part.shard.splits) if split.path in self.changed}
            if missing <= set(part.shard.missing):
                left.append(part)
                continue
            _require_known_rows(part, missing, self.run, self.saved.epoch)
            _require_possible_rows(part, self.saved, self.run)
            epoch = self.saved.epoch if self.saved.mixture is None else MIXTURE_KEY
            kept = _without_splits(part, missing, self.run, epoch, lost)
            if kept is not None:
                left.append(kept)
        return tuple(split for split in done if split.path not in self.changed), tuple(left)


def _require_known_rows(partial: PartialShard, missing: set[int], run: Run, epoch: int) -> None:
    """Raise unless it is known which delivered rows of a partial shard are of which file."""
    excluded = any(partial.shard.excluded.within(partial.shard.splits[index]) for index in missing)
    excluded |= run.exclusions.in_epoch(epoch).unknown_rows is not None
    is_made = run.options.is_open_ended
    if run.filter_digest is None and run.manifest.counts_rows and not excluded and not is_made:
        return
    # Windows count the rows that the filter left. Only the changed files would show which rows these were.
    why = (
        f"as {run.options.unit}"
        if is_made
        else "through a filter"
        if run.filter_digest is not None
        else "without excluded rows"
        if excluded
        else "and not counted"
    )
    paths = sorted({partial.shard.splits[index].path for index in missing})
    msg = f"{shorten(paths)} changed while rows of them were being delivered together with rows of other files, {why}: "
    msg += "which of the others were delivered is not known; restore the files of the checkpoint, or start "
    msg += "the epoch from its beginning, without a state"
    raise CheckpointMismatchError(msg, files_changed=tuple(paths))


def _require_possible_rows(partial: PartialShard, saved: SavedState, run: Run) -> None:
    """Raise if a shard has more rows than any plan gives it: it records files that are gone, so nothing else tells."""
    buffer, shard = run.options.shuffle_buffer_size, partial.shard
    rows = sum(split.row_length for split in shard.splits)
    most = MOST_ROWS if buffer is None else min(MOST_ROWS, (buffer + len(shard.splits)) * shard.rounds)
    if _has_whole_groups(shard, saved):
        most = max(most, MOST_MADE_ROWS)
    if rows > most:
        msg = f"not a state of this package: a shard in progress has {shown(rows)} rows, shuffled in {shard.rounds} "
        raise ValueError(msg + f"rounds, where at most {shown(most)} can be: the state was damaged or edited")


def _has_whole_groups(shard: Shard, saved: SavedState) -> bool:
    """Whether a shard is of a source of a mixture whose row groups are read as a whole: see `PlannedSource`."""
    if saved.mixture is None:
        return False
    name = parse_source_path(shard.splits[0].path).source
    makes_rows = {source.name: source.settings["transform_id"] is not None for source in saved.mixture.sources}
    return saved.settings["packing"] is not None or makes_rows.get(name, False)


def _without_splits(
    partial: PartialShard, missing: set[int], run: Run, epoch: int, lost: dict[str, int]
) -> PartialShard | None:
    """Return a partial shard without splits that cannot be read any more; None if no row of it is left.

    The delivered rows of these splits are subtracted from those that are lost.
    """
    shard = partial.shard
    gone = sorted(missing - set(shard.missing))
    bounds = [bound for window in partial.windows for bound in window]
    seed = run.options.row_shuffle_seed
    rows = [counts[gone] for counts in rows_of_splits(shard, bounds, seed=seed, epoch=epoch)]
    for start, stop in zip(rows[::2], rows[1::2], strict=True):
        for index, delivered in zip(gone, (stop - start).tolist(), strict=True):
            if shard.splits[index].path in lost:
                lost[shard.splits[index].path] -= delivered
    # A window's bounds move down by the number of removed rows before them.
    moved = [bound - int(counts.sum()) for bound, counts in zip(bounds, rows, strict=True)]
    windows = merged(zip(moved[::2], moved[1::2], strict=True))
    left = replace(shard, missing=tuple(sorted({*shard.missing, *missing})))
    return PartialShard(left, tuple((start, stop) for start, stop in windows if start < stop)) if left.rows else None
