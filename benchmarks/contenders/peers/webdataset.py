"""WebDataset: tar files of which each sample holds as many rows as a batch, so that none is collated row by row."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import webdataset as wds
from batches import kind_of, rows_of, sum_of
from harness import Job, deliver, read_job, report


def columns_of(sample: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of a sample."""
    columns = dict(sample["npz"])
    return {
        name: values.tolist() if values.dtype.kind == "U" else torch.from_numpy(values)
        for name, values in columns.items()
    }


def loader_of(job: Job) -> Any:
    """Make the loader."""
    shards = sorted(map(str, Path(job.scratch).glob("*.tar")))
    dataset = wds.WebDataset(shards, shardshuffle=False, workersplitter=wds.split_by_worker).decode()
    return wds.WebLoader(dataset.map(columns_of), batch_size=None, num_workers=job.workers)


def write(job: Job) -> int:
    """Write a tar file for each file, and return the number of rows."""
    rows = 0
    for path in map(Path, job.files):
        with wds.TarWriter(str(Path(job.scratch, f"{path.stem}.tar"))) as writer:
            for number, batch in enumerate(pq.ParquetFile(path).iter_batches(job.batch_size)):
                columns = {name: array_of(batch.column(name)) for name in batch.schema.names}
                writer.write({"__key__": f"{path.stem}-{number:06d}", "npz": columns})
                rows += len(batch)
    return rows


def array_of(column: pa.Array) -> Any:
    """Return a column as an array, of fixed-size strings if it has strings."""
    if pa.types.is_fixed_size_list(column.type):
        return column.flatten().to_numpy().reshape(len(column), -1)
    values = column.to_numpy(zero_copy_only=False)
    return values.astype(np.str_) if pa.types.is_string(column.type) else values


if __name__ == "__main__":
    job = read_job()
    if job.options.get("convert"):
        shutil.rmtree(job.scratch, ignore_errors=True)
        Path(job.scratch).mkdir(parents=True)
        began = time.perf_counter()
        done = write(job)
        size = sum(path.stat().st_size for path in Path(job.scratch).iterdir())
        report(convert_s=time.perf_counter() - began, rows=done, bytes=size, complete=False)
    else:
        deliver(job, lambda: loader_of(job), rows_of, sum_of, kind_of)
