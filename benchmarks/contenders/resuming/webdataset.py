"""WebDataset: tar files that are made of the rows, in its WebLoader. It has no state."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import webdataset as wds

from benchmarks.contenders.resuming.job import Job, Skipping, files

GROUP_ROWS = 600
"""Rows of a sample. A sample for each row would be a file in a tar for 16 numbers."""


def batches_of(job: Job) -> Iterator[Any]:
    """Yield batches: each sample has rows of one or of several."""
    dataset = wds.WebDataset(
        sorted(map(str, Path(job.data, "tar").glob("*.tar"))),
        shardshuffle=False,
        nodesplitter=wds.split_by_node,
        workersplitter=wds.split_by_worker,
        empty_check=False,  # a worker may have no tar file
    )
    for sample in wds.WebLoader(dataset.decode().map(columns_of), batch_size=None, num_workers=job.workers):
        yield from np.split(sample["row"], range(job.batch_size, len(sample["row"]), job.batch_size))


def columns_of(sample: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of a sample."""
    return dict(sample["npz"])


def make(job: Job) -> Skipping:
    """Make the reader."""
    return Skipping(job, batches_of(job))


def convert(job: Job) -> None:
    """Write a tar file for each file."""
    out = Path(job.data, "tar")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    for path in map(Path, files(job)):
        with wds.TarWriter(str(out / f"{path.stem}.tar")) as writer:
            for number, batch in enumerate(pq.ParquetFile(path).iter_batches(GROUP_ROWS)):
                columns = {name: batch[name].to_numpy() for name in batch.schema.names}
                writer.write({"__key__": f"{path.stem}-{number:06d}", "npz": columns})
