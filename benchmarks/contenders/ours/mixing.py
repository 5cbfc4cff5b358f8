"""This library's loader over files sorted by label: the rate and, in a run that is not timed, how well rows mix."""

from __future__ import annotations

import time

import numpy as np
from harness import own_memory, read_job, report
from ours.loader import loader_of

LABELS = 50


def chi_square(labels: list[np.ndarray], size: int) -> float:
    """Return chi-square per degree of freedom of the labels of full batches: 1 for a full shuffle."""
    counts = np.stack([np.bincount(batch, minlength=LABELS) for batch in labels if len(batch) == size])
    expected = size / LABELS
    return float((((counts - expected) ** 2) / expected).sum(axis=1).mean() / (LABELS - 1))


if __name__ == "__main__":
    job = read_job()
    memory = own_memory()
    verifies = bool(job.verify)
    labels = []
    rows = checksum = 0
    began = time.perf_counter()
    batches = iter(loader_of(job))
    batch = next(batches)
    first = time.perf_counter()
    first_rows = len(batch["id"])
    while batch is not None:
        rows += len(batch["id"])
        if verifies:
            checksum += int(batch["id"].sum())
            labels.append(batch["label"].numpy().copy())
        batch = next(batches, None)
    ended = time.perf_counter()
    report(
        first_batch_s=first - began,
        steady_s=ended - first,
        steady_rows=rows - first_rows,
        whole_s=ended - began,
        rows=rows,
        complete=True,
        checksum=checksum if verifies else None,
        kind=None,
        chi_square=chi_square(labels, job.batch_size) if verifies else None,
        **memory,
    )
