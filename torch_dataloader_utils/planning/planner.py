"""From a manifest and options to an epoch's plan. Pure: no I/O, no clock, no process state.

Every rank and worker that computes a plan from the same manifest and options gets the same one, on any machine.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from torch_dataloader_utils.planning.balance import balance
from torch_dataloader_utils.planning.excluded import NONE_EXCLUDED, ExcludedRows
from torch_dataloader_utils.planning.manifest import Manifest, SizedSplit
from torch_dataloader_utils.planning.plan import (
    TO_THE_END,
    DeliveredBaseline,
    Plan,
    PlanOptions,
    ShardSlice,
    SkippedRows,
)
from torch_dataloader_utils.planning.quotas import Quotas
from torch_dataloader_utils.planning.row_ranges import Coverage, gaps
from torch_dataloader_utils.planning.shards import balanced_shards, given_shards, make_shards
from torch_dataloader_utils.planning.shuffle import delivered_rows
from torch_dataloader_utils.planning.strategy import SplitStrategy, bundled_by, digest_of
from torch_dataloader_utils.planning.token_counts import SequenceCounts
from torch_dataloader_utils.planning.topology import Topology

Selection: TypeAlias = Sequence[Sequence[int]] | None
"""For each file the indices of the row groups that may hold rows to deliver, in order; None for all."""


class EpochPlanner:
    """Makes the plans of a run's epochs. It keeps the last plan, because several calls in a row need the same one."""

    def __init__(
        self,
        manifest: Manifest,
        options: PlanOptions,
        selection: Selection,
        strategy: SplitStrategy | None,
        sequences: SequenceCounts | None = None,
    ) -> None:
        self.manifest = manifest
        self.options = options
        self.strategy = strategy
        self._selection = selection
        self._sequences = sequences
        self._plan: tuple[tuple[Any, ...], Plan] | None = None
        self._skipped: tuple[tuple[Any, ...], Plan] | None = None
        self._bundles: tuple[int, list[list[SizedSplit]], str] | None = None
        self._uneven_rows: tuple[Plan, Plan | None, dict[str, list[tuple[str, int]]]] | None = None

    def manifest_of(self, epoch: int, topology: Topology) -> Manifest:  # noqa: ARG002 - a mixture's depends on both
        """Return the files by which an epoch's plan, and its states, name rows."""
        return self.manifest

    def quotas(
        self,
        epoch: int,  # noqa: ARG002 - only a mixture has quotas
        topology: Topology,  # noqa: ARG002
        baseline: DeliveredBaseline | None,  # noqa: ARG002
    ) -> Quotas | None:
        """Return the rows of each source of a mixture in the steps of a planned rank; None for a single dataset."""
        return None

    def require_epoch(self, epoch: int, topology: Topology) -> None:
        """Raise a ValueError if an epoch cannot be planned, because it is before those of which a state tells."""

    def moved_to(
        self,
        epoch: int,  # noqa: ARG002 - a mixture counts from epochs
        topology: Topology,  # noqa: ARG002
        current: int,  # noqa: ARG002
        baseline: DeliveredBaseline | None,  # noqa: ARG002
    ) -> EpochPlanner:
        """Return the planner for another epoch than the current one."""
        return self

    @property
    def place(self) -> Any:
        """What else the plans of a mixture depend on: a `MixturePlace`; None for a single dataset."""
        return None

    def at(self, place: Any) -> EpochPlanner:  # noqa: ARG002 - a mixture's sources stand somewhere
        """Return the planner with this place."""
        return self

    def reaching(self, plan: Plan, topology: Topology) -> EpochPlanner:  # noqa: ARG002 - only a mixture's files change
        """Return the planner of an epoch that a plan continues."""
        return self

    def with_options(self, options: PlanOptions) -> EpochPlanner:
        """Return a planner of its own, which may have other options, and knows the last plan if they are the same."""
        if options != self.options:
            return EpochPlanner(self.manifest, options, self._selection, self.strategy, self._sequences)
        return copy.copy(self)

    def plan(
        self,
        epoch: int,
        topology: Topology,
        baseline: DeliveredBaseline | None = None,
        algorithm: int | None = None,
        left_out: ExcludedRows = NONE_EXCLUDED,
    ) -> Plan:
        """Return the plan of an epoch, or of the rows of it that a baseline does not contain.

        `algorithm` is one of `PLAN_ALGORITHMS`; None for the newest. `left_out` are excluded rows.
        """
        algorithm = newest_algorithm() if algorithm is None else algorithm
        key = (algorithm, epoch, topology.planned_ranks, topology.planned_workers, baseline, left_out)
        if self._plan is None or self._plan[0] != key:
            self._plan = key, self._planned(key)
        return self._plan[1]

    def plan_skipped(
        self,
        epoch: int,
        topology: Topology,
        baseline: DeliveredBaseline | None,
        algorithm: int | None = None,
        left_out: ExcludedRows = NONE_EXCLUDED,
    ) -> Plan | None:
        """Return the plan of the rows that were skipped before a baseline; None if there are none."""
        if baseline is None or baseline.skipped is None or not (baseline.skipped.whole or baseline.skipped.partial):
            return None
        algorithm = newest_algorithm() if algorithm is None else algorithm
        key = (algorithm, epoch, topology.planned_ranks, topology.planned_workers, baseline, left_out)
        if self._skipped is None or self._skipped[0] != key:
            groups = _row_groups(self.manifest, self._selection)
            others = without_others(baseline.skipped, groups, baseline.left_out)
            self._skipped = key, self._planned((*key[:4], others, left_out))
        return self._skipped[1]

    def _planned(self, key: tuple[int, int, int, int, DeliveredBaseline | None, ExcludedRows]) -> Plan:
        algorithm, epoch, num_ranks, num_workers, baseline, left_out = key
        return PLAN_ALGORITHMS[algorithm](
            self.manifest,
            self.options,
            epoch=epoch,
            num_ranks=num_ranks,
            num_workers=num_workers,
            selection=self._selection,
            baseline=baseline,
            left_out=left_out,
            bundles=None if self.strategy is None else self._bundled(self.strategy, epoch)[0],
            sequences=self._sequences,
        )

    def strategy_digest(self, epoch: int) -> str | None:
        """Return what states record of the split strategy in an epoch; None without a strategy."""
        return None if self.strategy is None else self._bundled(self.strategy, epoch)[1]

    def uneven_rows(self, plan: Plan, restored: Plan | None = None) -> dict[str, list[tuple[str, int]]]:
        """Return the rows that a plan drops and repeats, each as its file's relative path and its number in the file.

        Those of a plan of restored rows come after them.

        They are under ``dropped`` and ``repeated``. Where ranks are not balanced, the dictionary is empty; so it is
        where sequences are dropped and repeated, which have tokens of many rows.
        """
        if plan.balanced is None or self.options.is_open_ended:
            return {}
        known = self._uneven_rows
        if known is None or known[0] is not plan or known[1] is not restored:
            seed, slices = self.options.row_shuffle_seed, _uneven(plan, restored)
            rows = {
                verb: list(delivered_rows(of_verb, seed=seed, epoch=plan.epoch)) for verb, of_verb in slices.items()
            }
            known = self._uneven_rows = plan, restored, rows
        return known[2]

    def uneven_sequences(self, plan: Plan, restored: Plan | None = None) -> dict[str, int]:
        """Return how many sequences a plan drops and repeats: see `uneven_rows`. Empty where these are rows."""
        if plan.balanced is None or not self.options.is_open_ended:
            return {}
        return {verb: sum(part.rows for part in slices) for verb, slices in _uneven(plan, restored).items()}

    def _bundled(self, strategy: SplitStrategy, epoch: int) -> tuple[list[list[SizedSplit]], str]:
        if self._bundles is None or self._bundles[0] != epoch:
            bundles = bundled_by(strategy, self.manifest, epoch)
            self._bundles = epoch, bundles, digest_of(strategy, bundles)
        return self._bundles[1:]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the plans: they are large, and another process can make them again."""
        return {**self.__dict__, "_plan": None, "_skipped": None, "_bundles": None, "_uneven_rows": None}


def make_plan(
    manifest: Manifest,
    options: PlanOptions,
    *,
    epoch: int,
    num_ranks: int,
    num_workers: int,
    selection: Selection = None,
    baseline: DeliveredBaseline | None = None,
    left_out: ExcludedRows = NONE_EXCLUDED,
    bundles: Sequence[Sequence[SizedSplit]] | None = None,
    sequences: SequenceCounts | None = None,
) -> Plan:
    """Plan an epoch, or the rows of it that a baseline does not contain.

    The plan has first the undelivered rows of the baseline's partial shards, then every other selected row group in
    exactly one shard. Ranks and workers may be virtual. Excluded rows that are left out change no shard but its number
    of rows; shards without any other row are left out. `bundles` are the row groups of each shard as a split strategy
    returns them. `sequences` tells how many sequences shards of documents give, where these were counted. Where they
    were not, the plan has the same shards in the same order.
    """
    streams = num_ranks * max(1, num_workers)
    groups = list(_row_groups(manifest, selection))
    carried: list[ShardSlice] = []
    if baseline is not None:
        carried = list(_carried(baseline))
        groups = list(_untouched(groups, baseline))
    if bundles is not None:
        shards = list(given_shards(bundles, groups, options))
    else:
        shards = make_shards(groups, options, epoch, streams)
    if left_out:
        shards = [shard for shard in (replace(shard, excluded=left_out) for shard in shards) if shard.rows]
    if options.is_open_ended:
        shards = [replace(shard, delivers=TO_THE_END) for shard in shards]
    if bundles is None and options.shuffle:
        shards = balanced_shards(shards, carried, streams)
    slices = (*carried, *map(ShardSlice, shards))
    if sequences is not None:
        slices = sequences.counted_slices(slices, seed=options.row_shuffle_seed, epoch=epoch)
    plan = Plan(epoch, num_ranks, num_workers, slices)
    if options.uneven_ranks == "allow":
        return plan
    assert options.batch_size is not None  # noqa: S101 - it is set wherever ranks are balanced
    ranks = [plan.rank_streams(rank) for rank in range(num_ranks)]
    return replace(plan, balanced=balance(ranks, options.batch_size, pad=options.uneven_ranks == "pad"))


PLAN_ALGORITHMS: dict[int, Callable[..., Plan]] = {2: make_plan}
"""The planning algorithms by number. The newest plans new epochs; a state's plans the epoch that it continues.

A change that can change a plan or a permutation is a new algorithm with a number of its own, beside those here:
states that were saved name them.
"""


def _uneven(plan: Plan, restored: Plan | None) -> dict[str, list[ShardSlice]]:
    """Return what a plan, and that of restored rows, drop and repeat."""
    parts = [part.balanced for part in (plan, restored) if part is not None and part.balanced is not None]
    return {
        "dropped": [dropped for part in parts for dropped in part.dropped],
        "repeated": [repeated for part in parts for repeated in part.repeated],
    }


def newest_algorithm() -> int:
    """Return the number of the algorithm that plans new epochs."""
    return max(PLAN_ALGORITHMS)


def _carried(baseline: DeliveredBaseline) -> Iterator[ShardSlice]:
    """Yield the undelivered rows of partial shards.

    They stay slices of the shards that they were planned in: the shard's content keys the permutation of its rows.
    """
    for partial in baseline.partial:
        for start, stop in gaps(partial.windows, partial.shard.rows):
            yield ShardSlice(partial.shard, start, stop)


def _untouched(groups: Iterable[SizedSplit], baseline: DeliveredBaseline) -> Iterator[SizedSplit]:
    """Return the row groups of which no row was delivered, and which no partial shard contains."""
    touched = Coverage([*baseline.done, *(split for partial in baseline.partial for split in partial.shard.splits)])
    left_out = set(baseline.left_out)
    return (group for group in groups if group.split.path not in left_out and not touched.covers(group.split))


def without_others(skipped: SkippedRows, groups: Iterable[SizedSplit], left_out: tuple[str, ...]) -> DeliveredBaseline:
    """Return the baseline that leaves skipped rows alone: all other rows count as delivered."""
    whole = Coverage(skipped.whole)
    done = tuple(group.split for group in groups if not whole.covers(group.split))
    partial = tuple(replace(part, windows=gaps(part.windows, part.shard.rows)) for part in skipped.partial)
    return DeliveredBaseline(done, partial, left_out, batches=0)


def _row_groups(manifest: Manifest, selection: Selection) -> Iterator[SizedSplit]:
    """Yield each selected row group that has rows."""
    for number, groups in enumerate(manifest.row_group_splits):
        selected = groups if selection is None else [groups[index] for index in selection[number]]
        yield from [group for group in selected if group.split.row_length]
