"""From the epochs of a mixture to their plans. Pure."""

from __future__ import annotations

import copy
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

from torch_dataloader_utils.planning.balance import deal
from torch_dataloader_utils.planning.excluded import NONE_EXCLUDED, ExcludedRows
from torch_dataloader_utils.planning.manifest import Manifest, Split
from torch_dataloader_utils.planning.mixture.epochs import MixtureEpochs
from torch_dataloader_utils.planning.mixture.passes import (
    NONE_CARRIED,
    Base,
    MixturePlace,
    Start,
    Taken,
    end_of_passes,
    first_left,
    rows_of,
)
from torch_dataloader_utils.planning.mixture.source_paths import parse_source_path, source_path
from torch_dataloader_utils.planning.plan import (
    BalancedStreams,
    DeliveredBaseline,
    PartialShard,
    Plan,
    PlanOptions,
    ShardSlice,
)
from torch_dataloader_utils.planning.planner import EpochPlanner, newest_algorithm
from torch_dataloader_utils.planning.quotas import Quotas
from torch_dataloader_utils.planning.row_ranges import gaps, merged_splits
from torch_dataloader_utils.planning.topology import Topology


class MixturePlanner(EpochPlanner):
    """Makes the plans of a mixture's epochs.

    Attributes:
        epochs: Where the epochs begin in the sources, and how many rows of each they take.
    """

    def __init__(self, epochs: MixtureEpochs) -> None:
        super().__init__(Manifest("", ()), epochs.options, None, None)
        self.epochs = epochs
        self._manifests: dict[Any, Manifest] = {}
        self._earlier: tuple[tuple[Start, ...], DeliveredBaseline] | None = None

    def quotas(self, epoch: int, topology: Topology, baseline: DeliveredBaseline | None = None) -> Quotas:
        """Return the rows of each source in the steps of a planned rank: see `MixtureEpochs.quotas`."""
        return self.epochs.quotas(epoch, topology, baseline)

    def require_epoch(self, epoch: int, topology: Topology) -> None:
        """Raise a ValueError if an epoch is before those of which it is known."""
        self.epochs.starts(epoch, topology)

    # The plan --------------------------------------------------------------------------------------------------------

    def plan(
        self,
        epoch: int,
        topology: Topology,
        baseline: DeliveredBaseline | None = None,
        algorithm: int | None = None,
        left_out: ExcludedRows = NONE_EXCLUDED,  # noqa: ARG002 - a mixture's rows cannot be excluded
    ) -> Plan:
        """Return the plan of an epoch, or of the rows of it that a baseline does not contain."""
        algorithm = newest_algorithm() if algorithm is None else algorithm
        key = (algorithm, epoch, topology.planned_ranks, topology.planned_workers, baseline)
        if self._plan is None or self._plan[0] != key:
            self._plan = key, self._mixed(epoch, topology, baseline)
        return self._plan[1]

    def _mixed(self, epoch: int, topology: Topology, baseline: DeliveredBaseline | None) -> Plan:
        ranks, workers = topology.planned_ranks, topology.planned_workers
        quotas = self.quotas(epoch, topology, baseline)
        streams_of_rank = max(1, workers)
        of_workers = [quotas.of_worker(worker, streams_of_rank) for worker in range(streams_of_rank)]
        wanted = list(zip(*of_workers, strict=True))
        taken = Taken(self.epochs.carried_in(epoch), *([baseline] if baseline else []))
        dealt = []
        slices: list[ShardSlice] = []
        for index, start in enumerate(self.epochs.starts(epoch, topology)):
            window = list(self.epochs.window(index, start, ranks * sum(wanted[index]), taken))
            slices += window
            dealt.append(deal(window, ranks, wanted[index]))
        streams = tuple(of_source[rank] for rank in range(ranks) for of_source in dealt)
        balanced = BalancedStreams(streams, (), ())
        return Plan(epoch, ranks * len(self.epochs.sources), workers, tuple(slices), balanced)

    def plan_skipped(
        self,
        epoch: int,  # noqa: ARG002 - skipped rows of a mixture are never restored
        topology: Topology,  # noqa: ARG002
        baseline: DeliveredBaseline | None,  # noqa: ARG002
        algorithm: int | None = None,  # noqa: ARG002
        left_out: ExcludedRows = NONE_EXCLUDED,  # noqa: ARG002
    ) -> None:
        """Return None: rows that were skipped before a baseline stay skipped."""
        return

    # What states name ------------------------------------------------------------------------------------------------

    def manifest_of(self, epoch: int, topology: Topology) -> Manifest:
        """Return the files of each pass that an epoch reaches."""
        key = tuple((reached.start, reached.stop) for reached in self.epochs.passes(epoch, topology))
        if key not in self._manifests:
            files = [
                file
                for source, reached in zip(self.epochs.sources, key, strict=True)
                for number in range(*reached)
                for file in source.files(number)
            ]
            self._manifests = {key: Manifest("", tuple(sorted(files, key=lambda file: file.path)))}
        return self._manifests[key]

    def earlier_in(self, epoch: int, topology: Topology) -> DeliveredBaseline:
        """Return the rows before the beginning of an epoch, of the passes that it continues."""
        starts = self.epochs.starts(epoch, topology)
        if self._earlier is None or self._earlier[0] != starts:
            done, unfinished = list[Split](), list[PartialShard]()
            for source, start in enumerate(starts):
                left = start.row
                for part in self.epochs.slices(source, start.number, Taken()) if left else ():
                    if left >= part.rows:
                        done += part.shard.splits
                    elif left:
                        unfinished.append(PartialShard(part.shard, ((0, left),)))
                    left -= min(left, part.rows)
            self._earlier = starts, DeliveredBaseline(tuple(merged_splits(done)), tuple(unfinished), (), 0)
        return self._earlier[1]

    # Other epochs of the same mixture --------------------------------------------------------------------------------

    @property
    def place(self) -> MixturePlace:
        """Where the sources stand, and their weights."""
        epochs = self.epochs
        return MixturePlace(epochs.base, epochs.schedule, epochs.rows_per_epoch, epochs.drop_last)

    def at(self, place: MixturePlace | None) -> MixturePlanner:
        """Return the planner of the same mixture whose sources stand elsewhere."""
        if place is None or place == self.place:
            return self
        there = replace(
            self.epochs,
            base=place.base,
            schedule=place.schedule,
            requested_rows=place.rows_per_epoch,
            drop_last=place.drop_last,
        )
        return MixturePlanner(there)

    def begun_at(self, base: Base) -> MixturePlanner:
        """Return the planner of the same mixture in which epochs are counted from elsewhere on."""
        return MixturePlanner(replace(self.epochs, base=base))

    def with_options(self, options: PlanOptions) -> MixturePlanner:
        """Return a planner of its own, which may have other options, and knows the last plan if they are the same."""
        if options == self.options:
            return copy.copy(self)
        return MixturePlanner(replace(self.epochs, options=options))

    def with_weights(
        self, weights: tuple[Fraction, ...], epoch: int, topology: Topology, *, is_loaded: bool
    ) -> MixturePlanner:
        """Return the planner of the same mixture with other weights from an epoch on.

        `is_loaded` says that a state of the epoch is loaded, so that its files are those of the state.
        """
        epochs = self.epochs
        starts, carried = epochs.starts(epoch, topology), epochs.carried_in(epoch)
        open_passes = {
            (source, start.number): epochs.buffer_of(source, start.number)
            for source, start in enumerate(starts)
            if start.row
        }
        begun = [end_of_passes(carried, source.name) for source in epochs.sources]
        known = {
            (source, number): rows
            for (source, number), rows in epochs.base.buffers.items()
            if is_loaded or starts[source].number <= number < begun[source]
        }
        base = replace(
            epochs.base,
            epoch=epoch,
            starts=starts,
            rows_before=epochs.rows_before(epoch, topology),
            rows=epochs.base.rows if is_loaded else None,
            ends=epochs.base.ends if is_loaded else None,
            buffers={**known, **open_passes},
            carried=carried,
        )
        return MixturePlanner(replace(epochs, base=base, schedule=((0, weights),)))

    def reaching(self, plan: Plan, topology: Topology) -> MixturePlanner:
        """Return the planner in which the files of the epoch have the passes of a plan of its rest, too."""
        base = self.epochs.base
        assert base.ends is not None  # noqa: S101 - the rest of an epoch is planned where a state tells its files
        ends = list(map(max, base.ends, self.epochs.ends_of_whole(base.epoch, topology)))
        numbers = {source.name: number for number, source in enumerate(self.epochs.sources)}
        for part in plan.slices:
            for split in part.shard.splits:
                found = parse_source_path(split.path)
                ends[numbers[found.source]] = max(ends[numbers[found.source]], found.number + 1)
        return self.begun_at(replace(base, ends=tuple(ends)))

    def moved_to(
        self, epoch: int, topology: Topology, current: int, baseline: DeliveredBaseline | None
    ) -> MixturePlanner:
        """Return the planner for an epoch after the current one, of which a baseline says what an elastic load left.

        Rows that were delivered ahead of their turn make a later epoch begin where no arithmetic tells.
        """
        planner = self
        if epoch > current and baseline is not None:
            planner = self._after(topology, baseline)
        while planner.epochs.next_needs_plan and planner.epochs.base.epoch < epoch:
            planner = planner._after(topology, NONE_CARRIED)  # noqa: SLF001 - of this class
        return planner

    def _after(self, topology: Topology, baseline: DeliveredBaseline) -> MixturePlanner:
        """Return the planner that counts from the epoch after the base on."""
        before = self.epochs.base
        epoch, reached = before.epoch, self.epochs.passes(before.epoch, topology)
        plan = self.plan(epoch, topology, baseline if baseline != NONE_CARRIED else None)
        # What was taken when the epoch was planned, and what is taken at its end.
        given, taken = (Taken(before.carried, baseline) for _ in range(2))
        taken.add(plan.slices)
        buffers = {
            (source, number): self.epochs.buffer_of(source, number)
            for source, passes in enumerate(reached)
            for number in passes
        }
        rows = self.epochs.rows_before(epoch, topology) + rows_of(baseline) + sum(part.rows for part in plan.slices)
        starts, done, unfinished = [], list[Split](), list[PartialShard]()
        for source, (start, passes) in enumerate(zip(before.starts, reached, strict=True)):
            begun_again = {number for of, number in before.changed if of == source}
            slices_of = partial(self.epochs.slices, source, taken=given)
            first, later = first_left(start, passes.stop, slices_of, taken, begun_again)
            starts.append(first)
            for part, windows in later:
                if gaps(windows, part.rows):
                    unfinished.append(PartialShard(part.shard, windows))
                else:
                    done += part.shard.present
        changed = {key: paths for key, paths in before.changed.items() if key[1] >= starts[key[0]].number}
        for source, number in changed:
            done += given.done(source_path(self.epochs.sources[source].name, number, ""))
        carried = DeliveredBaseline(tuple(merged_splits(done)), tuple(unfinished), (), 0)
        return self.begun_at(Base(epoch + 1, tuple(starts), rows, buffers=buffers, carried=carried, changed=changed))
