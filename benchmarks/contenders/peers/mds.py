"""MosaicML Streaming: the rows are converted to its MDS format first, then read back from the local disk."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from batches import kind_of, rows_of, sum_of
from harness import Job, deliver, read_job, report
from torchvision_stand_in import stand_in_for_torchvision

stand_in_for_torchvision()
from streaming import MDSWriter, StreamingDataset  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

ENCODINGS = {"float": "float32", "double": "float64", "int64": "int64", "int32": "int32", "string": "str"}


def convert(job: Job) -> int:
    """Write the first rows as MDS, uncompressed, and return how many."""
    shutil.rmtree(job.scratch, ignore_errors=True)
    schema = pq.read_schema(job.files[0])
    columns = {
        column.name: f"ndarray:{column.type.value_type}:{column.type.list_size}"
        if pa.types.is_fixed_size_list(column.type)
        else ENCODINGS[str(column.type)]
        for column in schema
    }
    rows = 0
    with MDSWriter(out=job.scratch, columns=columns, compression=None, hashes=None) as writer:
        for path in job.files:
            for batch in pq.ParquetFile(path).iter_batches(1024):
                for row in rows_as_arrays(batch):
                    writer.write(row)
                    rows += 1
                    if job.max_rows is not None and rows >= job.max_rows:
                        return rows
    return rows


def rows_as_arrays(batch: pa.RecordBatch) -> Any:
    """Return the rows of a batch as MDS takes them."""
    arrays = {}
    for name in batch.schema.names:
        column = batch.column(name)
        flat = column.flatten() if pa.types.is_fixed_size_list(column.type) else column
        values = flat.to_numpy(zero_copy_only=False)
        arrays[name] = values.reshape(len(column), -1) if flat is not column else values
    return (dict(zip(arrays, row, strict=True)) for row in zip(*arrays.values(), strict=True))


def loader_of(job: Job) -> Any:
    """Make the loader."""
    dataset = StreamingDataset(
        local=job.scratch,
        shuffle="shuffle_buffer" in job.options,
        batch_size=job.batch_size,  # as its documentation says: the loader's, by which it divides the rows
    )
    return DataLoader(dataset, batch_size=job.batch_size, num_workers=job.workers)


if __name__ == "__main__":
    job = read_job()
    if job.options.get("convert"):
        began = time.perf_counter()
        done = convert(job)
        size = sum(path.stat().st_size for path in Path(job.scratch).iterdir())
        report(convert_s=time.perf_counter() - began, rows=done, bytes=size, complete=False)
    else:
        deliver(job, lambda: loader_of(job), rows_of, sum_of, kind_of)
