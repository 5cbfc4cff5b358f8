"""Raw Arrow: each row group of each memory-mapped file is decoded, and nothing is done with it."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from harness import Job, deliver, read_job


def row_groups(job: Job) -> Iterator[pa.Table]:
    """Decode row group by row group, with Arrow's own threads."""
    for path in job.files:
        file = pq.ParquetFile(path, memory_map=True)
        for number in range(file.num_row_groups):
            yield file.read_row_group(number, columns=job.columns)


def sum_of(table: pa.Table, column: str) -> int:
    """Add up a column; lists of numbers by their elements."""
    values = table.column(column)
    if pa.types.is_fixed_size_list(values.type):
        values = pc.list_flatten(values)
    return int(pc.sum(pc.cast(values, pa.int64())).as_py())


if __name__ == "__main__":
    job = read_job()
    deliver(job, lambda: row_groups(job), lambda table: table.num_rows, sum_of)
