"""The topology: ranks and their workers, and the virtual topology for which plans may be made instead. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from torch_dataloader_utils.planning.plan import Plan, ShardSlice


@dataclass(frozen=True, slots=True)
class Topology:
    """The ranks and their workers, and the virtual topology for which plans are made instead, if there is one.

    A plan for virtual ranks and workers does not change when real ranks and workers do, so that the sequence of global
    batches stays the same.

    Attributes:
        num_ranks: Number of ranks.
        rank: This rank.
        num_workers: Number of worker processes of this rank; 0 means its own process.
        virtual_ranks: Number of virtual ranks, a multiple of the ranks; or None.
        virtual_workers: Number of virtual workers of each virtual rank, a multiple of the workers; or None.
        sources: Number of sources of a mixture, each of which is planned as a rank of its own; else 1.
    """

    num_ranks: int
    rank: int
    num_workers: int
    virtual_ranks: int | None = None
    virtual_workers: int | None = None
    sources: int = 1

    @property
    def planned_ranks(self) -> int:
        """Number of ranks that plans are made for."""
        return self.virtual_ranks or self.num_ranks

    @property
    def planned_workers(self) -> int:
        """Number of workers that plans are made for; 0 means the rank's own process."""
        return self.virtual_workers or self.num_workers

    @property
    def processes(self) -> int:
        """Number of processes that read: the workers, or the rank's own process."""
        return max(1, self.num_workers)

    @property
    def streams_per_turn(self) -> int:
        """Number of streams that give the rows of a batch: each source of each planned rank that this rank delivers."""
        return self.planned_ranks // self.num_ranks * self.sources

    @property
    def own_ranks(self) -> range:
        """The planned ranks that this rank delivers; with several sources each of them stands for one of a rank."""
        first = self.rank * self.streams_per_turn
        return range(first, first + self.streams_per_turn)

    def own_streams(self, plan: Plan) -> tuple[tuple[ShardSlice, ...], ...]:
        """Return this rank's streams of a plan: for each worker, those of the planned ranks that this rank delivers."""
        return tuple(plan.stream(rank, worker) for worker in range(plan.streams) for rank in self.own_ranks)


def arrange(
    *,
    num_ranks: int,
    rank: int,
    num_workers: int,
    adopts_num_workers: bool,
    virtual_ranks: int | None,
    virtual_workers: int | None,
    batch_size: int,
    uneven_ranks: str,
    filtered: bool,
) -> Topology:
    """Return the topology, or raise a ValueError unless real and virtual ranks and workers fit together.

    `adopts_num_workers` says that `num_workers` is a default, which a virtual topology may lower. `batch_size` counts
    the rows of a rank's step, and `filtered` says that a filter or a transform changes the number of rows.
    """
    if uneven_ranks != "allow" and filtered:
        msg = (
            f"uneven_ranks={uneven_ranks!r} needs the number of rows of each rank, which with a filter or a transform "
        )
        msg += "only reading tells: use distributed.in_step(loader), which lets ranks stop together"
        raise ValueError(msg)
    if (virtual_ranks is None) != (virtual_workers is None):
        raise ValueError(f"virtual_ranks={virtual_ranks} and virtual_workers={virtual_workers}: give both or neither")
    if virtual_ranks is None or virtual_workers is None:
        return Topology(num_ranks, rank, num_workers)
    if uneven_ranks == "allow":
        msg = "virtual_ranks needs uneven_ranks='drop' or 'pad': a batch combines rows of several virtual ranks"
        raise ValueError(msg)
    if virtual_ranks % num_ranks:
        raise ValueError(f"virtual_ranks={virtual_ranks} is not a multiple of the number of ranks, {num_ranks}")
    if batch_size * num_ranks % virtual_ranks:
        msg = f"batch_size={batch_size} of {num_ranks} ranks cannot be divided among virtual_ranks={virtual_ranks}: "
        msg += f"batch_size needs to be a multiple of {virtual_ranks // num_ranks}"
        raise ValueError(msg)
    if adopts_num_workers:
        num_workers = max(count for count in range(1, num_workers + 1) if virtual_workers % count == 0)
    elif virtual_workers % max(1, num_workers):
        raise ValueError(f"virtual_workers={virtual_workers} is not a multiple of num_workers={num_workers}")
    return Topology(num_ranks, rank, num_workers, virtual_ranks, virtual_workers)
