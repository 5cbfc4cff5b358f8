"""A mixture's part of runs and states: where its sources stand in an epoch."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

from torch_dataloader_utils.checkpoint.merge.states import Merged
from torch_dataloader_utils.checkpoint.mixture_run import MixtureRun, SourcePosition, SourceRun, in_runs
from torch_dataloader_utils.checkpoint.progress import Progress
from torch_dataloader_utils.checkpoint.saved_state import SavedMixture, SavedState
from torch_dataloader_utils.formats.opened_files import Opened, OpenedSources
from torch_dataloader_utils.loader.user_warnings import warn_of_small_weights
from torch_dataloader_utils.planning.mixture.passes import Base, MixturePlace, Start, delivered_of, end_of_passes
from torch_dataloader_utils.planning.mixture.planner import MixturePlanner
from torch_dataloader_utils.planning.mixture.source_paths import parse_source_path
from torch_dataloader_utils.planning.mixture.weight_schedule import Shares
from torch_dataloader_utils.planning.plan import DeliveredBaseline, ShardSlice
from torch_dataloader_utils.planning.planner import EpochPlanner
from torch_dataloader_utils.planning.topology import Topology


def mixture_of(
    opened: Opened,
    planner: EpochPlanner,
    epoch: int,
    topology: Topology,
    next_weights: tuple[Fraction, ...] | None,
) -> MixtureRun | None:
    """Return what a run of a mixture has in addition to a single dataset's; None for a single dataset."""
    if not isinstance(planner, MixturePlanner) or not isinstance(opened, OpenedSources):
        return None
    epochs = planner.epochs
    starts, passes = epochs.starts(epoch, topology), epochs.passes(epoch, topology)
    weights, changed = epochs.weights_in(epoch, topology), epochs.changed_in(epoch)
    sources = tuple(
        SourceRun(
            name=name,
            manifest=files.manifest,
            weight=weights[number],
            position=SourcePosition(
                starts[number].number,
                starts[number].row,
                in_runs(epochs.buffer_of(number, reached) for reached in passes[number]),
                tuple((of, paths) for (source, of), paths in sorted(changed.items()) if source == number),
            ),
            filter_digest=files.filter_digest,
            filter_binding=files.filter_binding,
            filter_bindings=files.filter_bindings,
            format=files.format_name,
            format_options=files.options_digest,
            transform_id=None if files.transform is None else files.transform.id,
            **files.pin,
        )
        for number, (name, files) in enumerate(opened.sources.items())
    )
    return MixtureRun(
        sources,
        epochs.rows_per_epoch,
        epochs.rows_in(epoch),
        epochs.rows_before(epoch, topology),
        epochs.changing_weights,
        epochs.carried_in(epoch),
        planner.earlier_in(epoch, topology),
        next_weights,
    )


def placed(planner: EpochPlanner, saved: SavedState, topology: Topology, *, strict: bool = True) -> EpochPlanner:
    """Return the planner of a run that continues a state: its sources stand where the state's do.

    The epoch keeps its number of rows, unless an elastic load is to plan another that was given.
    """
    if not isinstance(planner, MixturePlanner) or saved.mixture is None:
        return planner
    known = {source.name: source.position for source in saved.mixture.sources}
    none = SourcePosition(0, 0, ())
    positions = [known.get(source.name, none) for source in planner.epochs.sources]
    rows = saved.mixture.rows_of_epoch
    if not strict and planner.epochs.requested_rows is not None:
        rows = None
    elif not strict and rows is None:
        rows = saved.mixture.rows_per_epoch
    base = Base(
        saved.epoch,
        tuple(Start(position.number, position.row) for position in positions),
        saved.mixture.rows_before,
        rows,
        tuple(position.passes.stop for position in positions),
        {
            (source, number): rows
            for source, position in enumerate(positions)
            for number, rows in position.buffers_by_pass()
        },
        changed={
            (source, number): paths for source, position in enumerate(positions) for number, paths in position.changed
        },
    )
    # Row numbers refer to the files of the state, which may have changed since.
    files = saved.mixture.layout or planner.begun_at(base).manifest_of(saved.epoch, topology).rows_by_file
    carried = saved.mixture.carried
    partial = tuple(shard.partial(files) for shard in carried.in_progress)
    return planner.begun_at(replace(base, carried=DeliveredBaseline(tuple(carried.whole(files)), partial, (), 0)))


def place_of(planner: EpochPlanner, saved: SavedState, topology: Topology, *, drop_last: bool) -> MixturePlace | None:
    """Return where the sources stood when a state was saved, and their weights; None for a single dataset."""
    there = placed(planner, saved, topology)
    if not isinstance(there, MixturePlanner) or saved.mixture is None:
        return None
    weights = {source.name: source.weight for source in saved.mixture.sources}
    epochs = there.epochs
    schedule: Shares = ((0, tuple(weights.get(source.name, Fraction(0)) for source in epochs.sources)),)
    if saved.mixture.schedule is None:  # of a release that did not record it
        schedule = epochs.changing_weights or schedule
    elif saved.mixture.schedule and len(saved.mixture.sources) == len(epochs.sources):
        schedule = saved.mixture.schedule
    return MixturePlace(epochs.base, schedule, saved.mixture.rows_per_epoch, drop_last)


def different_sources(opened: OpenedSources, saved: SavedMixture) -> list[str]:
    """Return in words how the sources that are open differ from those of a state."""
    if list(opened.sources) != [source.name for source in saved.sources]:
        return ["sources"]
    different = []
    for source in saved.sources:
        files = opened.sources[source.name]
        now: dict[str, Any] = {
            "filters": files.filter_digest,
            "filter_binding": files.filter_binding,
            "format": files.format_name,
        }
        now |= {"format_options": files.options_digest, "rows": files.manifest.rows}
        now["transform_id"] = None if files.transform is None else files.transform.id
        names = [name for name, value in now.items() if source.settings[name] != value]
        names += ["files"] if source.fingerprint != files.manifest.fingerprint else []
        different += [f"{name} of source {source.name}" for name in names]
    return different


def with_changed_passes(planner: EpochPlanner, merged: Merged) -> EpochPlanner:
    """Return the planner of a run whose files have changed since the state that it continues was saved."""
    if not isinstance(planner, MixturePlanner) or merged.passes is None:
        return planner
    sources, before = planner.epochs.sources, planner.epochs.base
    numbers = {source.name: number for number, source in enumerate(sources)}
    changed = dict(before.changed)
    for (name, number), paths in merged.passes.changed.items():
        if name in numbers:
            key = numbers[name], number
            changed[key] = tuple(sorted({*changed.get(key, ()), *paths}))
    starts = tuple(
        Start(start.number) if source.name in merged.passes.sources else start
        for source, start in zip(sources, before.starts, strict=True)
    )
    return planner.begun_at(replace(before, starts=starts, carried=merged.passes.carried, changed=changed))


def check_weights(planner: EpochPlanner, epoch: int, topology: Topology) -> None:
    """Warn if an epoch of a mixture delivers nothing of a source that has a weight."""
    if isinstance(planner, MixturePlanner) and topology.rank == 0:
        small = planner.epochs.too_small_weights(epoch, topology)
        if small:
            warn_of_small_weights(small, planner.quotas(epoch, topology).rows)


def require_no_schedule(planner: EpochPlanner) -> None:
    """Raise a ValueError if the weights of a mixture change by a schedule."""
    if isinstance(planner, MixturePlanner) and planner.epochs.changing_weights:
        raise ValueError("set_weights: the weights change by a schedule, which the loader was made with")


def reweighted(
    planner: EpochPlanner, weights: tuple[Fraction, ...], epoch: int, topology: Topology, *, is_loaded: bool
) -> EpochPlanner:
    """Return the planner of the same mixture with other weights from an epoch on: see `MixturePlanner.with_weights`."""
    if not isinstance(planner, MixturePlanner):
        return planner
    return planner.with_weights(weights, epoch, topology, is_loaded=is_loaded)


def with_sources(planner: EpochPlanner, hashes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the hashes of delivered rows with the planned rank and the source of each, if they are of a mixture."""
    if not isinstance(planner, MixturePlanner):
        return hashes
    names = [source.name for source in planner.epochs.sources]
    return [
        {"rank": of["rank"] // len(names), "source": names[of["rank"] % len(names)]}
        | {name: of[name] for name in ("rows", "hash")}
        for of in hashes
    ]


def source_metrics(
    planner: EpochPlanner, progress: Progress, epoch: int, topology: Topology
) -> dict[str, dict[str, Any]]:
    """Return for each source of a mixture what this rank has delivered of it, by the names of `get_metrics`.

    What all ranks had delivered before an elastic load counts in equal parts: they make equal steps.
    """
    if not isinstance(planner, MixturePlanner):
        return {}
    weights, starts = planner.epochs.weights_in(epoch, topology), planner.epochs.starts(epoch, topology)
    names = [source.name for source in planner.epochs.sources]
    sources = len(names)
    rows = [-sum(part.rows for part in skipped) for skipped in _skipped_of_sources(progress, sources)]
    passes = [start.number for start in starts]
    for number, stream in enumerate(progress.streams):
        rows[number % sources] += sum(part.rows for part in stream.done)
        reached = [parse_source_path(part.shard.splits[0].path).number for part in stream.done[-1:]]
        passes[number % sources] = max([passes[number % sources], *reached])
    before = [0] * sources
    if progress.baseline is not None:
        before = [delivered_of(progress.baseline, name) for name in names]
        ends = [end_of_passes(progress.baseline, name) for name in names]
        passes = [max(newest, end - 1) for newest, end in zip(passes, ends, strict=True)]
    ranks = topology.num_ranks
    of_all = [earlier + ranks * own for earlier, own in zip(before, rows, strict=True)]
    total = sum(of_all)
    return {
        name: {
            "rows": before[number] // ranks + rows[number],
            "pass": passes[number],
            "share_asked": float(weights[number]),
            "share_delivered": of_all[number] / total if total else 0.0,
        }
        for number, name in enumerate(names)
    }


def _skipped_of_sources(progress: Progress, sources: int) -> list[list[ShardSlice]]:
    """Return for each source the slices of the steps that were skipped so far."""
    found: list[list[ShardSlice]] = [[] for _ in range(sources)]
    for skip in progress.skips[: len(progress.skips) - len(progress.skips_ahead)]:
        for number, slices in enumerate(skip.slices(progress.planned)):
            found[number % sources] += slices
    return found
