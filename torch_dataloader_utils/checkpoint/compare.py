"""How saved states differ from the run that loads them and from one another, and the errors that say so. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from operator import attrgetter
from typing import Any

from torch_dataloader_utils.checkpoint.file_changes import FileChanges
from torch_dataloader_utils.checkpoint.mixture_run import MixtureRun, SourceRun
from torch_dataloader_utils.checkpoint.run import Run
from torch_dataloader_utils.checkpoint.saved_state import SavedMixture, SavedSource, SavedState, dump_splits
from torch_dataloader_utils.errors import CheckpointMismatchError, Difference, RankMismatchError, cut, shown
from torch_dataloader_utils.planning.excluded import ExcludedExpression
from torch_dataloader_utils.planning.manifest import Manifest, Split
from torch_dataloader_utils.planning.plan import DeliveredBaseline, PartialShard

SHOWN = 5
"""How many paths of each kind a message shows."""

MOST_CHARACTERS = 3500
"""About how long a message may be. The lines of a longer one are shortened in their middle."""

MOST_RANKS = 100
"""How many missing ranks are looked for."""

TOPOLOGY = ("num_workers", "num_ranks", "rank", "virtual_ranks", "virtual_workers", "uneven_ranks", "global_batch_size")
"""Settings that an elastic load may change."""

OF_A_MIXTURE = ("sources", "rows_per_epoch", "weights")
"""Of a mixture it may also change what begins so. Sources may be new; those that are gone need permission."""

OF_FILES = "rows of source "
"""What differs with the files of a source begins so."""

MIXED = "mixed"
"""The format of a mixture, as a state records it."""


def compare_settings(saved: SavedState, run: Run, may_differ: Collection[str], files: FileChanges) -> list[Difference]:
    """Return the settings that differ between a state and the run, but for those that may.

    What the filter's columns are is only compared where the filter is the same, and in the files that are the same.
    """
    settings = run.settings()
    if saved.settings["filters"] != settings["filters"] or (files and not files.rebound):
        may_differ = (*may_differ, "filter_binding")
    differences = [
        Difference(name, value, settings[name])
        for name, value in saved.settings.items()
        if value != settings[name] and name not in may_differ
    ]
    if saved.mixture is None or run.mixture is None:
        return differences  # only one is a mixture: their formats differ
    return [*differences, *_compare_mixtures(saved.mixture, run.mixture, may_differ)]


def _compare_mixtures(saved: SavedMixture, run: MixtureRun, may_differ: Collection[str]) -> Iterator[Difference]:
    """Yield how the sources of a mixture differ. Some may be there now that were not, if weights may differ."""
    before, now = (tuple(source.name for source in sources) for sources in (saved.sources, run.sources))
    shared, shared_now = tuple(name for name in before if name in now), tuple(name for name in now if name in before)
    is_elastic = "weights" in may_differ
    if shared != shared_now:
        yield Difference("order of sources", shared, shared_now)
    elif before != now and not (is_elastic and (shared == before or "sources" in may_differ)):
        yield Difference("sources", before, now)
    if saved.rows_per_epoch != run.rows_per_epoch and not is_elastic:
        yield Difference("rows_per_epoch", saved.rows_per_epoch, run.rows_per_epoch)
    if not is_elastic:
        yield from _compare_weights(saved, run)
    own = {source.name: source for source in run.sources}
    for source in saved.sources:
        if source.name not in own:
            continue
        current = own[source.name]
        for name, value in current.settings().items():
            if source.settings[name] != value and name not in may_differ:
                yield Difference(f"{name} of source {source.name!r}", source.settings[name], value)
        if current.transform_id is not None and current.transform_id == source.settings["transform_id"]:
            yield from _compare_made_rows(source, current)


def _compare_weights(saved: SavedMixture, run: MixtureRun) -> Iterator[Difference]:
    """Yield how the weights differ: those of the sources in force, or the whole schedule if they change by one."""
    if saved.schedule is not None and (saved.schedule or run.schedule):
        if saved.schedule != run.schedule:
            yield Difference("weights", weights_of(saved), weights_of(run))
        return
    now = {source.name: source.weight for source in run.sources}
    for source in saved.sources:
        if source.weight != now.get(source.name, source.weight):
            yield Difference(f"weights[{source.name!r}]", str(source.weight), str(now[source.name]))


def weights_of(mixture: SavedMixture | MixtureRun) -> str:
    """Return the weights of a mixture as a message shows them: those of each source, or the schedule."""
    names = [source.name for source in mixture.sources]
    sections = mixture.schedule or ((0, tuple(source.weight for source in mixture.sources)),)
    shown_sections = [
        f"from row {row}: " + ", ".join(f"{name} {share}" for name, share in zip(names, shares, strict=True))
        for row, shares in sections
    ]
    return "; ".join(shown_sections)


def _compare_made_rows(saved: SavedSource, run: SourceRun) -> Iterator[Difference]:
    """Yield in which unchanged files the same transform makes other numbers of rows than it did."""
    now = {(file.path, file.size, file.digest): file for file in run.manifest.files}
    for before in saved.files or ():
        file = now.get((before.path, before.size, before.digest))
        if file is not None and before.rows not in (None, file.rows):
            name = f"rows that the transform of source {saved.name!r} makes of {file.path}"
            yield Difference(name, before.rows, file.rows)
            return


# What states must be -----------------------------------------------------------------------------------------------


def require_each_rank(states: Sequence[SavedState]) -> None:
    """Raise a RankMismatchError unless there is one state of each rank, and all are of one epoch."""
    counts = {state.num_ranks for state in states}
    if len(counts) > 1:
        saved = shorten([f"rank {state.rank} of {state.num_ranks}" for state in states])
        raise RankMismatchError(f"the states were saved under different numbers of ranks: {saved}")
    [count] = counts
    ranks = [state.rank for state in states]
    given = set(ranks)
    twice = sorted(rank for rank, times in Counter(ranks).items() if times > 1)
    if twice:
        msg = (
            f"the states of ranks {shown(twice)} are given more than once: give the state of each of the {count} ranks "
        )
        msg += "once"
        raise RankMismatchError(msg)
    if len(given) < count:
        missing = list(islice((rank for rank in range(count) if rank not in given), MOST_RANKS))
        msg = f"the states of ranks {shown(missing)} are missing: all {count} ranks' states are needed, and "
        raise RankMismatchError(msg + f"{shown(ranks)} given")
    parts = {"epochs": attrgetter("epoch"), "exclusions": attrgetter("excluded"), "plans": attrgetter("plan_digest")}
    require_alike(states, parts)


def require_alike(states: Sequence[SavedState], parts: Mapping[str, Callable[[SavedState], Any]]) -> None:
    """Raise a RankMismatchError that names the ranks unless states of several ranks have equal parts."""
    for name, part in parts.items():
        different = [state.rank for state in states if part(state) != part(states[0])]
        if different:
            msg = f"the states do not fit together: ranks {shown(different)} were saved under other {name} than "
            msg += f"rank {states[0].rank}; give the states that all ranks saved at one checkpoint"
            raise RankMismatchError(msg)


def require_row_groups(baseline: DeliveredBaseline, manifest: Manifest) -> None:
    """Raise unless a baseline's ranges, and the splits of its partial shards, are whole row groups of the files."""
    bounds = {
        file.path: set(accumulate((group.rows for group in file.row_groups), initial=0)) for file in manifest.files
    }
    whole, partial_shards = list(baseline.done), list(baseline.partial)
    if baseline.skipped is not None:
        whole += baseline.skipped.whole
        partial_shards += baseline.skipped.partial
    for split in [*whole, *(split for partial in partial_shards for split in partial.shard.present)]:
        ends = {split.row_offset, split.row_offset + split.row_length}
        if not ends <= bounds.get(split.path, set()):
            raise mismatch((), FileChanges(), (split,), manifest)


def require_possible_windows(shards: Iterable[PartialShard]) -> None:
    """Raise if shards are recorded to have delivered more rows than they have without excluded ones."""
    for partial in shards:
        if partial.windows and partial.windows[-1][1] > partial.shard.rows:
            msg = f"not a state of this package: it records {shown(partial.windows[-1][1])} delivered rows of a shard "
            raise ValueError(msg + f"that has {partial.shard.rows} rows to deliver: the state was damaged or edited")


# The error ---------------------------------------------------------------------------------------------------------

ADVICE = {
    "batches_delivered": "load_state_dict(states, strict=False) with the states of all ranks: it plans the rest again",
    "rank": "load the state that this rank saved (distributed.own_state picks it from a gathered list)",
    "plan_algorithm": "finish the epoch with the release that saved the checkpoint",
    "split_strategy": "use the split strategy that the checkpoint was saved with: it has to return the same shards",
    "format_options": "use the format_options and count_rows that the checkpoint was saved with",
    "packing": "use the packing that the checkpoint was saved with: progress is counted in its sequences",
    "filters": "use the filter that the checkpoint was saved with (a new pyarrow may also write it differently)",
    "filter_binding": "the filter's columns are other ones now: open the table as it was then (a snapshot that is "
    "passed as snapshot_id has the columns of its time), or the partitions",
    "order of sources": "give the sources in the order of the checkpoint",
    "unit": "deliver what the checkpoint delivered: its rows, or what the same transform makes of them",
    "transform_id": "use the transform that the checkpoint was saved with, under the same transform_id (None for no "
    "transform, '' for one without an id)",
    "global_batch_size": "use the batch_size that, times the number of ranks, gives the checkpoint's",
}


def mismatch(
    differences: Sequence[Difference], files: FileChanges, lost: tuple[Split, ...] | None, manifest: Manifest
) -> CheckpointMismatchError:
    """Return the error that names every difference and says what to do.

    `lost` are row ranges that the checkpoint records and this run's plan does not have, or None.
    """
    lines = ["the checkpoint was saved under another plan than this run's; nothing was changed:"]
    lines += [f"  - {line}" for line in (*map(str, differences), *file_lines(files))]
    if lost is not None:
        unit = "rows" if manifest.counts_rows else "bytes"
        ranges = "; ".join(
            f"{cut(manifest.full_path(s.path))} {unit} {s.row_offset} to {s.row_offset + s.row_length}"
            for s in lost[:SHOWN]
        )
        lines.append(f"  the shard [{ranges}] of the checkpoint is not in this rank's plan of today")
    advice = "; or ".join([*_advice(differences, files), "start the epoch from its beginning, without a state"])
    lines.append(f"What to do: {advice}")
    if sum(map(len, lines)) > MOST_CHARACTERS:
        lines = [cut(line, MOST_CHARACTERS // len(lines)) for line in lines]
    return CheckpointMismatchError(
        "\n".join(lines),
        differences=tuple(differences),
        files_added=files.added,
        files_removed=files.removed,
        files_changed=files.changed,
        shard=None if lost is None else dump_splits(manifest, lost),
    )


def unknown_expression(expression: ExcludedExpression) -> CheckpointMismatchError:
    """Return the error about a checkpoint that excludes rows by an expression that the run does not know."""
    difference = Difference("excluded", f"{cut(expression.text)} (digest {cut(expression.digest)})", None)
    msg = f"the checkpoint excludes rows by the expression {difference.checkpoint}, which this run does not know; "
    msg += "nothing was changed. A state does not hold an expression that can be run: call exclude() with the same "
    return CheckpointMismatchError(f"{msg}expression before load_state_dict()", differences=(difference,))


def excluded_in_workers_alone(rows: int) -> CheckpointMismatchError:
    """Return the error about a checkpoint whose excluded rows only the copies of a dataset in workers would know."""
    msg = f"the checkpoint excludes {rows} rows that this dataset does not exclude, and is loaded in worker processes: "
    msg += "the next epoch would deliver them, since its workers are copies of the training process' dataset. Call "
    msg += "exclude() with the same rows in the training process before the loader is iterated"
    return CheckpointMismatchError(msg, differences=(Difference("excluded", rows, None),))


def shorten(paths: Sequence[str]) -> str:
    """Return a list of paths as a message shows it: the first few, and how many more."""
    more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return ", ".join(map(cut, paths[:SHOWN])) + more


def file_lines(files: FileChanges) -> Iterator[str]:
    """Yield how files have changed, as a message shows it."""
    for verb, paths in (("added", files.added), ("removed", files.removed), ("changed", files.changed)):
        if paths:
            yield f"files {verb} since the checkpoint: {shorten(paths)}"
    if files.rebound:
        verb = "the filter's columns are other ones, or have other values, than at the checkpoint"
        yield f"{verb}: {shorten(files.rebound)}"
    if files.changed and files.described == (True, False):
        yield "`_metadata` described the files then and does not now, so that they cannot be compared"
    elif files.changed and files.described == (False, True):
        yield "`_metadata` describes the files now and did not then, so that they cannot be compared"
    if files.fingerprints and not (files.added or files.removed or files.changed):
        before, now = files.fingerprints
        yield f"the file list changed: checkpoint={shown(before)}, current={shown(now)} (fingerprints)"


def _advice(differences: Sequence[Difference], files: FileChanges) -> Iterator[str]:
    settings = [one for one in differences if one.name not in (*ADVICE, "rows") and not one.name.startswith(OF_FILES)]
    if any(one.name == "format" and MIXED in (one.checkpoint, one.current) for one in differences):
        yield "load a state of a mixture into a MixedDataset, and a state of a single dataset into a single dataset"
    elif settings:
        wanted = ", ".join(f"{difference.name}={shown(difference.checkpoint)}" for difference in settings)
        yield f"create the loader with {wanted}"
    yield from (ADVICE[difference.name] for difference in differences if difference.name in ADVICE)
    if files:
        yield "restore the files of the checkpoint"
    comparable = files.described[0] == files.described[1]
    known = (*TOPOLOGY, "rows", "sources")
    if files and comparable and all(one.name in known or one.name.startswith(OF_FILES) for one in differences):
        yield "load_state_dict(states, strict=False, on_changed_files='continue') with the states of all ranks"
    elif not files and any(difference.name.startswith((*TOPOLOGY, *OF_A_MIXTURE)) for difference in differences):
        others = [one for one in differences if not one.name.startswith((*TOPOLOGY, *OF_A_MIXTURE))]
        under = "".join(f", {difference.name}={shown(difference.checkpoint)}" for difference in others)
        yield f"load_state_dict(states, strict=False) with the states of all ranks{under}: it plans the rest again"
