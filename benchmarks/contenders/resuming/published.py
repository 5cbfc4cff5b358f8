"""torch-dataloader-utils 0.2.0, the package that PyPI has, as its README there says: the dataset has the state."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import torch_dataloader_utils
from benchmarks.contenders.resuming.job import BUFFER_ROWS, SEED, Job, own_state
from torch_dataloader_utils import StructuredDataset

PACKAGE = "torch-dataloader-utils"
if "site-packages" not in str(torch_dataloader_utils.__file__):
    raise ImportError(f"{torch_dataloader_utils.__file__} is not the package {PACKAGE} {version(PACKAGE)}")


class Published:
    """The loader; the state of its dataset is saved and loaded by each rank."""

    def __init__(self, job: Job) -> None:
        self._job = job
        shuffle = {"shuffle": True, "shuffle_buffer_size": BUFFER_ROWS, "shuffle_seed": SEED} if job.way else {}
        self._loader, self._dataset = StructuredDataset.create_dataloader(
            path=job.data,
            format="parquet",
            batch_size=job.batch_size,
            num_workers=job.workers,
            output_format="torch",
            num_ranks=job.num_ranks,
            rank=job.rank,
            **shuffle,
        )

    def batches(self) -> Iterator[Any]:
        """Yield batches."""
        for batch in self._loader:
            yield batch["row"]

    def state(self) -> Any:
        """Return the dataset's state."""
        return self._dataset.state_dict()

    def load(self, states: list[Any]) -> None:
        """Load this rank's state; a rank that has none begins its epoch."""
        state = own_state(self._job, states)
        if state is not None:
            self._dataset.load_state_dict(state)


def make(job: Job) -> Published:
    """Make the reader."""
    return Published(job)
