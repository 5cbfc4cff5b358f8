"""With this library's CheckpointStore, or with a file that each rank writes."""

from __future__ import annotations

from pathlib import Path

from benchmarks.contenders.frameworks import plain
from benchmarks.contenders.frameworks.job import Job, Recorder
from benchmarks.contenders.frameworks.rank_files import load_file, save_file
from torch_dataloader_utils import CheckpointStore


@plain.joined
def train(job: Job, recorder: Recorder) -> None:
    """Train from the newest checkpoint, if there is one."""
    training = plain.begin(job)
    store = CheckpointStore(Path(job.directory, "store"))
    recorder.begin()
    if job.way.startswith("ours"):
        found = store.restore(model=training.model, loader=training.loader)
        recorder.resume(found.step if found else 0)
    else:
        recorder.resume(load_file(job, training))

    def save(step: int) -> None:
        if job.way == "ours":
            store.save(step, model=training.model, loader=training.loader)
        elif job.way == "ours, async":
            store.save(step, model=training.model, loader=training.loader, async_=True)
        else:
            save_file(job, training, step)

    plain.run(job, recorder, training, save)
    store.wait()
