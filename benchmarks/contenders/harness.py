"""What every contender shares: its job, the clock, and the one line of JSON that it prints.

A contender is a script of its own, run in a fresh process by the interpreter of its own environment; so this module
needs the standard library only. ``python loader.py FILE`` takes a job from a file: see `Job`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Job", "deliver", "own_memory", "read_job", "report"]

MARK = "RESULT "


@dataclass(frozen=True)
class Job:
    """What a contender is to do.

    Attributes:
        path: The directory, or URL, that holds the data.
        files: Its files.
        batch_size: Rows in a batch.
        workers: Worker processes; 0 reads in the process itself.
        columns: Columns to read; None for all.
        verify: The column whose sum proves that each row came; None counts rows only, as in runs that are timed.
        limit_s: Seconds of steady state after which a contender stops; what it delivered until then is its rate.
        max_rows: Rows after which it stops likewise.
        s3: Endpoint and credentials; None for local files.
        scratch: Where it may write, to convert data for example.
        options: What only this contender understands.
    """

    path: str
    files: list[str]
    batch_size: int
    workers: int = 0
    columns: list[str] | None = None
    verify: str | None = None
    limit_s: float = 1e9
    max_rows: int | None = None
    s3: dict[str, str] | None = None
    scratch: str = ""
    options: dict[str, Any] = field(default_factory=dict)


def read_job() -> Job:
    """Return the job in the file that the command line names."""
    return Job(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))


def report(**figures: Any) -> None:
    """Print the result: the last line that the parent reads."""
    sys.stdout.write(f"\n{MARK}{json.dumps(figures)}\n")
    sys.stdout.flush()


def own_memory() -> dict[str, int]:
    """Return the memory of this process now, in bytes: with its imports done and nothing read, the bare import."""
    figures = {}
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]:
        name, value, *_ = line.split()
        figures[name] = int(value) * 1024
    return {"import_pss": figures["Pss:"], "import_anonymous": figures["Pss_Anon:"] + figures["Pss_Shmem:"]}


def deliver(
    job: Job,
    build: Callable[[], Iterable[Any]],
    rows_of: Callable[[Any], int],
    sum_of: Callable[[Any, str], int],
    kind_of: Callable[[Any], str] = lambda batch: type(batch).__name__,
) -> None:
    """Construct, iterate over one epoch, and report.

    Args:
        job: The job.
        build: Constructs what is iterated over.
        rows_of: Counts the rows of a batch.
        sum_of: Adds up a column of a batch; called only where the job says to verify.
        kind_of: Says what a batch is, likewise.
    """
    memory = own_memory()
    kind = None
    checksum = 0
    began = time.perf_counter()
    batches = build()
    built = time.perf_counter()
    iterator = iter(batches)
    batch = next(iterator)
    first = time.perf_counter()
    first_rows = rows_of(batch)
    rows, complete = 0, True
    deadline = first + job.limit_s
    most = float("inf") if job.max_rows is None else job.max_rows - first_rows
    if job.verify:
        kind, checksum = kind_of(batch), sum_of(batch, job.verify)
    for batch in iterator:
        rows += rows_of(batch)
        if job.verify:
            checksum += sum_of(batch, job.verify)
        if time.perf_counter() > deadline or rows >= most:
            complete = False
            break
    ended = time.perf_counter()
    report(
        construction_s=built - began,
        first_batch_s=first - began,
        steady_s=ended - first,
        steady_rows=rows,
        whole_s=ended - began,
        rows=first_rows + rows,
        complete=complete,
        checksum=checksum if job.verify else None,
        kind=kind,
        **memory,
    )
