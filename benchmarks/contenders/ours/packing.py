"""This library's loader of documents: as jagged batches, or packed into sequences; counted are tokens."""

from __future__ import annotations

from typing import Any

import torch
from harness import Job, deliver, read_job

from torch_dataloader_utils import Packing, StructuredDataset

LENGTH = 4096
SEPARATOR = 0
"""It adds nothing to the sum by which tokens are verified."""


def loader_of(job: Job) -> Any:
    """Make the loader. The option `outputs` says what is delivered beside sequences; without it, none are made."""
    options = dict(job.options)
    outputs = options.pop("outputs", None)
    strategy = options.pop("strategy", "concat")
    if outputs is not None:
        options["packing"] = Packing("tokens", LENGTH, separator=SEPARATOR, outputs=tuple(outputs), strategy=strategy)
    loader, _ = StructuredDataset.create_dataloader(
        job.path, batch_size=job.batch_size, num_workers=job.workers, **options
    )
    return loader


def values_of(batch: Any) -> Any:
    """Return the tokens of a batch; those of sequences have separators, and the padding of the last ones."""
    tokens = batch["tokens"]
    return tokens.values() if tokens.is_nested else tokens


def kind_of(batch: Any) -> str:
    """Describe a batch."""
    return ", ".join(f"{name}: {type(values).__name__}" for name, values in batch.items())


if __name__ == "__main__":
    job = read_job()
    torch.nested.nested_tensor([torch.zeros(1)], layout=torch.jagged)  # it imports modules, which is no reading
    deliver(
        job,
        lambda: loader_of(job),
        lambda batch: values_of(batch).numel(),
        lambda batch, _: int(values_of(batch).sum()),
        kind_of,
    )
