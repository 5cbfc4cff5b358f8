"""torchdata's StatefulDataLoader over Hugging Face datasets, as its documentation uses it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from datasets.distributed import split_dataset_by_node
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from benchmarks.contenders.frameworks.hf_datasets import converted, streamed
from benchmarks.contenders.frameworks.job import SEED, Job


class EpochLoader:
    """A `StatefulDataLoader`, and the epoch, which its user saves beside its state.

    Attributes:
        epoch: The epoch that begins or goes on.
    """

    def __init__(self, loader: StatefulDataLoader, shuffled: Any) -> None:
        self._loader = loader
        self._shuffled = shuffled
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, or go on in the one that a state was loaded of."""
        self.epoch = epoch
        self._shuffled.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over batches."""
        return iter(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank."""
        return {"epoch": self.epoch, "loader": self._loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of this rank."""
        self.epoch = state["epoch"]
        self._loader.load_state_dict(state["loader"])


def stateful(job: Job, num_ranks: int | None = None, rank: int | None = None) -> EpochLoader:
    """Return the loader of a rank, which by default is that of this process."""
    num_ranks = job.num_ranks if num_ranks is None else num_ranks
    rank = job.rank if rank is None else rank
    if job.way == "stateful, streamed":
        stream = split_dataset_by_node(streamed(job), rank=rank, world_size=num_ranks)
        return EpochLoader(StatefulDataLoader(stream, batch_size=job.batch_size, num_workers=job.workers), stream)
    rows = converted(job)
    sampler = StatefulDistributedSampler(rows, num_replicas=num_ranks, rank=rank, shuffle=job.shuffle, seed=SEED)
    loader = StatefulDataLoader(rows, batch_size=job.batch_size, sampler=sampler, num_workers=job.workers)
    return EpochLoader(loader, sampler)
