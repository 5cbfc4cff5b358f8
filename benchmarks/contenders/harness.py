"""What all contenders share: the job, the clock, and the line of JSON with the figures.

A contender is a script that runs in a new process, in the interpreter of its own environment, so this module imports
the standard library only. ``python -P loader.py FILE`` reads the job from a file: see `Job`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Job", "deliver", "memory_of", "own_memory", "read_job", "report"]

MARK = "RESULT "


@dataclass(frozen=True)
class Job:
    """What a contender has to read, and how.

    Attributes:
        path: The directory or URL of the data.
        files: Its files.
        batch_size: Rows in a batch.
        workers: Worker processes; 0 reads in the process itself.
        columns: Columns to read; None for all.
        verify: The column to add up, which shows that each row was delivered once; None to count rows only.
        limit_s: Seconds after the first batch at which a contender stops; its rate is that of the rows until then.
        max_rows: Rows after which a contender stops.
        reads_twice: Whether a second epoch is read by the same loader, unless a column is verified.
        s3: Endpoint and credentials; None for local files.
        scratch: A directory to write to, for example converted data.
        options: Options of this contender alone.
    """

    path: str
    files: list[str]
    batch_size: int
    workers: int = 0
    columns: list[str] | None = None
    verify: str | None = None
    limit_s: float = 1e9
    max_rows: int | None = None
    reads_twice: bool = False
    s3: dict[str, str] | None = None
    scratch: str = ""
    options: dict[str, Any] = field(default_factory=dict)


def read_job() -> Job:
    """Return the job in the file that the command line names."""
    return Job(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))


def report(**figures: Any) -> None:
    """Print the figures as the line that the parent reads, with the file of the package that was measured."""
    figures["package"] = getattr(sys.modules.get("torch_dataloader_utils"), "__file__", None)
    sys.stdout.write(f"\n{MARK}{json.dumps(figures)}\n")
    sys.stdout.flush()


def memory_of(pid: int | str) -> tuple[int, int]:
    """Return the bytes of memory of a process, all of it (PSS) and without pages of files.

    Raises:
        OSError: If the process has ended.
    """
    figures = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]:
        name, value, *_ = line.split()
        figures[name] = int(value) * 1024
    return figures["Pss:"], figures["Pss_Anon:"] + figures["Pss_Shmem:"]


def own_memory() -> dict[str, int]:
    """Return the memory of this process in bytes. Called after the imports, it is the bare import's."""
    pss, anonymous = memory_of("self")
    return {"import_pss": pss, "import_anonymous": anonymous}


def deliver(
    job: Job,
    build: Callable[[], Iterable[Any]],
    rows_of: Callable[[Any], int],
    sum_of: Callable[[Any, str], int],
    kind_of: Callable[[Any], str] = lambda batch: type(batch).__name__,
) -> None:
    """Construct a loader, iterate over one epoch, or two, and report the figures.

    Args:
        job: The job.
        build: Constructs the loader, which can be iterated over once for each epoch that the job reads.
        rows_of: Counts the rows of a batch.
        sum_of: Adds up a column of a batch; called only if the job has a column to verify.
        kind_of: Describes the type of a batch; called only then, too.
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
    if job.reads_twice and not job.verify:
        batch = None
        second_rows = sum(map(rows_of, batches))
        second_s = time.perf_counter() - ended
        second = {"second_s": second_s, "second_rate": second_rows / second_s, "second_rows": second_rows}
    else:
        second = {}
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
        **second,
        **memory,
    )
