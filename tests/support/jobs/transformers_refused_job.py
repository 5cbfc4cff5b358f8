"""On two ranks, under Transformers' Trainer: what would lose rows, and what its errors say.

Its argument, JSON: ``data`` and ``directory``, where rank 0 writes the messages.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs.transformers_job import Model, arguments_of, make_loader
from torch import distributed as dist
from transformers import Trainer

from torch_dataloader_utils import StructuredDataset
from torch_dataloader_utils.integrations.transformers import STATES_NAME, ResumableTrainerMixin


class Plain(Trainer):
    """A Trainer that is given the loader without the mixin."""

    def __init__(self, loader: Any, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.loader = loader

    def get_train_dataloader(self) -> Any:
        """Return the loader."""
        return self.loader


class Resumable(ResumableTrainerMixin, Trainer):
    """A Trainer with the mixin."""


def message_of(call: Callable[[], Any]) -> str:
    """Return the error that a call raises."""
    try:
        call()
    except (TypeError, ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def main() -> None:
    """Do what is refused."""
    warnings.simplefilter("ignore")
    job = json.loads(sys.argv[1])
    options, directory = {"saves": 4, "max_steps": 5, "accumulated": 1}, Path(job["directory"])
    arguments = arguments_of(options, directory)
    last = directory / "checkpoints" / "checkpoint-4"
    loader = make_loader(job["data"], options)
    alone, _ = StructuredDataset.create_dataloader(job["data"], num_workers=0, num_ranks=1, rank=0)

    def resumable(**changes: Any) -> Resumable:
        return Resumable(**{"model": Model(), "args": arguments, "train_dataloader": loader, **changes})

    messages = {
        "a dataset": message_of(Trainer(Model(), arguments, train_dataset=loader.dataset).train),
        "another number of ranks": message_of(lambda: resumable(train_dataloader=alone)),
        "no loader of this package": message_of(lambda: resumable(train_dataloader=[1])),
        "a dataset, too": message_of(lambda: resumable(train_dataset=loader.dataset)),
    }
    Plain(loader, model=Model(), args=arguments).train()
    plain = Plain(loader, model=Model(), args=arguments)
    messages["a skip"] = message_of(lambda: plain.train(resume_from_checkpoint=str(last)))
    messages["no states"] = message_of(lambda: resumable().train(resume_from_checkpoint=str(last)))
    dist.barrier()
    if arguments.process_index == 0:
        (last / STATES_NAME).write_bytes(b"PK no zip")
    dist.barrier()
    messages["damaged states"] = message_of(lambda: resumable().train(resume_from_checkpoint=str(last)))
    arguments.auto_find_batch_size = True
    messages["another batch size"] = message_of(resumable)
    (directory / f"messages-{os.environ['RANK']}.json").write_text(json.dumps(messages))


if __name__ == "__main__":
    main()
