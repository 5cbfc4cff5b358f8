"""Under Accelerate with tensor parallelism: an epoch, and its rest again from a checkpoint in its midst.

Its argument, JSON: ``data``; ``directory``, of checkpoint and reports; ``sizes``, of the dimensions of the mesh.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import ParallelismConfig

from torch_dataloader_utils import StructuredDataset
from torch_dataloader_utils.integrations.accelerate import prepare_loader

STEPS = 5
"""Before the checkpoint."""


class OnCpus(ParallelismConfig):
    """A configuration that Accelerate accepts without accelerators, too: no model is divided here."""

    def _validate_accelerator(self, accelerator: Accelerator) -> None:
        """Accept it."""


def main() -> None:
    """Deliver the epoch, and report."""
    arguments = json.loads(sys.argv[1])
    checkpoint = str(Path(arguments["directory"]) / "checkpoint")
    accelerator = Accelerator(cpu=True, parallelism_config=OnCpus(**arguments["sizes"]))
    names = tuple(accelerator.parallelism_config.dp_dim_names)
    mine = {"mesh": accelerator.torch_device_mesh[names]} if names else {"num_ranks": 1, "rank": 0}

    def open_loader(**options: Any) -> Any:
        shuffled = {"shuffle": True, "shuffle_buffer_size": 60, "uneven_ranks": "drop"}
        loader, _ = StructuredDataset.create_dataloader(
            arguments["data"], batch_size=8, num_workers=0, row_id_column="row", **shuffled, **options
        )
        return loader

    try:
        prepare_loader(accelerator, open_loader())
        refusal = None
    except ValueError as error:
        refusal = str(error)
    prepared = prepare_loader(accelerator, open_loader(**mine))
    batches = []
    for number, batch in enumerate(prepared, start=1):
        batches.append(batch["row"].tolist())
        if number == STEPS:
            accelerator.save_state(checkpoint)
    accelerator.wait_for_everyone()  # until it is written
    accelerator.load_state(checkpoint)
    again = [batch["row"].tolist() for batch in prepared]
    prepared.dataset.set_epoch(1)  # as in a loop without Accelerate
    report = {"batches": batches, "again": again, "refusal": refusal, "epoch": prepared.epoch}
    path = Path(arguments["directory"]) / f"report-{accelerator.process_index}.json"
    path.write_text(json.dumps(report))
    accelerator.end_training()


if __name__ == "__main__":
    main()
