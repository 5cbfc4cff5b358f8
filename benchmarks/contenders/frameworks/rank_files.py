"""Checkpoints of which each rank writes a file of its own, with the state of its StatefulDataLoader."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.contenders.frameworks.job import Job
from benchmarks.contenders.frameworks.plain import Training


def save_file(job: Job, training: Training, step: int) -> None:
    """Write this rank's file of a checkpoint."""
    directory = Path(job.directory, f"step-{step}")
    directory.mkdir(exist_ok=True)
    unfinished = directory / f"unfinished-{job.rank}"
    torch.save({"model": training.inner.state_dict(), "loader": training.loader.state_dict()}, unfinished)
    unfinished.replace(directory / f"rank-{job.rank}-of-{job.num_ranks}.pt")


def load_file(job: Job, training: Training) -> int:
    """Load this rank's file of the newest checkpoint of which no file is missing.

    Returns:
        Its step; 0 if there is none.

    Raises:
        FileNotFoundError: If this rank has no file in it, because another number of ranks has saved it.
    """
    steps = {int(path.name.removeprefix("step-")): sorted(path.glob("rank-*")) for path in _checkpoints(job)}
    complete = [step for step, files in steps.items() if files and len(files) == int(files[0].stem.split("-")[-1])]
    if not complete:
        return 0
    path = Path(job.directory, f"step-{max(complete)}", f"rank-{job.rank}-of-{job.num_ranks}.pt")
    saved = torch.load(path, weights_only=False)
    training.inner.load_state_dict(saved["model"])
    training.loader.load_state_dict(saved["loader"])
    return max(complete)


def _checkpoints(job: Job) -> list[Path]:
    return list(Path(job.directory).glob("step-*"))
