"""On a device mesh, data-parallel by tensor-parallel, with torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.contenders.frameworks import plain
from benchmarks.contenders.frameworks.job import Job, Recorder
from benchmarks.contenders.frameworks.loaders import FEATURES, ours
from benchmarks.contenders.frameworks.stateful import stateful
from benchmarks.contenders.frameworks.under_dcp import ByRank, newest, step_of
from torch_dataloader_utils.distributed import CheckpointEntry

TENSOR_PARALLEL = 2
HIDDEN = 8


@plain.joined
def train(job: Job, recorder: Recorder) -> None:
    """Train a model whose layers and rows are divided among processes."""
    num_ranks = job.num_ranks // TENSOR_PARALLEL
    mesh = init_device_mesh("cpu", (num_ranks, TENSOR_PARALLEL), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(len(FEATURES), HIDDEN), torch.nn.Linear(HIDDEN, 1))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    rank = mesh["dp"].get_local_rank()
    if job.way == "ours":
        loader: Any = ours(job, mesh=mesh["dp"], global_batch_size=job.batch_size * num_ranks)
        entry: Any = CheckpointEntry(loader, elastic=True)
    else:
        loader = stateful(job, num_ranks, rank)
        entry = ByRank(loader, num_ranks, rank)

    training = plain.Training(model, model, loader, job.way == "ours")
    recorder.begin()
    found = newest(job.directory)
    if found is not None:
        state = {"model": get_model_state_dict(model), "loader": entry}
        dcp.load(state, checkpoint_id=found)
        set_model_state_dict(model, state["model"])
        recorder.resume(step_of(found))

    def save(step: int) -> None:
        state = {"model": get_model_state_dict(model), "loader": entry}
        dcp.save(state, checkpoint_id=Path(job.directory, f"step-{step}"))

    plain.run(job, recorder, training, save)
