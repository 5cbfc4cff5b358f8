"""Processes of device meshes that load states, make some steps, and save states.

Its argument, JSON: ``data``; ``directory``; ``cases``, each with its ``name``; the ``shape`` of the mesh, the ``names``
of its dimensions, those that are data-parallel (``dp``), and the ``order`` of the processes in it if it is not theirs;
loader ``options``; ``together``, null or the argument of `in_step`; ``stop``, a number of steps or null; and ``load``,
the case whose checkpoint it loads, or null.
"""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jobs.groups import leave_group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torch_dataloader_utils import DeltaDataset, StructuredDataLoader, StructuredDataset, UnevenRanksWarning
from torch_dataloader_utils.distributed import (
    CheckpointEntry,
    broadcast_states,
    gather_states,
    in_step,
    own_state,
    require_same_plan,
    save_rank_state,
)

TIMES = 20
"""How often all processes write the file of their rank at the same time."""


def mesh_of(case: dict[str, Any]) -> DeviceMesh:
    """Return the data-parallel part of a case's mesh."""
    shape, names = tuple(case["shape"]), tuple(case["names"])
    if "order" in case:
        mesh = DeviceMesh("cpu", torch.tensor(case["order"]).view(shape), mesh_dim_names=names)
    else:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return mesh[tuple(case["dp"])]


def run_case(data: str, directory: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Make steps from the loaded checkpoint, and save others; return what was delivered and saved."""
    dataset_class = DeltaDataset if case.get("table") else StructuredDataset
    options = {"global_batch_size": 32, "row_id_column": "row", **case["options"]}
    loader, dataset = dataset_class.create_dataloader(case.get("table", data), mesh=mesh_of(case), **options)
    require_same_plan(loader)
    entries = {"loader": CheckpointEntry(loader, elastic=True)}
    if case["load"]:
        dcp.load(entries, checkpoint_id=directory / case["load"])
    batches = in_step(loader, uneven=case["together"]) if case["together"] else iter(loader)
    rows = [batch["row"].tolist() for batch in itertools.islice(batches, case["stop"])]
    dist.barrier()
    dcp.save(entries, checkpoint_id=directory / case["name"])
    for _ in range(TIMES):
        save_rank_state(loader, directory / f"{case['name']}-files")
    dist.barrier()
    states = gather_states(loader)
    copies = copy.copy(loader), copy.deepcopy(dataset), pickle.loads(pickle.dumps(loader))
    return {
        "rank": dataset.rank,
        "num_ranks": dataset.num_ranks,
        "rows": rows,
        "states": [state["rank"] for state in states],
        "states in the world": states_in_world(loader) if dataset.num_ranks > 1 else None,
        "own": own_state(states, source=loader) == loader.state_dict() == own_state(states, source=dataset),
        "files": sorted(path.name for path in (directory / f"{case['name']}-files").iterdir()),
        "groups of copies": [each.process_group is None for each in copies],
    }


def states_in_world(loader: StructuredDataLoader) -> list[int]:
    """Return the ranks of the states that are gathered from all processes, those that share a rank included."""
    return [state["rank"] for state in gather_states(loader, dist.group.WORLD)]


def refusals(data: str, case: dict[str, Any]) -> dict[str, str | None]:
    """Return what each wrong way to make a loader, or to gather its states, says."""
    mesh = mesh_of(case)
    loader, _ = StructuredDataset.create_dataloader(data, mesh=mesh, num_workers=0)
    apart = DeviceMesh("cpu", [0, 1])
    is_first = dist.get_rank() == 0

    def open_with(**options: Any) -> Callable[[], Any]:
        return lambda: StructuredDataset.create_dataloader(data, num_workers=0, **options)

    if is_first:
        next(iter(loader))
    return {
        "indivisible": message_of(open_with(mesh=mesh, global_batch_size=33)),
        "both sizes": message_of(open_with(mesh=mesh, global_batch_size=32, batch_size=16)),
        "mesh and rank": message_of(open_with(mesh=mesh, num_ranks=2, rank=0)),
        "outside": message_of(open_with(mesh=apart)),
        "peers apart": message_of(lambda: gather_states(loader, dist.group.WORLD)),
        "no states": message_of(lambda: broadcast_states(None)),
        "no such rank": message_of(lambda: broadcast_states([], src=4)),
    }


def message_of(call: Callable[[], Any]) -> str | None:
    """Return the message of a ValueError that a call raises, if it does."""
    try:
        call()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return None


def broadcasts() -> list[Any]:
    """Return what this process gets of others: in the world, and in groups of two with ranks of their own."""
    rank = dist.get_rank()
    groups = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), 2)]
    return [
        broadcast_states([{"from": rank}] if rank == 1 else None, src=1),
        broadcast_states([{"from": rank}], src=1, group=groups[rank // 2]),
    ]


def main() -> None:
    """Run every case, and write what this process delivered."""
    arguments = json.loads(sys.argv[1])
    warnings.simplefilter("ignore", UnevenRanksWarning)
    dist.init_process_group("gloo")
    directory, data, cases = Path(arguments["directory"]), arguments["data"], arguments["cases"]
    report: dict[str, Any] = {case["name"]: run_case(data, directory, case) for case in cases}
    report["refusals"], report["broadcasts"] = refusals(data, cases[0]), broadcasts()
    Path(f"{arguments['report']}-{dist.get_rank()}").write_text(json.dumps(report))
    leave_group()


if __name__ == "__main__":
    main()
