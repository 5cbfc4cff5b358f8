"""Arrow's own reader of another format than Parquet: file by file, with all of its threads."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.json as pa_json
from baselines.raw_arrow import sum_of
from harness import Job, deliver, read_job
from pyarrow import csv, orc


def tables(job: Job) -> Iterator[pa.Table]:
    """Read a table of each file, of ORC of each stripe."""
    for path in job.files:
        if path.endswith(".orc"):
            file = orc.ORCFile(path)
            for number in range(file.nstripes):
                yield pa.Table.from_batches([file.read_stripe(number)])
        else:
            yield csv.read_csv(path) if path.endswith(".csv") else pa_json.read_json(path)


if __name__ == "__main__":
    job = read_job()
    deliver(job, lambda: tables(job), lambda table: table.num_rows, sum_of)
