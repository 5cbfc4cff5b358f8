"""From the sources of a mixture, their weights and an epoch to its plan. Pure.

A source is an endless sequence of passes, each of which has every row of the source once. Epochs take windows of it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import count
from typing import Any

from torch_dataloader_utils.planning.balance import deal
from torch_dataloader_utils.planning.excluded import NONE_EXCLUDED, ExcludedRows
from torch_dataloader_utils.planning.manifest import Manifest, Split
from torch_dataloader_utils.planning.passes import (
    NONE_CARRIED,
    Base,
    MixturePlace,
    PlannedSource,
    Start,
    Taken,
    end_of_passes,
    first_left,
    moved,
    rows_of,
)
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
from torch_dataloader_utils.planning.source_paths import parse_source_path, source_path
from torch_dataloader_utils.planning.topology import Topology
from torch_dataloader_utils.planning.weight_schedule import Shares, sections_from, weight_after

LEAST_SHARE = 4
"""A source has at least this part (a quarter) of what it would have of the shuffle buffer if all weights were equal."""


class MixturePlanner(EpochPlanner):
    """Makes the plans of a mixture's epochs.

    Args:
        sources: The sources, in order.
        options: What plans depend on. The shuffle buffer is that of all sources together.
        schedule: From which planned row of the whole run on which shares of the sources hold, from 0 on.
        rows_per_epoch: Rows of an epoch, of all ranks; None for those until the first source has been through once.
        drop_last: Whether a short last step is left out. Its rows come first in the next epoch.
    """

    def __init__(
        self,
        sources: Sequence[PlannedSource],
        options: PlanOptions,
        schedule: Shares,
        rows_per_epoch: int | None,
        *,
        drop_last: bool,
    ) -> None:
        super().__init__(Manifest("", ()), options, None, None)
        self.sources = tuple(sources)
        self._schedule = schedule
        self._rows_given = rows_per_epoch
        self._drop_last = drop_last
        self._rows = [source.rows() for source in sources]
        self._base = Base(0, (Start(),) * len(self.sources))
        self._manifests: dict[Any, Manifest] = {}
        self._earlier: tuple[tuple[Start, ...], DeliveredBaseline] | None = None
        self._totals: tuple[Quotas, tuple[int, ...]] | None = None

    @property
    def rows_per_epoch(self) -> int:
        """Rows of an epoch, of all ranks."""
        if self._rows_given is not None:
            return self._rows_given
        shares = zip(self._rows, self._schedule[0][1], strict=True)
        return min(int(rows / weight) for rows, weight in shares if weight)

    @property
    def has_fixed_rows(self) -> bool:
        """Whether the number of an epoch's rows was given, so that it does not follow from the weights."""
        return self._rows_given is not None

    def rows_in(self, epoch: int) -> int:
        """Return the rows of an epoch, of all ranks. One that had begun keeps its number."""
        own = self._base.rows if epoch == self._base.epoch else None
        return self.rows_per_epoch if own is None else own

    @property
    def changing_weights(self) -> Shares:
        """The schedule by which the weights change; empty if they do not."""
        return self._schedule if len(self._schedule) > 1 else ()

    def weights_in(self, epoch: int, topology: Topology) -> tuple[Fraction, ...]:
        """Return the share of each source at the beginning of an epoch."""
        return sections_from(self._schedule, self.rows_before(epoch, topology), 1)[0][1]

    def with_weights(
        self, weights: tuple[Fraction, ...], epoch: int, topology: Topology, *, is_loaded: bool
    ) -> MixturePlanner:
        """Return the planner of the same mixture with other weights from an epoch on.

        `is_loaded` says that a state of the epoch is loaded, so that its files are those of the state.
        """
        starts, carried = self.starts(epoch, topology), self.carried_in(epoch)
        open_passes = {
            (source, start.number): self.buffer_of(source, start.number)
            for source, start in enumerate(starts)
            if start.row
        }
        begun = [end_of_passes(carried, source.name) for source in self.sources]
        known = {
            (source, number): rows
            for (source, number), rows in self._base.buffers.items()
            if is_loaded or starts[source].number <= number < begun[source]
        }
        base = replace(
            self._base,
            epoch=epoch,
            starts=starts,
            rows_before=self.rows_before(epoch, topology),
            rows=self._base.rows if is_loaded else None,
            ends=self._base.ends if is_loaded else None,
            buffers={**known, **open_passes},
            carried=carried,
        )
        changed = self.begun_at(base)
        changed._schedule = ((0, weights),)  # noqa: SLF001 - of this class
        return changed

    # What an epoch takes ---------------------------------------------------------------------------------------------

    def _rows_of_rank(self, epoch: int, topology: Topology, baseline: DeliveredBaseline | None = None) -> int:
        """Return the rows of each planned rank in an epoch, or in the rest that a baseline leaves of it."""
        assert self.options.batch_size is not None  # noqa: S101 - a mixture's ranks are always balanced
        left = self.rows_in(epoch) - (0 if baseline is None else rows_of(baseline))
        short = topology.planned_ranks - 1 if self.options.uneven_ranks == "pad" else 0
        rows = (max(0, left) + short) // topology.planned_ranks
        return rows - rows % self.options.batch_size if self._drop_last else rows

    def quotas(self, epoch: int, topology: Topology, baseline: DeliveredBaseline | None = None) -> Quotas:
        """Return the rows of each source in the steps of a planned rank.

        With a baseline they are those of the rest of the epoch, counted from its first step on.
        """
        assert self.options.batch_size is not None  # noqa: S101 - a mixture's ranks are always balanced
        before = self.rows_before(epoch, topology) + (0 if baseline is None else rows_of(baseline))
        sections = sections_from(self._schedule, before, topology.planned_ranks)
        return Quotas(sections, self._rows_of_rank(epoch, topology, baseline), self.options.batch_size)

    def starts(self, epoch: int, topology: Topology) -> tuple[Start, ...]:
        """Return where an epoch begins in each source.

        Raises:
            ValueError: If the epoch is before those of which it is known.
        """
        first, starts = self._base.epoch, self._base.starts
        if epoch < first:
            msg = f"epoch {epoch} is before epoch {first}, from which on it is known where the sources stand"
            raise ValueError(msg)
        for reached in range(first, epoch):
            taken = self._taken_in(reached, topology)
            is_last = (  # all later epochs take as much
                self.rows_before(reached, topology) >= self._schedule[-1][0]
                and self.rows_in(reached) == self.rows_per_epoch
            )
            times = epoch - reached if is_last else 1
            starts = tuple(
                moved(start, times * topology.planned_ranks * rows, size)
                for start, rows, size in zip(starts, taken, self._rows, strict=True)
            )
            if is_last:
                break
        return starts

    def _taken_in(self, epoch: int, topology: Topology) -> tuple[int, ...]:
        """Return the rows of each source that a planned rank takes in an epoch."""
        key = self.quotas(epoch, topology)
        if self._totals is None or self._totals[0] != key:
            self._totals = key, key.of_worker(0, 1)
        return self._totals[1]

    def too_small_weights(self, epoch: int, topology: Topology) -> dict[str, float]:
        """Return the weights that are above 0 and too small for a single row of an epoch, by source."""
        quotas = self.quotas(epoch, topology)
        of_epoch = [weights for row, weights in quotas.sections if row < quotas.rows]
        taken = self._taken_in(epoch, topology)
        largest = [max((weights[number] for weights in of_epoch), default=0) for number in range(len(taken))]
        of_sources = zip(self.sources, largest, taken, strict=True)
        return {source.name: float(weight) for source, weight, rows in of_sources if weight and not rows}

    def require_epoch(self, epoch: int, topology: Topology) -> None:
        """Raise a ValueError if an epoch is before those of which it is known."""
        self.starts(epoch, topology)

    def rows_before(self, epoch: int, topology: Topology) -> int:
        """Return the planned rows of the whole run before an epoch, of all ranks."""
        first = self._base.epoch
        rows = self._rows_of_rank(first, topology) if epoch > first else 0
        rows += max(0, epoch - first - 1) * self._rows_of_rank(first + 1, topology)
        return self._base.rows_before + rows * topology.planned_ranks

    def carried_in(self, epoch: int) -> DeliveredBaseline:
        """Return the rows that epochs before one have taken out of their turn."""
        return self._base.carried if epoch == self._base.epoch else NONE_CARRIED

    def changed_in(self, epoch: int) -> Mapping[tuple[int, int], tuple[str, ...]]:
        """Return the passes of an epoch whose files have changed since they began: see `Base`."""
        return self._base.changed if epoch == self._base.epoch else {}

    def earlier_in(self, epoch: int, topology: Topology) -> DeliveredBaseline:
        """Return the rows before the beginning of an epoch, of the passes that it continues."""
        starts = self.starts(epoch, topology)
        if self._earlier is None or self._earlier[0] != starts:
            done, unfinished = list[Split](), list[PartialShard]()
            for source, start in enumerate(starts):
                left = start.row
                for part in self._shards(source, start.number, Taken()) if left else ():
                    if left >= part.rows:
                        done += part.shard.splits
                    elif left:
                        unfinished.append(PartialShard(part.shard, ((0, left),)))
                    left -= min(left, part.rows)
            self._earlier = starts, DeliveredBaseline(tuple(merged_splits(done)), tuple(unfinished), (), 0)
        return self._earlier[1]

    @property
    def base(self) -> Base:
        """The epoch from which on others are counted, and where it begins."""
        return self._base

    def begun_at(self, base: Base) -> MixturePlanner:
        """Return the planner of the same mixture in which epochs are counted from elsewhere on."""
        planner = copy.copy(self)
        planner._base, planner._plan, planner._manifests = base, None, {}  # noqa: SLF001 - of this class
        planner._earlier = None  # noqa: SLF001
        return planner

    @property
    def place(self) -> MixturePlace:
        """Where the sources stand, and their weights."""
        return MixturePlace(self._base, self._schedule, self.rows_per_epoch, self._drop_last)

    def at(self, place: MixturePlace | None) -> MixturePlanner:
        """Return the planner of the same mixture whose sources stand elsewhere."""
        if place is None or place == self.place:
            return self
        planner = self.begun_at(place.base)
        planner._schedule, planner._rows_given = place.schedule, place.rows_per_epoch  # noqa: SLF001 - of this class
        planner._drop_last = place.drop_last  # noqa: SLF001
        return planner

    def with_options(self, options: PlanOptions) -> MixturePlanner:
        """Return a planner of its own, which may have other options, and knows the last plan if they are the same."""
        if options == self.options:
            return copy.copy(self)
        planner = self.begun_at(self._base)
        planner.options = options
        return planner

    def reaching(self, plan: Plan, topology: Topology) -> MixturePlanner:
        """Return the planner in which the files of the epoch have the passes of a plan of its rest, too."""
        assert self._base.ends is not None  # noqa: S101 - the rest of an epoch is planned where a state tells its files
        ends = list(map(max, self._base.ends, self._ends_of_whole(self._base.epoch, topology)))
        numbers = {source.name: number for number, source in enumerate(self.sources)}
        for part in plan.slices:
            for split in part.shard.splits:
                found = parse_source_path(split.path)
                ends[numbers[found.source]] = max(ends[numbers[found.source]], found.number + 1)
        return self.begun_at(replace(self._base, ends=tuple(ends)))

    def moved_to(
        self, epoch: int, topology: Topology, current: int, baseline: DeliveredBaseline | None
    ) -> MixturePlanner:
        """Return the planner for an epoch after the current one, of which a baseline says what an elastic load left.

        Rows that were delivered ahead of their turn make a later epoch begin where no arithmetic tells.
        """
        moved = self
        if epoch > current and baseline is not None:
            moved = self._after(topology, baseline)
        while moved._needs_walk and moved._base.epoch < epoch:  # noqa: SLF001 - of this class
            moved = moved._after(topology, NONE_CARRIED)  # noqa: SLF001
        return moved

    @property
    def _needs_walk(self) -> bool:
        """Whether no arithmetic tells where the next epoch begins."""
        return self._base.carried != NONE_CARRIED or bool(self._base.changed)

    def _after(self, topology: Topology, baseline: DeliveredBaseline) -> MixturePlanner:
        """Return the planner that counts from the next epoch on."""
        epoch = self._base.epoch
        plan = self.plan(epoch, topology, baseline if baseline != NONE_CARRIED else None)
        # What was taken when the epoch was planned, and what is taken at its end.
        given, taken = (Taken(self._base.carried, baseline) for _ in range(2))
        taken.add(plan.slices)
        buffers = {
            (source, number): self.buffer_of(source, number)
            for source, reached in enumerate(self.passes(epoch, topology))
            for number in reached
        }
        rows = self.rows_before(epoch, topology) + rows_of(baseline) + sum(part.rows for part in plan.slices)
        starts, done, unfinished = [], list[Split](), list[PartialShard]()
        for source, (start, reached) in enumerate(zip(self._base.starts, self.passes(epoch, topology), strict=True)):
            begun_again = {number for of, number in self._base.changed if of == source}
            shards_of = partial(self._shards, source, taken=given)
            first, later = first_left(start, reached.stop, shards_of, taken, begun_again)
            starts.append(first)
            for part, windows in later:
                if gaps(windows, part.rows):
                    unfinished.append(PartialShard(part.shard, windows))
                else:
                    done += part.shard.present
        changed = {key: paths for key, paths in self._base.changed.items() if key[1] >= starts[key[0]].number}
        for source, number in changed:
            done += given.done(source_path(self.sources[source].name, number, ""))
        carried = DeliveredBaseline(tuple(merged_splits(done)), tuple(unfinished), (), 0)
        base = Base(epoch + 1, tuple(starts), rows, buffers=buffers, carried=carried, changed=changed)
        return self.begun_at(base)

    def passes(self, epoch: int, topology: Topology) -> list[range]:
        """Return the passes of each source that an epoch reaches."""
        starts = self.starts(epoch, topology)
        ends = self._base.ends if epoch == self._base.epoch else None
        if ends is None:
            ends = self._ends_of_whole(epoch, topology)
        return [range(start.number, end) for start, end in zip(starts, ends, strict=True)]

    def _ends_of_whole(self, epoch: int, topology: Topology) -> tuple[int, ...]:
        """Return for each source the number after the last pass that an epoch reaches, planned from its beginning."""
        carried = self.carried_in(epoch)
        changed = [self.sources[source].name for source, _ in self.changed_in(epoch)]
        of_sources = zip(
            self.sources, self.starts(epoch, topology), self._taken_in(epoch, topology), self._rows, strict=True
        )
        return tuple(
            max(
                moved(start, topology.planned_ranks * rows + rows_of(carried, source.name), size).number + 1,
                end_of_passes(carried, source.name),
            )
            + sum(name == source.name for name in changed)  # these may have fewer rows
            for source, start, rows, size in of_sources
        )

    def buffer_of(self, source: int, number: int) -> int | None:
        """Return the rows of the shuffle buffer that a source has in a pass: its share when the pass begins.

        A small share has a floor, so that its rows still mix.
        """
        whole = self.options.shuffle_buffer_size
        if whole is None:
            return None
        least = max(1, whole // (LEAST_SHARE * len(self.sources)))
        known = self._base.buffers
        if (source, number) in known:
            return known[source, number]
        return max(least, int(whole * weight_after(self._schedule, source, number * self._rows[source])))

    def _shards(self, source: int, number: int, taken: Taken) -> Iterator[ShardSlice]:
        """Yield the shards of a pass. What was taken of it counts only where its files have changed."""
        buffer_rows = self.buffer_of(source, number)
        left_out = self._base.changed.get((source, number))
        if left_out is None:
            return self.sources[source].slices(number, self.options, buffer_rows)
        return self.sources[source].rest(number, self.options, buffer_rows, taken, left_out)

    def manifest_of(self, epoch: int, topology: Topology) -> Manifest:
        """Return the files of each pass that an epoch reaches."""
        key = tuple((reached.start, reached.stop) for reached in self.passes(epoch, topology))
        if key not in self._manifests:
            files = [
                file
                for source, reached in zip(self.sources, key, strict=True)
                for number in range(*reached)
                for file in source.files(number)
            ]
            self._manifests = {key: Manifest("", tuple(sorted(files, key=lambda file: file.path)))}
        return self._manifests[key]

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
        ranks, workers = topology.planned_ranks, topology.planned_workers
        key = (algorithm, epoch, ranks, workers, baseline, self._schedule, self._base.epoch)
        if self._plan is None or self._plan[0] != key:
            self._plan = key, self._mixed(epoch, topology, baseline)
        return self._plan[1]

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

    def _mixed(self, epoch: int, topology: Topology, baseline: DeliveredBaseline | None) -> Plan:
        ranks, workers = topology.planned_ranks, topology.planned_workers
        quotas = self.quotas(epoch, topology, baseline)
        streams_of_rank = max(1, workers)
        of_workers = [quotas.of_worker(worker, streams_of_rank) for worker in range(streams_of_rank)]
        wanted = list(zip(*of_workers, strict=True))
        taken = Taken(*([self._base.carried] if epoch == self._base.epoch else []), *([baseline] if baseline else []))
        dealt = []
        slices: list[ShardSlice] = []
        for index, start in enumerate(self.starts(epoch, topology)):
            window = list(self._window(index, start, ranks * sum(wanted[index]), taken))
            slices += window
            dealt.append(deal(window, ranks, wanted[index]))
        streams = tuple(of_source[rank] for rank in range(ranks) for of_source in dealt)
        balanced = BalancedStreams(streams, (), ())
        return Plan(epoch, ranks * len(self.sources), workers, tuple(slices), balanced)

    def _window(self, source: int, start: Start, rows: int, taken: Taken) -> Iterator[ShardSlice]:
        """Yield so many rows of a source that are not taken, from a start on."""
        before = start.row
        for number in count(start.number):
            if not rows:  # a source that rests may have no shards, in any pass
                return
            for part in self._shards(source, number, taken):
                if not rows:
                    return
                skip = min(before, part.rows)
                before -= skip
                for first, stop in gaps(taken.windows(part), part.rows):
                    begin = max(first, skip)
                    end = min(stop, begin + rows)
                    if begin < end:
                        rows -= end - begin
                        yield replace(part, start=begin, stop=end)
