"""Under torchrun: continue epochs where they were left, make some more steps, and leave them again.

Its argument, JSON: ``data``; ``directory``, where states and row ids go; ``cases``, each with its ``name``, loader
``options``, ``epoch``, and ``how`` the states are kept: ``gathered`` in one file, in ``files`` by rank, or in torch's
``checkpoint``; ``stop``, a number of steps or null; and the number of the ``run``.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jobs.groups import leave_group
from torch.utils.data import DataLoader

from torch_dataloader_utils import RankMismatchError, StructuredDataLoader, StructuredDataset, UnevenRanksWarning
from torch_dataloader_utils.distributed import (
    CheckpointEntry,
    gather_states,
    in_step,
    load_rank_state,
    own_state,
    require_same_plan,
    save_rank_state,
)


def make_loader(data: str | list[str], **options: Any) -> tuple[StructuredDataLoader, StructuredDataset]:
    """Open the data for the rank that the process group says."""
    return StructuredDataset.create_dataloader(data, **{"batch_size": 8, "row_id_column": "row", **options})


def resume(loader: StructuredDataLoader, case: dict[str, Any], directory: Path) -> None:
    """Load this rank's state, if there is one."""
    if not directory.exists():
        return
    if case["how"] == "files":
        load_rank_state(loader, directory)
    elif case["how"] == "checkpoint":
        dcp.load({"loader": CheckpointEntry(loader)}, checkpoint_id=directory)
    else:
        states = torch.load(directory / "states.pt", weights_only=True)["loaders"]
        loader.load_state_dict(own_state(states[::-1]))


def save(loader: StructuredDataLoader, case: dict[str, Any], directory: Path) -> None:
    """Save this rank's state, or all of them."""
    if case["how"] == "files":
        save_rank_state(loader, directory)
        return
    if case["how"] == "checkpoint":
        dcp.save({"loader": CheckpointEntry(loader)}, checkpoint_id=directory)
        return
    states = gather_states(loader)
    if dist.get_rank() == 0:
        directory.mkdir(exist_ok=True)
        torch.save({"loaders": states}, directory / "states.pt")


def run_case(data: str, directory: Path, case: dict[str, Any], stop: int | None) -> list[list[int]]:
    """Make steps from where the run before stopped, and return the row ids of their batches."""
    loader, dataset = make_loader(data, **case["options"])
    resume(loader, case, directory)
    dataset.set_epoch(case["epoch"])
    require_same_plan(dataset)
    batches = [batch["row"].tolist() for batch in itertools.islice(loader, stop)]
    dist.barrier()
    save(loader, case, directory)
    dist.barrier()
    return batches


def refusal(data: str | list[str], **options: Any) -> str | None:
    """Return what `require_same_plan` says against what this rank planned, if anything."""
    _, dataset = make_loader(data, **options)
    return message_of(lambda: require_same_plan(dataset))


def refusals(data: str) -> dict[str, str | None]:
    """Return the refusals where nothing differs, and where the last rank, or the first, does something else."""
    first, last = dist.get_rank() == 0, dist.get_rank() == dist.get_world_size() - 1
    files = sorted(str(path) for path in Path(data).iterdir())
    return {
        "nothing": refusal(data, shuffle=True),
        "seed": refusal(data, shuffle=True, shuffle_seed=1 if last else 2),
        "files": refusal(files[1:] if first else files),
        "workers": refusal(data, num_workers=2 if last else 0),
        "batch_size": refusal(data, batch_size=9 if last else 8),
        "drop_last": refusal(data, drop_last=last),
        "filters": refusal(data, filters=pc.field("value") >= (-1 if last else 0)),
        "gather": gather_refusal(data),
        "one rank twice": refusal(data, num_ranks=dist.get_world_size(), rank=0),
        "each rank alone": refusal(data, num_ranks=1, rank=0),
        "an entry on one rank alone": entry_refusal(data) if first else None,
        **{f"{where} of other plans": message for where, message in meetings(data, seed=1 if last else 2).items()},
    }


def meetings(data: str, seed: int) -> dict[str, str | None]:
    """Return what each place where ranks meet says against ranks that shuffle by different seeds."""
    loader, _ = make_loader(data, shuffle=True, shuffle_seed=seed)
    return {
        "gather_states": message_of(lambda: gather_states(loader)),
        "in_step": message_of(lambda: next(in_step(loader))),
        "CheckpointEntry": message_of(lambda: CheckpointEntry(loader).state_dict()),
    }


def message_of(call: Callable[[], Any]) -> str | None:
    """Return the message of a RankMismatchError that a call raises, if it does."""
    try:
        call()
    except RankMismatchError as error:
        return str(error)
    return None


def steps_without_values(data: str) -> dict[str, int]:
    """Count the batches of this rank, and the steps that all make together, where `collate_fn` returns None."""
    few = pc.field("value") < 12
    loader, _ = make_loader(data, collate_fn=lambda _: None, filters=few, num_workers=0)
    return {"batches": sum(1 for _ in loader), "steps": sum(1 for _ in in_step(loader, uneven="pad"))}


def gather_refusal(data: str) -> str | None:
    """Return what `gather_states` says where the last rank opened its loader as the first one."""
    last = dist.get_rank() == dist.get_world_size() - 1
    rank = {"num_ranks": dist.get_world_size(), "rank": 0 if last else dist.get_rank()}
    return message_of(lambda: gather_states(make_loader(data, **rank)[0]))


def entry_refusal(data: str) -> str | None:
    """Return what the entry of a loader that only this rank has says: it would hang if it waited for others."""
    return message_of(CheckpointEntry(make_loader(data, num_ranks=1, rank=0)[0]).state_dict)


def opened_early(data: str) -> StructuredDataLoader:
    """Return a loader that was opened where nothing said how many ranks there are."""
    hidden = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE")}
    loader, _ = make_loader(data)
    os.environ |= hidden
    return loader


def early_refusals(early: StructuredDataLoader, data: str) -> dict[str, list[str | None]]:
    """Return what is said of such a loader in all processes, and where the first one alone has it."""
    spawned = {"batch_size": None, "num_workers": 1, "multiprocessing_context": "spawn"}
    own = early if dist.get_rank() == 0 else make_loader(data)[0]
    return {
        "all": [
            message_of(lambda: iter(early)),
            message_of(lambda: iter(early.dataset)),
            message_of(lambda: iter(DataLoader(early.dataset, **spawned))),
            message_of(lambda: next(in_step(early))),
            message_of(lambda: require_same_plan(early)),
        ],
        "one": [message_of(lambda: next(in_step(own))), message_of(lambda: require_same_plan(own))],
    }


def main() -> None:
    """Run every case and write what this rank delivered."""
    arguments = json.loads(sys.argv[1])
    warnings.simplefilter("ignore", UnevenRanksWarning)
    early = opened_early(arguments["data"])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name)  # now the process group alone can tell
    directory = Path(arguments["directory"])
    delivered = {
        case["name"]: run_case(arguments["data"], directory / case["name"], case, arguments["stop"])
        for case in arguments["cases"]
    }
    report: dict[str, Any] = {"delivered": delivered}
    if arguments["stop"]:
        report["refusals"] = refusals(arguments["data"])
        report["early"] = early_refusals(early, arguments["data"])
        report["without values"] = steps_without_values(arguments["data"])
    (directory / f"run-{arguments['run']}-rank-{rank}.json").write_text(json.dumps(report))
    leave_group()


if __name__ == "__main__":
    main()
