"""In two ranks, under Accelerate: skip steps, restore them after a pass that ends together, and save before an end.

Its argument, JSON: ``data``; ``directory``, of the checkpoint and the reports; ``from_value``, of a filter that leaves
the ranks different numbers of batches. A report has the rows of each pass of this rank, and the epochs before them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
from accelerate import Accelerator

from torch_dataloader_utils import StructuredDataset
from torch_dataloader_utils.integrations.accelerate import PreparedLoader, prepare_loader


def prepared(accelerator: Accelerator, data: str, filters: Any = None) -> PreparedLoader:
    """Return this rank's loader."""
    loader, _ = StructuredDataset.create_dataloader(
        data, batch_size=8, row_id_column="row", num_workers=0, filters=filters, uneven_ranks="allow"
    )
    return prepare_loader(accelerator, loader)


def restored(loader: PreparedLoader) -> dict[str, Any]:
    """Return the epochs and rows of the passes of an epoch whose skipped steps are restored after its end."""
    loader.loader.skip_steps(1, 3)
    epochs, passes = [], []
    while loader.epoch < 1:
        epochs.append(loader.epoch)
        passes.append([row for batch in loader for row in batch["row"].tolist()])
        loader.loader.restore_skipped()
    return {"epochs": epochs, "passes": passes}


def main() -> None:
    """Deliver, and report."""
    arguments = json.loads(sys.argv[1])
    directory = Path(arguments["directory"])
    accelerator = Accelerator(cpu=True)
    report = restored(prepared(accelerator, arguments["data"], pc.field("value") >= arguments["from_value"]))
    accelerator._custom_objects.clear()
    loader = prepared(accelerator, arguments["data"])
    shorter, before, after = arguments["shorter"], [], []
    for number, batch in enumerate(loader, 1):
        before += batch["row"].tolist()
        if number == shorter:
            accelerator.save_state(str(directory / "checkpoint"))
            break
    accelerator.wait_for_everyone()  # of what is registered the first process alone writes
    accelerator.load_state(str(directory / "checkpoint"))
    if loader.epoch == 0:
        after = [row for batch in loader for row in batch["row"].tolist()]
    report |= {"before": before, "after": after}
    (directory / f"report-{accelerator.process_index}.json").write_text(json.dumps(report))
    accelerator.end_training()


if __name__ == "__main__":
    main()
