"""MosaicML Streaming: a StreamingDataset of MDS shards on the local disk, in its StreamingDataLoader."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.contenders.resuming.job import SEED, Job, files
from benchmarks.contenders.torchvision_stand_in import stand_in_for_torchvision

stand_in_for_torchvision()
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402
from streaming.base.util import clean_stale_shared_memory  # noqa: E402


class Shards:
    """The loader; its state is the same for all ranks, and the first one's is loaded."""

    def __init__(self, job: Job) -> None:
        clean_stale_shared_memory()  # of the run that was killed
        dataset = StreamingDataset(
            local=str(Path(job.data, "mds")), batch_size=job.batch_size, shuffle=bool(job.way), shuffle_seed=SEED
        )
        self._loader = StreamingDataLoader(dataset, batch_size=job.batch_size, num_workers=job.workers)

    def batches(self) -> Iterator[Any]:
        """Yield batches."""
        for batch in self._loader:
            yield batch["row"]

    def state(self) -> Any:
        """Return the loader's state."""
        return self._loader.state_dict()

    def load(self, states: list[Any]) -> None:
        """Load the first rank's state."""
        self._loader.load_state_dict(states[0])


def make(job: Job) -> Shards:
    """Make the reader."""
    return Shards(job)


def convert(job: Job) -> None:
    """Write the rows as MDS next to the files, as many shards as there are files."""
    out = Path(job.data, "mds")
    shutil.rmtree(out, ignore_errors=True)
    names = pq.read_schema(files(job)[0]).names
    columns = {name: "int64" if name == "row" else "float32" for name in names}
    with MDSWriter(out=str(out), columns=columns, size_limit=1 << 22) as writer:
        for path in files(job):
            table = pq.read_table(path)
            for row in zip(*(table[name].to_numpy() for name in names), strict=True):
                writer.write(dict(zip(names, row, strict=True)))
