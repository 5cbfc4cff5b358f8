"""From a manifest and options to an epoch's plan. Pure: no I/O, no clock, no process state.

Every rank and worker that computes a plan from the same manifest and options gets the same one, on any machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from torch_dataloader_utils.planning.balance import balance
from torch_dataloader_utils.planning.manifest import Manifest, SizedSplit
from torch_dataloader_utils.planning.plan import DeliveredBaseline, Plan, PlanOptions, ShardSlice
from torch_dataloader_utils.planning.row_ranges import Coverage, gaps
from torch_dataloader_utils.planning.shards import balanced_shards, given_shards, make_shards

__all__ = ["make_plan"]


def make_plan(
    manifest: Manifest,
    options: PlanOptions,
    *,
    epoch: int,
    num_ranks: int,
    num_workers: int,
    selection: Sequence[Sequence[int]] | None = None,
    baseline: DeliveredBaseline | None = None,
    bundled: Sequence[Sequence[SizedSplit]] | None = None,
) -> Plan:
    """Plan an epoch, or what is left of it.

    Args:
        manifest: The data files.
        options: What else the plan depends on.
        epoch: The epoch, from 0.
        num_ranks: Number of ranks; of a grid, its virtual ones.
        num_workers: Number of worker processes of each rank, 0 for the rank's own process; of a grid, its virtual ones.
        selection: For each file the row groups, by number and in order, that may hold rows to deliver; None for all.
        baseline: What was delivered of the epoch before; None for nothing.
        bundled: The row groups of each shard, in order, where a split strategy says so; every row group once.

    Returns:
        The plan: what the baseline left of its shards, then every other selected row group in exactly one shard.
    """
    streams = num_ranks * max(1, num_workers)
    groups = list(_row_groups(manifest, selection))
    carried: list[ShardSlice] = []
    if baseline is not None:
        carried = list(_carried(baseline))
        groups = list(_untouched(groups, baseline))
    shards = (
        make_shards(groups, options, epoch, streams)
        if bundled is None
        else list(given_shards(bundled, groups, options))
    )
    if options.shuffle and bundled is None:
        shards = balanced_shards(shards, carried, streams)
    slices = [*carried, *map(ShardSlice, shards)]
    plan = Plan(epoch=epoch, num_ranks=num_ranks, num_workers=num_workers, slices=tuple(slices))
    if options.uneven_ranks == "allow":
        return plan
    assert options.batch_size is not None  # noqa: S101 - whoever evens ranks says so
    ranks = [plan.rank_streams(rank) for rank in range(num_ranks)]
    return replace(plan, balanced=balance(ranks, options.batch_size, pad=options.uneven_ranks == "pad"))


def _carried(baseline: DeliveredBaseline) -> Iterator[ShardSlice]:
    """Yield what is left of shards that were under way."""
    for started in baseline.partial:
        for start, stop in gaps(started.windows, started.shard.rows):
            yield ShardSlice(started.shard, start, stop)


def _untouched(groups: Iterable[SizedSplit], baseline: DeliveredBaseline) -> Iterator[SizedSplit]:
    """Yield the row groups of which nothing was delivered, and nothing was under way."""
    under_way = [split for started in baseline.partial for split in started.shard.splits]
    touched = Coverage([*baseline.done, *under_way])
    left_out = set(baseline.left_out)
    for group in groups:
        if group.split.path not in left_out and not touched.covers(group.split):
            yield group


def _row_groups(manifest: Manifest, selection: Sequence[Sequence[int]] | None) -> Iterator[SizedSplit]:
    """Yield each selected row group that has rows."""
    for number, file in enumerate(manifest.row_group_splits):
        selected = file if selection is None else [file[place] for place in selection[number]]
        yield from [one for one in selected if one.split.row_length]
