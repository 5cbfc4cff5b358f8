"""Lance: the rows are converted to its format first, then read by its own dataset for torch."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pyarrow.dataset as pads
import torch
from batches import kind_of, rows_of, sum_of
from harness import Job, deliver, read_job, report
from lance.torch.data import LanceDataset
from torch.utils.data import DataLoader


def loader_of(job: Job) -> Any:
    """Make the loader."""
    dataset = LanceDataset(
        job.scratch,
        batch_size=job.batch_size,
        columns=job.columns,
        batch_readahead=16,  # decode ahead, in threads of its own
        **({"to_tensor_fn": values_of} if "strings" in job.path else {}),  # its own takes numbers only
    )
    if job.workers == 0:
        return dataset
    return DataLoader(
        dataset,
        batch_size=None,  # batches come ready made
        num_workers=job.workers,
        multiprocessing_context="spawn",  # its threads survive no fork
    )


def values_of(batch: pa.RecordBatch, **_options: Any) -> dict[str, Any]:
    """Convert a batch: strings to lists."""
    return {
        name: column.to_pylist() if pa.types.is_string(column.type) else torch.from_numpy(column.to_numpy())
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }


if __name__ == "__main__":
    job = read_job()
    if job.options.get("convert"):
        shutil.rmtree(job.scratch, ignore_errors=True)
        began = time.perf_counter()
        source = pads.dataset(job.files)
        rows = source.count_rows()
        written = lance.write_dataset(
            source.scanner(batch_size=65536).to_reader(),
            job.scratch,
            max_rows_per_file=rows // len(job.files),  # as many fragments as there are files, to share among workers
        )
        size = sum(path.stat().st_size for path in Path(job.scratch).rglob("*") if path.is_file())
        report(convert_s=time.perf_counter() - began, rows=written.count_rows(), bytes=size, complete=False)
    else:
        deliver(job, lambda: loader_of(job), rows_of, sum_of, kind_of)
