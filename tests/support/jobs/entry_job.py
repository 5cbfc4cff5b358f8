"""Ranks that load a distributed checkpoint of all ranks' states, make some steps, and save another one.

Its argument, JSON: ``data``; ``directory``; ``cases``, each with its ``name``, loader ``options`` and ``how`` it is
saved: ``save`` or ``async_save``; ``sharing``, the number of processes that share a rank of the loader; ``stop``, a
number of steps or null; ``load`` and ``save``, names of checkpoints or null; and where the ``report`` goes.
"""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jobs.groups import leave_group

from torch_dataloader_utils import StructuredDataset, UnevenRanksWarning
from torch_dataloader_utils.distributed import CheckpointEntry


def run_case(arguments: dict[str, Any], case: dict[str, Any], writers: dist.ProcessGroup) -> dict[str, Any]:
    """Make steps from the loaded checkpoint, and save another; return what was delivered."""
    sharing = arguments["sharing"]
    rank = {"rank": dist.get_rank() // sharing, "num_ranks": dist.get_world_size() // sharing}
    options = {"batch_size": 8, "row_id_column": "row", **case["options"], **rank}
    loader, _ = StructuredDataset.create_dataloader(arguments["data"], **options)
    entries = {"loader": CheckpointEntry(loader, elastic=True)}
    directory = Path(arguments["directory"], case["name"])
    if arguments["load"]:
        dcp.load(entries, checkpoint_id=directory / arguments["load"])
    batches = iter(loader)
    rows = [batch["row"].tolist() for batch in itertools.islice(batches, arguments["stop"])]
    if arguments["save"]:
        checkpoint = directory / arguments["save"]
        if case["how"] == "async_save":
            saving = dcp.async_save(entries, checkpoint_id=checkpoint, process_group=writers)
            next(batches, None)  # after the state was taken: the checkpoint must not have it
            saving.result()
        else:
            dcp.save(entries, checkpoint_id=checkpoint)
    return {**rank, "rows": rows}


def main() -> None:
    """Run every case, and write what this process delivered."""
    arguments = json.loads(sys.argv[1])
    warnings.simplefilter("ignore", UnevenRanksWarning)
    dist.init_process_group("gloo")
    writers = dist.new_group(backend="gloo")  # of async_save's own thread
    report = {case["name"]: run_case(arguments, case, writers) for case in arguments["cases"]}
    Path(f"{arguments['report']}-{dist.get_rank()}").write_text(json.dumps(report))
    leave_group()


if __name__ == "__main__":
    main()
