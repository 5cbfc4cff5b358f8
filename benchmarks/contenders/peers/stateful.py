"""torchdata's StatefulDataLoader over an IterableDataset of pyarrow's iter_batches, as a user would write it."""

from __future__ import annotations

from batches import kind_of, rows_of, sum_of
from harness import deliver, read_job
from row_groups import RowGroups
from torchdata.stateful_dataloader import StatefulDataLoader

if __name__ == "__main__":
    job = read_job()
    deliver(
        job,
        lambda: StatefulDataLoader(
            RowGroups(job),
            batch_size=None,  # batches come ready made: no collation of single rows
            num_workers=job.workers,
            snapshot_every_n_steps=1000,  # a state travels with every 1,000th batch instead of with each
            multiprocessing_context="forkserver" if job.workers and job.s3 else None,  # Arrow's S3 survives no fork
        ),
        rows_of,
        sum_of,
        kind_of,
    )
