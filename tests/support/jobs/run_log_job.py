"""Ranks that train with a run log: each writes the rows of its steps, all save states, and one may kill the job.

Its argument, JSON: ``data``; ``directory``, where steps, states and the log are; ``run``, the run's number; ``options``
of the loader; ``epochs``; ``every``, after how many steps states are saved; ``die``, after how many steps of this run
rank 0 kills itself, or null.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from pathlib import Path

import torch.distributed as dist
from jobs.groups import leave_group

from torch_dataloader_utils import StructuredDataset, UnevenRanksWarning
from torch_dataloader_utils.distributed import gather_states, load_gathered


def main() -> None:
    """Train from the last states on."""
    given = json.loads(sys.argv[1])
    warnings.simplefilter("ignore", UnevenRanksWarning)
    dist.init_process_group("gloo")
    directory = Path(given["directory"])
    saved = directory / "states.json"
    options = {"row_id_column": "row", "run_log": directory / "log", **given["options"]}
    loader, dataset = StructuredDataset.create_dataloader(given["data"], **options)
    if saved.exists():
        load_gathered(loader, json.loads(saved.read_text()))
    taken = 0
    with (directory / f"steps-{given['run']}-{dist.get_rank()}.jsonl").open("w") as steps:
        for epoch in range(dataset.epoch, given["epochs"]):
            loader.set_epoch(epoch)
            step = loader.state_dict()["batches_delivered"]
            for batch in loader:
                steps.write(json.dumps([epoch, step, batch["row"].tolist()]) + "\n")
                steps.flush()
                step, taken = step + 1, taken + 1
                if taken % given["every"] == 0:
                    states = gather_states(loader)
                    if dist.get_rank() == 0:
                        new = saved.with_suffix(".new")
                        new.write_text(json.dumps(states))
                        new.replace(saved)
                if taken == given["die"] and dist.get_rank() == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
    leave_group()


if __name__ == "__main__":
    main()
