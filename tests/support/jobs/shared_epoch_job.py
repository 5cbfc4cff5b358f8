"""Under torchrun: make steps that every rank has to make, from where another number of ranks stopped.

Its argument, JSON: ``data``; ``directory``, where states and row ids go; ``cases``, each with its ``name``, loader
``options``, how ranks are held ``together`` (null, or the argument of `in_step`), and whether it ``skips`` steps;
``stop``, a number of steps or null; ``load`` and ``save``, names of the runs whose states are loaded and saved, or
null.

Each step is a sum over all ranks: a rank that made one more than others would wait for them for ever.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import torch
import torch.distributed as dist
from jobs.groups import leave_group

from torch_dataloader_utils import StructuredDataLoader, StructuredDataset, UnevenRanksWarning
from torch_dataloader_utils.distributed import (
    gather_states,
    in_step,
    load_rank_state,
    require_same_plan,
    save_rank_state,
)

FEW = 20
"""So many rows a filter leaves that leaves few: some ranks have none."""


def make_loader(data: str, case: dict[str, Any]) -> tuple[StructuredDataLoader, StructuredDataset]:
    """Open the data for the rank that the process group says."""
    options = {"batch_size": 8, "row_id_column": "row", "shuffle_seed": 5, **case["options"]}
    if case.get("filtered"):
        few = pc.field("value") < FEW
        options["filters"] = few if case["filtered"] == "few" else pc.bit_wise_and(pc.field("value"), 4) == 0
    return StructuredDataset.create_dataloader(data, **options)


def batches_of(loader: StructuredDataLoader, case: dict[str, Any]) -> Iterator[Any]:
    """Iterate over the loader, in step with the others if so wanted."""
    return iter(loader) if case["together"] is None else in_step(loader, uneven=case["together"])


def run_case(arguments: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    """Make steps from where the run before stopped, and return what this rank was given."""
    loader, dataset = make_loader(arguments["data"], case)
    folder = Path(arguments["directory"]) / case["name"]
    if arguments["load"] is not None:
        before = folder / arguments["load"]
        if case["name"].startswith("files"):
            load_rank_state(loader, before, strict=False)
        else:
            loader.load_state_dict(torch.load(before / "states.pt", weights_only=True), strict=False)
    if case.get("skips"):  # all ranks make the same call; the last group also has what others skipped
        first = loader.state_dict()["batches_delivered"] + 1
        loader.skip_steps(first, first + 3)
        if arguments["stop"] is None:
            loader.restore_skipped()
    require_same_plan(dataset)
    length = len(loader) if not case.get("filtered") else None
    rows = []
    batches = batches_of(loader, case)
    for _step in range(10**6 if arguments["stop"] is None else arguments["stop"]):
        batch = next(batches, None)
        if batch is None:
            break
        total = batch["row"].sum()
        dist.all_reduce(total)
        rows.append(batch["row"].tolist())
    dist.barrier()
    state = loader.state_dict()
    if arguments["save"] is not None:
        after = folder / arguments["save"]
        if case["name"].startswith("files"):
            save_rank_state(loader, after)
        else:
            states = gather_states(loader)
            if dist.get_rank() == 0:
                after.mkdir(parents=True)
                torch.save(states, after / "states.pt")
        dist.barrier()
    metrics = dataset.get_metrics()
    return {"rows": rows, "length": length, "metrics": metrics, "delivered": state["batches_delivered"]}


def main() -> None:
    """Run every case and write what this rank delivered."""
    arguments = json.loads(sys.argv[1])
    warnings.simplefilter("ignore", UnevenRanksWarning)
    dist.init_process_group("gloo")
    report = {case["name"]: run_case(arguments, case) for case in arguments["cases"]}
    name = f"report-{arguments['save'] or 'last'}-{dist.get_rank()}.json"
    (Path(arguments["directory"]) / name).write_text(json.dumps(report))
    leave_group()


if __name__ == "__main__":
    main()
