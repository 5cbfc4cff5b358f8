"""In several ranks, under Accelerate: train two epochs, from the newest checkpoint, and die at a step if told to.

Its argument, JSON: ``data``; ``directory``, where the checkpoint is; ``workers``; ``die``, a step, or null; perhaps
``from_value``, of a filter, or ``excludes``, whether the first rank loses all rows of two steps. A checkpoint is
written every third step and at an epoch's end, with the rows that were trained.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import torch
import torch.distributed as dist
from accelerate import Accelerator, skip_first_batches

from torch_dataloader_utils import StructuredDataLoader, StructuredDataset, to_device
from torch_dataloader_utils.integrations.accelerate import PreparedLoader, prepare_loader

EPOCHS = 2
EVERY = 3
ACCUMULATED = 4


class Trained:
    """The rows that all ranks have trained, which Accelerate saves with the model."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.rows: list[tuple[int, int]] = []
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        """Return the rows of all ranks."""
        gathered: list[Any] = [self.rows]
        if self._accelerator.num_processes > 1:
            gathered *= self._accelerator.num_processes
            dist.all_gather_object(gathered, self.rows)
        return {"rows": [row for rank in gathered for row in rank]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give all rows to the first rank."""
        self.rows = state["rows"] if self._accelerator.is_main_process else []


def save(accelerator: Accelerator, directory: Path) -> None:
    """Save a checkpoint, in place of the one before."""
    accelerator.save_state(str(directory / "new"))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(directory / "newest", ignore_errors=True)
        (directory / "new").rename(directory / "newest")
    accelerator.wait_for_everyone()


def refuses_plain_prepare(accelerator: Accelerator, prepared: PreparedLoader) -> bool:
    """Whether a loader that Accelerate would deal out a second time is refused."""
    assert accelerator.prepare(prepared) is prepared
    try:
        accelerator.prepare(prepared.loader)
    except TypeError as error:
        return "prepare_loader" in str(error)
    return False


def refusal_of_a_skip(prepared: PreparedLoader) -> str:
    """Return what Accelerate's own way to resume says."""
    try:
        skip_first_batches(prepared, 3)
    except AttributeError as error:
        return str(error)
    return "nothing was raised"


def refusal_of_a_loader_on_a_device(accelerator: Accelerator, loader: StructuredDataLoader) -> str:
    """Return what a loader says that already moves its batches."""
    try:
        prepare_loader(accelerator, to_device(loader, "cpu"))
    except TypeError as error:
        return str(error)
    return "nothing was raised"


def main() -> None:
    """Train."""
    arguments = json.loads(sys.argv[1])
    directory = Path(arguments["directory"])
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    loader, dataset = StructuredDataset.create_dataloader(
        arguments["data"],
        batch_size=8,
        row_id_column="row",
        num_workers=arguments["workers"],
        shuffle=True,
        shuffle_buffer_size=60,
        filters=pc.field("value") >= arguments["from_value"] if "from_value" in arguments else None,
        uneven_ranks="allow" if "from_value" in arguments else "drop",
    )
    prepared = prepare_loader(accelerator, loader)
    if arguments.get("excludes"):
        loader.exclude([row for step in (1, 4) for row in dataset.rows_at(step, rank=0)])
    assert refuses_plain_prepare(accelerator, prepared)
    refusal = refusal_of_a_skip(prepared)
    assert "skip_first_batches" in refusal, refusal
    assert "accelerator.load_state" in refusal, refusal
    refusal = refusal_of_a_loader_on_a_device(accelerator, loader)
    assert "loader is DeviceLoader" in refusal, refusal
    assert "pass its attribute `loader`" in refusal, refusal
    trained = Trained(accelerator)
    accelerator.register_for_checkpointing(trained)
    if (directory / "newest").exists():
        accelerator.load_state(str(directory / "newest"))
    step = 0
    ends = []
    while prepared.epoch < EPOCHS:
        epoch = prepared.epoch
        for batch in prepared:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch["score"].float().unsqueeze(1)).mean())
                optimizer.step()
                optimizer.zero_grad()
            trained.rows += [(epoch, row) for row in batch["row"].tolist()]
            step += 1
            if step % EVERY == 0 or accelerator.gradient_state.end_of_dataloader:
                save(accelerator, directory)
            if step == arguments["die"]:
                os.kill(os.getpid(), signal.SIGKILL)
        ends.append(step)
        assert accelerator.sync_gradients, "the last accumulated gradients were not stepped"
    rows = trained.state_dict()["rows"]
    if accelerator.is_main_process:
        (directory / "trained.json").write_text(json.dumps(rows))
        (directory / "ends.json").write_text(json.dumps(ends))
    # Before the process group: a model that is freed after it may wait for gloo's threads without end.
    model, optimizer = accelerator.free_memory(model, optimizer)
    accelerator.end_training()


if __name__ == "__main__":
    main()
