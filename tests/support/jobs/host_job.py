"""Under torchrun on one host or two: make steps that all ranks have to make, with a checkpoint now and then.

Its argument, JSON: ``data``; ``directory``, which all hosts see; ``run``, a name for the ledgers; ``load``, whether to
go on from the checkpoint, elastically; ``pause_sec`` of a step.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from jobs.groups import leave_group

from torch_dataloader_utils import StructuredDataset, UnevenRanksWarning
from torch_dataloader_utils.distributed import gather_states

CHECKPOINT_EVERY = 5


def main() -> None:
    """Make the steps; a ledger of each rank holds the step and the rows of each of its batches."""
    arguments = json.loads(sys.argv[1])
    directory = Path(arguments["directory"])
    warnings.simplefilter("ignore", UnevenRanksWarning)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    loader, _ = StructuredDataset.create_dataloader(
        arguments["data"],
        batch_size=8,
        row_id_column="row",
        shuffle=True,
        shuffle_buffer_size=60,
        uneven_ranks="pad",
        num_workers=1,
    )
    checkpoint = directory / "checkpoint.pt"
    if arguments["load"]:
        loader.load_state_dict(torch.load(checkpoint, weights_only=True)["loaders"], strict=False)
    with (directory / f"{arguments['run']}-{dist.get_rank()}.jsonl").open("w") as ledger:
        for step, batch in enumerate(loader, start=1):
            total = batch["row"].sum()
            dist.all_reduce(total)
            ledger.write(json.dumps([step, batch["row"].tolist()]) + "\n")
            ledger.flush()
            time.sleep(arguments["pause_sec"])
            if step % CHECKPOINT_EVERY == 0:
                states = gather_states(loader)
                if dist.get_rank() == 0:
                    torch.save({"loaders": states, "step": step}, checkpoint.with_suffix(".new"))
                    checkpoint.with_suffix(".new").replace(checkpoint)
    dist.barrier()
    leave_group()


if __name__ == "__main__":
    main()
