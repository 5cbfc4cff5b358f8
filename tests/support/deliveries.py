"""An epoch delivered as loaders deliver it, by receipts alone: without files, processes or clocks."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeAlias

from hypothesis import strategies as st
from support import edited, manifests, plan_options, row_ids

from torch_dataloader_utils.checkpoint.dump import dump_state
from torch_dataloader_utils.checkpoint.parse.states import parse_state
from torch_dataloader_utils.checkpoint.progress import Progress
from torch_dataloader_utils.checkpoint.restore import check_states, place_states
from torch_dataloader_utils.checkpoint.run import Run
from torch_dataloader_utils.planning.assignment import Receipt
from torch_dataloader_utils.planning.manifest import Manifest
from torch_dataloader_utils.planning.plan import DeliveredBaseline, Plan, PlanOptions, Shard, ShardSlice
from torch_dataloader_utils.planning.planner import make_plan
from torch_dataloader_utils.planning.shuffle import delivery_order, permutation, round_bounds
from torch_dataloader_utils.planning.topology import Topology

Scan: TypeAlias = Iterator[tuple[list[int] | None, Receipt]]


@dataclass(frozen=True)
class Delivery:
    """Delivers an epoch as a loader does, by receipts, without files.

    Attributes:
        run: The run.
        epoch: The epoch.
        takes_every: The filter takes each row whose id this number divides; 0 takes none.
        batch_size: Rows in a batch.
        drop_last: Whether the short batch at the end of a stream is left out.
        tells_ends_late: Whether a shard's last row does not tell that it is the last: so it is where the filter
            leaves nothing of the row groups after it.
    """

    run: Run
    epoch: int
    takes_every: int
    batch_size: int
    drop_last: bool
    tells_ends_late: bool

    def plan(self, epoch: int, baseline: DeliveredBaseline | None = None) -> Plan:
        run = self.run
        topology = run.topology
        return make_plan(
            run.manifest,
            run.options,
            epoch=epoch,
            num_ranks=topology.planned_ranks,
            num_workers=topology.planned_workers,
            baseline=baseline,
        )

    def fresh(self, baseline: DeliveredBaseline | None = None) -> Progress:
        topology = self.run.topology
        return Progress.fresh(
            topology.own_streams(self.plan(self.epoch, baseline)), topology.streams_per_turn, baseline
        )

    def rows_of(self, shard: Shard) -> list[int]:
        """The rows that a shard delivers, in order."""
        seed = self.run.options.shuffle_seed if self.run.options.shuffles_rows else None
        everything = row_ids(self.run.manifest, shard)
        if not self.takes_every or seed is None:
            rows = [everything[place] for place in delivery_order(ShardSlice(shard), seed=seed, epoch=self.epoch)]
            return [row for row in rows if not self.takes_every or row % self.takes_every]
        delivered = []
        for number in range(shard.rounds):
            starts = accumulate((split.row_length for split in shard.splits), initial=0)
            places = zip(starts, round_bounds(shard, number), strict=False)
            rows = [everything[first + row] for first, bounds in places for row in range(*bounds)]
            rows = [row for row in rows if row % self.takes_every]
            order = permutation(len(rows), seed=seed, epoch=self.epoch, shard=shard, number=number)
            delivered += [rows[place] for place in order]
        return delivered

    def rows_in(self, shard_slice: ShardSlice) -> list[int]:
        """The rows that a slice delivers, in order."""
        return self.rows_of(shard_slice.shard)[shard_slice.start : shard_slice.stop]

    def go_on(self, progress: Progress) -> Iterator[tuple[list[int] | None, Progress]]:
        """Yield each batch, and None for each end of a stream, with the progress once it is handed over."""
        progress = progress.rebased()
        together = progress.streams_per_turn
        waiting = deque(
            self._together(
                [self._walk(progress, turn * together + stream_assignment) for stream_assignment in range(together)]
            )
            for turn in progress.turns()
        )
        while waiting:
            walk = waiting.popleft()
            batch, receipt = next(walk)
            if batch is None:
                progress = progress.ended(receipt)
            else:
                progress = progress.advanced(receipt)
                waiting.append(walk)
            yield batch, progress

    def batches_from(self, progress: Progress) -> list[list[int]]:
        return [batch for batch, _ in self.go_on(progress) if batch is not None]

    def _together(self, walks: list[Scan]) -> Scan:
        """The batches of streams of a grid, put together step by step."""
        for parts in zip(*walks, strict=True):
            (batch, receipt), *others = parts
            rows = None if batch is None else [row for part, _ in parts if part is not None for row in part]
            yield rows, receipt._replace(others=tuple(beside for _, beside in others))

    def _walk(self, progress: Progress, stream: int) -> Scan:
        slices = progress.streams[stream].slices
        due = [
            (row, position, number, number == last)
            for position, shard_slice in enumerate(slices)
            for rows in [self.rows_in(shard_slice)]
            for last in [shard_slice.start + len(rows)]
            for number, row in enumerate(rows, start=shard_slice.start + 1)
        ]
        size = self.batch_size // progress.streams_per_turn
        dropped = len(due) % size if self.drop_last else 0
        for start in range(0, len(due) - dropped, size):
            rows = due[start : start + size]
            _, position, delivered, last = rows[-1]
            if last and not self.tells_ends_late:
                position, delivered = position + 1, 0
            yield [row for row, *_ in rows], Receipt(stream, position, delivered, rows=len(rows))
        yield None, Receipt(stream, len(slices), 0, rows=0, rows_dropped=dropped)

    def state(self, progress: Progress) -> dict[str, Any]:
        return edited(dump_state(self.run, self.epoch, progress))

    def restored(self, state: dict[str, Any]) -> Progress:
        return self.restored_from([state])

    def restored_from(self, states: list[dict[str, Any]]) -> Progress:
        checked = check_states(list(map(parse_state, states)), self.run)
        return place_states(checked, self.plan(checked.epoch, checked.baseline))


@st.composite
def deliveries(draw: st.DrawFn) -> Delivery:
    num_ranks = draw(st.integers(1, 3))
    rank = draw(st.integers(0, num_ranks - 1))
    run = Run(
        manifest=draw(manifests()),
        options=draw(plan_options()),
        filter_digest=None,
        topology=Topology(num_ranks, rank, num_workers=draw(st.integers(0, 4))),
    )
    takes_every = draw(st.sampled_from([0, 0, 1, 2, 3, 7]))
    return Delivery(
        run=run if not takes_every else replace(run, filter_digest=f"every {takes_every}"),
        epoch=draw(st.one_of(st.integers(0, 3), st.just(2**60))),
        takes_every=takes_every,
        batch_size=draw(st.one_of(st.integers(1, 20), st.just(1000))),
        drop_last=draw(st.booleans()),
        tells_ends_late=draw(st.booleans()),
    )


stops = st.integers(0, 60)
"""After how many batches and ends of streams to stop."""


def stopped(delivery: Delivery, progress: Progress, after: int) -> tuple[list[list[int]], Progress]:
    """Deliver until the stop, or to the end: what was delivered, and the progress then."""
    batches = []
    for _, (batch, now) in zip(range(after), delivery.go_on(progress), strict=False):
        progress = now
        if batch is not None:
            batches.append(batch)
    return batches, progress


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(state, allow_nan=False))


def plain_delivery(manifest: Manifest, options: PlanOptions | None = None, num_ranks: int = 1) -> Delivery:
    options = options or PlanOptions(2**27)
    run = Run(manifest, options, filter_digest=None, topology=Topology(num_ranks, 0, 0))
    return Delivery(run, epoch=0, takes_every=0, batch_size=7, drop_last=False, tells_ends_late=False)
