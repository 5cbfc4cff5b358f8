"""Under torchrun, which starts the ranks again: the states of all ranks in one file, or each rank's in its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contenders.frameworks import plain
from benchmarks.contenders.frameworks.job import Job, Recorder
from benchmarks.contenders.frameworks.rank_files import load_file, save_file
from torch_dataloader_utils.distributed import gather_states, load_gathered


@plain.joined
def train(job: Job, recorder: Recorder) -> None:
    """Train from the newest checkpoint, if there is one, whoever has started this process."""
    training = plain.begin(job)
    path = Path(job.directory, "checkpoint.pt")
    recorder.begin()
    if job.way != "ours":
        recorder.resume(load_file(job, training))
    elif path.exists():
        saved = torch.load(path, weights_only=True)
        training.inner.load_state_dict(saved["model"])
        load_gathered(training.loader, saved["loaders"])
        recorder.resume(saved["step"])

    def save(step: int) -> None:
        if job.way != "ours":
            save_file(job, training, step)
            return
        states = gather_states(training.loader)
        if dist.get_rank() == 0:
            unfinished = path.with_suffix(".unfinished")
            content: dict[str, Any] = {"step": step, "model": training.inner.state_dict(), "loaders": states}
            torch.save(content, unfinished)
            unfinished.replace(path)

    plain.run(job, recorder, training, save)
