"""All ranks of a run, by receipts alone, and runs that take turns in one epoch under any ranks and workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from deliveries import Delivery, stopped, through_json
from hypothesis import strategies as st
from support import manifests, plan_options

from torch_dataloader_utils.checkpoint.merge.states import merge_states
from torch_dataloader_utils.checkpoint.parse.states import parse_state
from torch_dataloader_utils.checkpoint.run import Run
from torch_dataloader_utils.planning.manifest import Manifest
from torch_dataloader_utils.planning.plan import DeliveredBaseline, PlanOptions
from torch_dataloader_utils.planning.topology import Topology


@dataclass(frozen=True)
class RankGroup:
    """All ranks of a run.

    Attributes:
        ranks: What each of them delivers.
    """

    ranks: tuple[Delivery, ...]

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        options: PlanOptions,
        *,
        num_ranks: int = 1,
        num_workers: int = 0,
        grid: tuple[int, int] | None = None,
        uneven: Any = "allow",
        batch_size: int = 4,
        epoch: int = 0,
        takes_every: int = 0,
    ) -> RankGroup:
        """Make one; with a grid `batch_size` is a virtual rank's."""
        virtual = grid or (None, None)
        ranks = []
        for rank in range(num_ranks):
            topology = Topology(num_ranks, rank, num_workers, *virtual)
            balanced = replace(options, uneven_ranks=uneven, batch_size=None if uneven == "allow" else batch_size)
            run = Run(manifest, balanced, f"every {takes_every}" if takes_every else None, topology)
            size = batch_size * topology.streams_per_turn
            ranks.append(Delivery(run, epoch, takes_every, size, drop_last=False, tells_ends_late=False))
        return cls(tuple(ranks))

    @property
    def rows(self) -> list[int]:
        """All rows that are to be delivered."""
        first = self.ranks[0]
        return [row for row in range(first.run.manifest.rows) if not first.takes_every or row % first.takes_every]

    def base_of(self, states: Sequence[dict[str, Any]]) -> DeliveredBaseline:
        """Merge states, as each rank of this group would."""
        merged = [merge_states(list(map(parse_state, states)), delivery.run) for delivery in self.ranks]
        assert all(one == merged[0] for one in merged)
        return merged[0].baseline

    def go_on(self, baseline: DeliveredBaseline | None, after: Sequence[int]) -> tuple[list[int], list[dict[str, Any]]]:
        """Let each rank deliver some batches; return all rows, and the states, which are checked to load strictly."""
        rows, states = [], []
        for delivery, stop in zip(self.ranks, after, strict=False):
            batches, progress = stopped(delivery, delivery.fresh(baseline), stop)
            rows += [row for batch in batches for row in batch]
            state = through_json(delivery.state(progress))
            if delivery.run.topology.virtual_ranks is None or len(self.ranks) == 1:
                restored = delivery.restored(state)
                assert [one.left for one in restored.streams] == [one.left for one in progress.streams]
                assert delivery.batches_from(restored) == delivery.batches_from(progress)
            states.append(state)
        return rows, states


topologies = st.sampled_from([(1, 0), (1, 2), (2, 0), (2, 1), (2, 3), (3, 2), (4, 1), (5, 2)])


@st.composite
def journeys(draw: st.DrawFn, takes_every: int | None = None) -> tuple[list[RankGroup], list[list[int]]]:
    """Some groups that take turns in one epoch, and after how many batches each of their ranks stops.

    `takes_every` says which rows the filter drops: see `Delivery`. None for any.
    """
    manifest, options = draw(manifests()), replace(draw(plan_options()), shuffle_interleave=draw(st.integers(1, 4)))
    takes_every = draw(st.sampled_from([0, 0, 0, 2, 5])) if takes_every is None else takes_every
    epoch = draw(st.integers(0, 2))
    groups, stops = [], []
    for _ in range(draw(st.integers(1, 4))):
        num_ranks, num_workers = draw(topologies)
        uneven = "allow" if takes_every else draw(st.sampled_from(["allow", "drop", "pad"]))
        grid = None
        if uneven != "allow" and draw(st.booleans()):
            grid = (num_ranks * draw(st.integers(1, 2)), max(1, num_workers) * draw(st.integers(1, 2)))
        group = RankGroup.of(
            manifest,
            options,
            num_ranks=num_ranks,
            num_workers=num_workers,
            grid=grid,
            uneven=uneven,
            batch_size=draw(st.integers(1, 12)),
            epoch=epoch,
            takes_every=takes_every,
        )
        groups.append(group)
        stops.append(draw(st.lists(st.integers(0, 12), min_size=num_ranks, max_size=num_ranks)))
    return groups, stops
