"""MosaicML Streaming: a StreamingDataset of two Streams with proportions, in a StreamingDataLoader."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.contenders.mixtures.job import SEED, Job, directories, files
from benchmarks.contenders.torchvision_stand_in import stand_in_for_torchvision

stand_in_for_torchvision()
from streaming import MDSWriter, Stream, StreamingDataLoader, StreamingDataset  # noqa: E402
from streaming.base.util import clean_stale_shared_memory  # noqa: E402


class Streams:
    """The loader; its state is the same for all ranks, and the first one's is loaded."""

    def __init__(self, job: Job) -> None:
        clean_stale_shared_memory()  # of the run that was killed
        streams = [
            Stream(local=str(Path(path, "mds")), proportion=weight)
            for path, weight in zip(directories(job).values(), job.weights, strict=True)
        ]
        dataset = StreamingDataset(streams=streams, batch_size=job.batch_size, shuffle=True, shuffle_seed=SEED)
        self._loader = StreamingDataLoader(dataset, batch_size=job.batch_size, num_workers=job.workers)

    def batches(self) -> Iterator[tuple[Any, Any]]:
        """Yield batches."""
        for batch in self._loader:
            yield batch["source"], batch["row"]

    def state(self) -> Any:
        """Return the loader's state."""
        return self._loader.state_dict()

    def load(self, states: list[Any]) -> None:
        """Load the first rank's state."""
        self._loader.load_state_dict(states[0])


def make(job: Job) -> Streams:
    """Make the mixture."""
    return Streams(job)


def convert(job: Job) -> None:
    """Write each source as MDS next to its files."""
    paths = files(job)
    for name, directory in directories(job).items():
        out = Path(directory, "mds")
        shutil.rmtree(out, ignore_errors=True)
        with MDSWriter(out=str(out), columns={"source": "int64", "row": "int64"}, size_limit=1 << 14) as writer:
            for row in pq.ParquetDataset(paths[name]).read(columns=["source", "row"]).to_pylist():
                writer.write(row)
