"""Where the epochs of a mixture begin in its sources, and how many rows of each they take. Pure.

A source is an endless sequence of passes, each of which has every row of the source once. Epochs take windows of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import count

from torch_dataloader_utils.planning.mixture.passes import (
    NONE_CARRIED,
    Base,
    PlannedSource,
    Start,
    Taken,
    end_of_passes,
    moved,
    rows_of,
)
from torch_dataloader_utils.planning.mixture.weight_schedule import Shares, sections_from, weight_after
from torch_dataloader_utils.planning.plan import DeliveredBaseline, PlanOptions, ShardSlice
from torch_dataloader_utils.planning.quotas import Quotas
from torch_dataloader_utils.planning.row_ranges import gaps
from torch_dataloader_utils.planning.topology import Topology

LEAST_SHARE = 4
"""A source has at least this part (a quarter) of what it would have of the shuffle buffer if all weights were equal."""


@dataclass(frozen=True)
class MixtureEpochs:
    """The epochs of a mixture, counted from one of which it is known where it begins.

    Attributes:
        sources: The sources, in order.
        options: What plans depend on. The shuffle buffer is that of all sources together.
        schedule: From which planned row of the whole run on which shares of the sources hold, from 0 on.
        requested_rows: Rows of an epoch, of all ranks; None for those until the first source has been through once.
        drop_last: Whether a short last step is left out. Its rows come first in the next epoch.
        base: The epoch from which on others are counted, and where it begins.
    """

    sources: tuple[PlannedSource, ...]
    options: PlanOptions
    schedule: Shares
    requested_rows: int | None
    drop_last: bool
    base: Base

    # How many rows ---------------------------------------------------------------------------------------------------

    @property
    def rows_per_epoch(self) -> int:
        """Rows of an epoch, of all ranks."""
        if self.requested_rows is not None:
            return self.requested_rows
        shares = zip(self.sources, self.schedule[0][1], strict=True)
        return min(int(source.rows / weight) for source, weight in shares if weight)

    def rows_in(self, epoch: int) -> int:
        """Return the rows of an epoch, of all ranks. One that had begun keeps its number."""
        own = self.base.rows if epoch == self.base.epoch else None
        return self.rows_per_epoch if own is None else own

    def rows_before(self, epoch: int, topology: Topology) -> int:
        """Return the planned rows of the whole run before an epoch, of all ranks."""
        first = self.base.epoch
        rows = self._rows_of_rank(first, topology) if epoch > first else 0
        rows += max(0, epoch - first - 1) * self._rows_of_rank(first + 1, topology)
        return self.base.rows_before + rows * topology.planned_ranks

    def _rows_of_rank(self, epoch: int, topology: Topology, baseline: DeliveredBaseline | None = None) -> int:
        """Return the rows of each planned rank in an epoch, or in the rest that a baseline leaves of it."""
        assert self.options.batch_size is not None  # noqa: S101 - a mixture's ranks are always balanced
        left = self.rows_in(epoch) - (0 if baseline is None else rows_of(baseline))
        short = topology.planned_ranks - 1 if self.options.uneven_ranks == "pad" else 0
        rows = (max(0, left) + short) // topology.planned_ranks
        return rows - rows % self.options.batch_size if self.drop_last else rows

    # Of which sources ------------------------------------------------------------------------------------------------

    @property
    def changing_weights(self) -> Shares:
        """The schedule by which the weights change; empty if they do not."""
        return self.schedule if len(self.schedule) > 1 else ()

    def weights_in(self, epoch: int, topology: Topology) -> tuple[Fraction, ...]:
        """Return the share of each source at the beginning of an epoch."""
        return sections_from(self.schedule, self.rows_before(epoch, topology), 1)[0][1]

    def quotas(self, epoch: int, topology: Topology, baseline: DeliveredBaseline | None = None) -> Quotas:
        """Return the rows of each source in the steps of a planned rank.

        With a baseline they are those of the rest of the epoch, counted from its first step on.
        """
        assert self.options.batch_size is not None  # noqa: S101 - a mixture's ranks are always balanced
        before = self.rows_before(epoch, topology) + (0 if baseline is None else rows_of(baseline))
        sections = sections_from(self.schedule, before, topology.planned_ranks)
        return Quotas(sections, self._rows_of_rank(epoch, topology, baseline), self.options.batch_size)

    def too_small_weights(self, epoch: int, topology: Topology) -> dict[str, float]:
        """Return the weights that are above 0 and too small for a single row of an epoch, by source."""
        quotas = self.quotas(epoch, topology)
        of_epoch = [weights for row, weights in quotas.sections if row < quotas.rows]
        taken = quotas.totals
        largest = [max((weights[number] for weights in of_epoch), default=0) for number in range(len(taken))]
        of_sources = zip(self.sources, largest, taken, strict=True)
        return {source.name: float(weight) for source, weight, rows in of_sources if weight and not rows}

    # From where on ---------------------------------------------------------------------------------------------------

    def starts(self, epoch: int, topology: Topology) -> tuple[Start, ...]:
        """Return where an epoch begins in each source.

        Raises:
            ValueError: If the epoch is before those of which it is known.
        """
        first, starts = self.base.epoch, self.base.starts
        if epoch < first:
            msg = f"epoch {epoch} is before epoch {first}, from which on it is known where the sources stand"
            raise ValueError(msg)
        for reached in range(first, epoch):
            is_last = (  # all later epochs take as much
                self.rows_before(reached, topology) >= self.schedule[-1][0]
                and self.rows_in(reached) == self.rows_per_epoch
            )
            times = epoch - reached if is_last else 1
            taken = self.quotas(reached, topology).totals
            starts = tuple(
                moved(start, times * topology.planned_ranks * rows, source.rows)
                for source, start, rows in zip(self.sources, starts, taken, strict=True)
            )
            if is_last:
                break
        return starts

    def carried_in(self, epoch: int) -> DeliveredBaseline:
        """Return the rows that epochs before one have taken out of their turn."""
        return self.base.carried if epoch == self.base.epoch else NONE_CARRIED

    def changed_in(self, epoch: int) -> Mapping[tuple[int, int], tuple[str, ...]]:
        """Return the passes of an epoch whose files have changed since they began: see `Base`."""
        return self.base.changed if epoch == self.base.epoch else {}

    @property
    def next_needs_plan(self) -> bool:
        """Whether only the plan of the base's epoch tells where the next one begins, and no arithmetic."""
        return self.base.carried != NONE_CARRIED or bool(self.base.changed)

    # Which passes, and their shards ----------------------------------------------------------------------------------

    def passes(self, epoch: int, topology: Topology) -> list[range]:
        """Return the passes of each source that an epoch reaches."""
        ends = self.base.ends if epoch == self.base.epoch else None
        if ends is None:
            ends = self.ends_of_whole(epoch, topology)
        return [range(start.number, end) for start, end in zip(self.starts(epoch, topology), ends, strict=True)]

    def ends_of_whole(self, epoch: int, topology: Topology) -> tuple[int, ...]:
        """Return for each source the number after the last pass that an epoch reaches, planned from its beginning."""
        carried, changed = self.carried_in(epoch), self.changed_in(epoch)
        taken = self.quotas(epoch, topology).totals
        ends = []
        for number, (source, start) in enumerate(zip(self.sources, self.starts(epoch, topology), strict=True)):
            rows = topology.planned_ranks * taken[number] + rows_of(carried, source.name)
            end = max(moved(start, rows, source.rows).number + 1, end_of_passes(carried, source.name))
            ends.append(end + sum(of == number for of, _ in changed))  # these may have fewer rows
        return tuple(ends)

    def buffer_of(self, source: int, number: int) -> int | None:
        """Return the rows of the shuffle buffer that a source has in a pass: its share when the pass begins.

        A small share has a floor, so that its rows still mix.
        """
        whole = self.options.shuffle_buffer_size
        if whole is None:
            return None
        least = max(1, whole // (LEAST_SHARE * len(self.sources)))
        known = self.base.buffers
        if (source, number) in known:
            return known[source, number]
        return max(least, int(whole * weight_after(self.schedule, source, number * self.sources[source].rows)))

    def slices(self, source: int, number: int, taken: Taken) -> Iterator[ShardSlice]:
        """Yield the shards of a pass. What was taken of it counts only where its files have changed."""
        buffer_rows = self.buffer_of(source, number)
        left_out = self.base.changed.get((source, number))
        if left_out is None:
            return self.sources[source].slices(number, self.options, buffer_rows)
        return self.sources[source].rest(number, self.options, buffer_rows, taken, left_out)

    def window(self, source: int, start: Start, rows: int, taken: Taken) -> Iterator[ShardSlice]:
        """Yield so many rows of a source that are not taken, from a start on."""
        before = start.row
        for number in count(start.number):
            if not rows:  # a source that rests may have no shards, in any pass
                return
            for part in self.slices(source, number, taken):
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
