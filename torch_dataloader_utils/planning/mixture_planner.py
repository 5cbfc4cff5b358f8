"""From the sources of a mixture, their weights and an epoch to its plan. Pure.

A source is an endless sequence of passes, each of which has every row of the source once. Epochs take windows of it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import count
from typing import Any

from torch_dataloader_utils.planning.balance import deal
from torch_dataloader_utils.planning.excluded import NONE_EXCLUDED, ExcludedRows
from torch_dataloader_utils.planning.manifest import DataFile, Manifest, SizedSplit, Split
from torch_dataloader_utils.planning.plan import BalancedStreams, DeliveredBaseline, Plan, PlanOptions, ShardSlice
from torch_dataloader_utils.planning.planner import EpochPlanner, Selection, newest_algorithm
from torch_dataloader_utils.planning.quotas import Quotas
from torch_dataloader_utils.planning.shards import make_shards
from torch_dataloader_utils.planning.source_paths import source_path
from torch_dataloader_utils.planning.topology import Topology

SHARDS_OF_A_PASS = 16
"""A pass has at least so many shards, if it has so many row groups: it does not know how many streams share it."""


@dataclass(frozen=True)
class PlannedSource:
    """A source as plans see it: its name, its files, and the row groups that its filter leaves."""

    name: str
    manifest: Manifest
    selection: Selection = None

    def rows(self) -> int:
        """Return the rows of a pass."""
        return sum(group.rows for group in self._groups())

    def _groups(self) -> Iterator[SizedSplit]:
        for number, groups in enumerate(self.manifest.row_group_splits):
            selected = groups if self.selection is None else [groups[index] for index in self.selection[number]]
            yield from (group for group in selected if group.split.row_length)

    def slices(self, number: int, options: PlanOptions, buffer_rows: int | None) -> Iterator[ShardSlice]:
        """Yield the shards of a pass, in its order."""
        groups = [replace(group, split=self._in_pass(group.split, number)) for group in self._groups()]
        options = replace(options, shuffle_buffer_size=buffer_rows)
        yield from map(ShardSlice, make_shards(groups, options, number, SHARDS_OF_A_PASS // 4))

    def _in_pass(self, split: Split, number: int) -> Split:
        return replace(split, path=source_path(self.name, number, split.path))

    def files(self, number: int) -> Iterator[DataFile]:
        """Yield the files of a pass."""
        for file in self.manifest.files:
            yield replace(file, path=source_path(self.name, number, file.path))


@dataclass(frozen=True, slots=True)
class _Base:
    """The epoch from which on others are counted, where it begins, and the planned rows before it.

    `least` has for each source the pass before which the epoch's files do not end.
    """

    epoch: int
    starts: tuple[Start, ...]
    least: tuple[int, ...]
    rows_before: int


@dataclass(frozen=True, slots=True)
class Start:
    """Where an epoch begins in a source: a pass, and how many rows of it were planned before."""

    number: int = 0
    row: int = 0


class MixturePlanner(EpochPlanner):
    """Makes the plans of a mixture's epochs.

    Args:
        sources: The sources, in order.
        options: What plans depend on. The shuffle buffer is that of all sources together.
        weights: The share of each source.
        rows_per_epoch: Rows of an epoch, of all ranks.
        drop_last: Whether a short last step is left out. Its rows come first in the next epoch.
    """

    def __init__(
        self,
        sources: Sequence[PlannedSource],
        options: PlanOptions,
        weights: tuple[Fraction, ...],
        rows_per_epoch: int,
        *,
        drop_last: bool,
    ) -> None:
        super().__init__(Manifest("", ()), options, None, None)
        self.sources = tuple(sources)
        self.weights = weights
        self.rows_per_epoch = rows_per_epoch
        self._drop_last = drop_last
        self._rows = [source.rows() for source in sources]
        self._base = _Base(0, (Start(),) * len(self.sources), (0,) * len(self.sources), 0)
        self._manifests: dict[Any, Manifest] = {}

    # What an epoch takes ---------------------------------------------------------------------------------------------

    def rows_of_rank(self, topology: Topology) -> int:
        """Return the rows of each planned rank in an epoch."""
        assert self.options.batch_size is not None  # noqa: S101 - a mixture's ranks are always balanced
        short = topology.planned_ranks - 1 if self.options.uneven_ranks == "pad" else 0
        rows = (self.rows_per_epoch + short) // topology.planned_ranks
        return rows - rows % self.options.batch_size if self._drop_last else rows

    def quotas(self, topology: Topology, baseline: DeliveredBaseline | None = None) -> Quotas:  # noqa: ARG002
        """Return the rows of each source in the steps of a planned rank, from the first one that is planned."""
        assert self.options.batch_size is not None  # noqa: S101 - a mixture's ranks are always balanced
        return Quotas(self.weights, self.rows_of_rank(topology), self.options.batch_size)

    def starts(self, epoch: int, topology: Topology) -> tuple[Start, ...]:
        """Return where an epoch begins in each source.

        Raises:
            ValueError: If the epoch is before those of which it is known.
        """
        first, starts = self._base.epoch, self._base.starts
        if epoch < first:
            msg = f"epoch {epoch} is before epoch {first}, from which on it is known where the sources stand"
            raise ValueError(msg)
        taken = self.quotas(topology).of_worker(0, 1) if epoch > first else (0,) * len(self.sources)
        return tuple(
            _moved(start, (epoch - first) * topology.planned_ranks * rows, size)
            for start, rows, size in zip(starts, taken, self._rows, strict=True)
        )

    def require_epoch(self, epoch: int, topology: Topology) -> None:
        """Raise a ValueError if an epoch is before those of which it is known."""
        self.starts(epoch, topology)

    def rows_before(self, epoch: int, topology: Topology) -> int:
        """Return the planned rows of the whole run before an epoch, of all ranks."""
        epochs = epoch - self._base.epoch
        return self._base.rows_before + epochs * self.rows_of_rank(topology) * topology.planned_ranks

    def begun_at(self, epoch: int, starts: Sequence[Start], least: Sequence[int], rows_before: int) -> MixturePlanner:
        """Return the planner of the same mixture in which an epoch begins elsewhere.

        `least` has for each source the pass before which the epoch's files do not end.
        """
        planner = copy.copy(self)
        planner._base = _Base(epoch, tuple(starts), tuple(least), rows_before)  # noqa: SLF001 - of this class
        planner._plan = None  # noqa: SLF001
        return planner

    def passes(self, epoch: int, topology: Topology) -> list[range]:
        """Return the passes of each source that an epoch reaches."""
        starts = self.starts(epoch, topology)
        taken = self.quotas(topology).of_worker(0, 1)
        least = self._base.least if epoch == self._base.epoch else (0,) * len(starts)
        ends = (
            _moved(start, topology.planned_ranks * rows, size).number + 1
            for start, rows, size in zip(starts, taken, self._rows, strict=True)
        )
        return [range(start.number, max(end, known)) for start, end, known in zip(starts, ends, least, strict=True)]

    def buffer_of(self, source: int) -> int | None:
        """Return the rows of the shuffle buffer that a source has."""
        whole = self.options.shuffle_buffer_size
        if whole is None:
            return None
        least = whole // (4 * len(self.sources))
        return max(1, least, int(whole * self.weights[source]))

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
        key = (algorithm, epoch, ranks, workers, baseline, self.weights, self._base)
        if self._plan is None or self._plan[0] != key:
            self._plan = key, self._mixed(epoch, topology, baseline)
        return self._plan[1]

    def _mixed(self, epoch: int, topology: Topology, baseline: DeliveredBaseline | None) -> Plan:
        ranks, workers = topology.planned_ranks, topology.planned_workers
        quotas = self.quotas(topology)
        if baseline is not None:
            raise ValueError("an elastic load of a mixture is not possible yet")
        wanted = list(
            zip(*(quotas.of_worker(worker, max(1, workers)) for worker in range(max(1, workers))), strict=True)
        )
        dealt = []
        slices: list[ShardSlice] = []
        for index, start in enumerate(self.starts(epoch, topology)):
            taken = list(self._window(index, start, ranks * sum(wanted[index])))
            slices += taken
            dealt.append(deal(taken, ranks, wanted[index]))
        streams = tuple(of_source[rank] for rank in range(ranks) for of_source in dealt)
        balanced = BalancedStreams(streams, (), ())
        return Plan(epoch, ranks * len(self.sources), workers, tuple(slices), balanced)

    def _window(self, source: int, start: Start, rows: int) -> Iterator[ShardSlice]:
        """Yield so many rows of a source from a start on."""
        before = start.row
        for number in count(start.number):
            for part in self.sources[source].slices(number, self.options, self.buffer_of(source)):
                if not rows:
                    return
                skip = min(before, part.rows)
                before -= skip
                stop = min(part.stop, skip + rows)
                if skip < stop:
                    rows -= stop - skip
                    yield replace(part, start=skip, stop=stop)


def _moved(start: Start, rows: int, size: int) -> Start:
    """Return a place so many rows of a sequence of equal passes later."""
    if not rows:
        return start
    passes, row = divmod(start.row + rows, size)
    return Start(start.number + passes, row)
