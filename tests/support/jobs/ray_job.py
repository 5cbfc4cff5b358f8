"""Under Ray Train: train an epoch in one or more fits, of which ranks die at some steps; then run the guide's code.

Its argument, JSON: ``data``; ``directory``, of the run; ``fits``, the number of ranks of each; ``dies``, by the number
of the start, the step at which the last rank kills itself; ``page``, the guide, or null.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
from jobs.pages import code_of
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model

from torch_dataloader_utils import StructuredDataset
from torch_dataloader_utils.distributed import gather_states, load_gathered

EVERY = 10


def train(config: dict[str, Any]) -> None:
    """Train the epoch, or the rest of it. The checkpoint also has the rows of all ranks."""
    model = prepare_model(torch.nn.Linear(1, 1))
    loader, _ = StructuredDataset.create_dataloader(
        config["data"],
        batch_size=8,
        row_id_column="row",
        shuffle=True,
        shuffle_buffer_size=60,
        uneven_ranks="drop",
        num_workers=1,
    )
    rank, trained, starts, rows = dist.get_rank(), [], 1, []
    if newest := ray.train.get_checkpoint():
        with newest.as_directory() as directory:
            saved = torch.load(Path(directory, "checkpoint.pt"), weights_only=True)
        load_gathered(loader, saved["loaders"])
        starts, trained = saved["starts"] + 1, saved["trained"]

    def save() -> None:
        states = gather_states(loader)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, rows)
        trained.append(every)
        rows.clear()
        with tempfile.TemporaryDirectory() as directory:
            if rank == 0:
                saved = {"loaders": states, "trained": trained, "starts": starts}
                torch.save(saved, Path(directory, "checkpoint.pt"))
            checkpoint = Checkpoint.from_directory(directory) if rank == 0 else None
            ray.train.report({"starts": starts}, checkpoint=checkpoint)

    for step, batch in enumerate(loader, start=1):
        model(batch["score"].float().unsqueeze(1)).mean().backward()
        rows += batch["row"].tolist()
        if step % EVERY == 0:
            save()
        if step == config["dies"].get(str(starts)) and rank == dist.get_world_size() - 1:
            ray.train.get_all_reported_checkpoints()  # waits until Ray has them
            os.kill(os.getpid(), signal.SIGKILL)
    save()


def fit(arguments: dict[str, Any], ranks: int) -> None:
    """Train under some ranks, from the newest checkpoint of the run. Ray starts them again once."""
    trainer = TorchTrainer(
        train,
        train_loop_config={"data": arguments["data"], "dies": arguments["dies"]},
        scaling_config=ScalingConfig(num_workers=ranks),
        run_config=RunConfig(
            name="run", storage_path=arguments["directory"], failure_config=FailureConfig(max_failures=1)
        ),
    )
    checkpoint = trainer.fit().checkpoint
    assert checkpoint is not None
    with checkpoint.as_directory() as directory:
        saved = torch.load(Path(directory, "checkpoint.pt"), weights_only=True)
    report = {"trained": saved["trained"], "starts": saved["starts"]}
    Path(arguments["directory"], "report.json").write_text(json.dumps(report))


def report_batches_taken(config: dict[str, Any]) -> None:
    """Write how many batches Ray's own loader has taken when it has handed over one."""
    loader, _ = StructuredDataset.create_dataloader(config["data"], batch_size=8, num_workers=0)
    next(iter(prepare_data_loader(loader)))
    report = {"taken": loader.state_dict()["batches_delivered"]}
    Path(config["directory"], "report.json").write_text(json.dumps(report))


def main() -> None:
    """Start Ray on loopback, train, and end it."""
    arguments = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as scratch:
        ray.init(address="local", num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1", _temp_dir=scratch)
        try:
            for number, ranks in enumerate(arguments["fits"], start=1):
                is_last = number == len(arguments["fits"])
                with contextlib.nullcontext() if is_last else contextlib.suppress(ray.train.TrainingFailedError):
                    fit(arguments, ranks)
            if arguments["page"]:
                exec(code_of(arguments["page"]), globals())  # noqa: S102
                TorchTrainer(report_batches_taken, train_loop_config=arguments).fit()
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
