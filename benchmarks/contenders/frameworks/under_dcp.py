"""With torch.distributed.checkpoint: this library's entry, or a StatefulDataLoader's by rank as in torchtitan."""

from __future__ import annotations

import pickle
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.contenders.frameworks import plain
from benchmarks.contenders.frameworks.job import Job, Recorder
from torch_dataloader_utils.distributed import CheckpointEntry


class ByRank:
    """A loader's entry as torchtitan makes it: a pickle under the rank's own name, and the number of ranks."""

    def __init__(self, loader: Any, num_ranks: int, rank: int) -> None:
        self._loader, self._num_ranks, self._rank = loader, num_ranks, rank

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state."""
        return {f"dp_rank_{self._rank}": pickle.dumps(self._loader.state_dict()), "world_size": self._num_ranks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load this rank's state.

        Raises:
            RuntimeError: If another number of ranks has saved it.
        """
        if state["world_size"] != self._num_ranks:
            raise RuntimeError("dp_degree is inconsistent before and after checkpoint: resharding is not supported")
        self._loader.load_state_dict(pickle.loads(state[f"dp_rank_{self._rank}"]))  # noqa: S301 - as torchtitan


def newest(directory: str) -> Path | None:
    """Return the newest checkpoint that is complete: DCP writes its metadata last."""
    complete = [path.parent for path in Path(directory).glob("step-*/.metadata")]
    return max(complete, key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint."""
    return int(checkpoint.name.removeprefix("step-"))


@plain.joined
def train(job: Job, recorder: Recorder) -> None:
    """Train, with a checkpoint of model and loader in one directory."""
    training = plain.begin(job)
    if training.is_ours:
        entry: Any = CheckpointEntry(training.loader, elastic=True)
    else:
        entry = ByRank(training.loader, job.num_ranks, job.rank)
    parts = {"model": training.inner, "loader": entry}
    recorder.begin()
    found = newest(job.directory)
    if found is not None:
        dcp.load(dict(parts), checkpoint_id=found)
        recorder.resume(step_of(found))
    writers = dist.new_group(backend="gloo") if dist.is_initialized() else None
    saving: list[Future[Any]] = []

    def save(step: int) -> None:
        if job.way != "ours, async":
            dcp.save(dict(parts), checkpoint_id=Path(job.directory, f"step-{step}"))
            return
        while saving:
            saving.pop().result()
        path = Path(job.directory, f"step-{step}")
        saving.append(dcp.async_save(dict(parts), checkpoint_id=path, process_group=writers))  # type: ignore[arg-type]

    plain.run(job, recorder, training, save)
    while saving:
        saving.pop().result()
