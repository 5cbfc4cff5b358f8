"""What became of the rows under a fault: the oracle of the reliability tests, and the record they publish."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from jobs.processes import collect_garbage, own_children, ownerless, shared_memory, wait_until_none

END_SEC = 2.0
"""Within this time nothing may be left of what a case started."""

ARENAS = "/dev/shm/pym-"  # noqa: S108 - looked at, not written to
"""Where multiprocessing keeps the values that processes share: it keeps the memory of the first for the next one."""

Row = tuple[int, str]
"""A row's id, and a hash of all its values."""


def rows_in(batch: Mapping[str, Any], id_column: str = "row") -> list[Row]:
    """Return the ids of a batch's rows with a hash of what their other columns hold, in the batch's order."""
    names = sorted(name for name in batch if name != id_column)
    columns = [_values(batch[name]) for name in names]
    values = zip(*columns, strict=True) if columns else ((),) * len(batch[id_column])
    hashes = (hashlib.blake2b(repr(row).encode(), digest_size=8).hexdigest() for row in values)
    return list(zip(map(int, _values(batch[id_column])), hashes, strict=True))


def _values(column: Any) -> list[Any]:
    return list(column.tolist() if hasattr(column, "tolist") else column)


@dataclass
class Outcome:
    """What became of one case of a fault.

    Attributes:
        fault: The row of the published table.
        case: What was done, in plain words.
        loader: Whose loader it was.
        lost: Rows that were never committed, though they should have been.
        repeated: Rows that were committed more than once.
        corrupted: Rows that were committed with other values than the files hold, or that the files do not hold.
        error: The error that ended it, if one did: its type and message.
        seconds: From the fault to the recovery or to the error, where that is measured.
        faults: How many faults were made in this case.
        left: What was left behind after `END_SEC`: processes, threads, descriptors, files in shared memory.
        in_order: Whether rows came in the order of an uninterrupted epoch; None where that was not compared.
    """

    fault: str
    case: str
    loader: str = "torch_dataloader_utils"
    lost: int = 0
    repeated: int = 0
    corrupted: int = 0
    error: str | None = None
    seconds: float | None = None
    faults: int = 1
    left: dict[str, int] = field(default_factory=dict)
    in_order: bool | None = None

    def compare(self, expected: Iterable[Row], committed: Iterable[Row]) -> None:
        """Count the rows that were lost, repeated and corrupted."""
        contents = dict(expected)
        rows = list(committed)
        counts = Counter(row for row, _ in rows)
        self.lost += len(contents.keys() - counts.keys())
        self.repeated += counts.total() - len(counts)
        self.corrupted += sum(contents.get(row) != content for row, content in rows)

    def failed(self, error: BaseException) -> None:
        """Note the error that ended the case."""
        self.error = f"{type(error).__name__}: {str(error)[:300]}"

    def add_left(self, counts: Mapping[str, int]) -> None:
        """Add to what was left behind."""
        for what, count in counts.items():
            if count:
                self.left[what] = self.left.get(what, 0) + count

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Measure the seconds to the recovery or to the error, which is raised further."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds = time.monotonic() - began

    @property
    def is_exact(self) -> bool:
        """Whether every row was committed once, as it is."""
        return not (self.lost or self.repeated or self.corrupted)

    def line(self) -> str:
        """Return it in a line for people."""
        took = "" if self.seconds is None else f", {self.seconds:.1f} s"
        ended = self.error.partition("\n")[0] if self.error else "exact" if self.is_exact else "not exact"
        ended += ", in another order" if self.in_order is False else ""
        left = ", ".join(f"{count} {what}" for what, count in self.left.items() if count) or "nothing"
        counts = f"lost {self.lost}, repeated {self.repeated}, corrupted {self.corrupted}"
        times = "" if self.faults < 2 else f", {self.faults} times"
        return f"{self.fault}{times}: {self.case}: {counts}{took}; {ended}; left behind: {left}"

    def append_to(self, path: Path) -> None:
        """Append it to a file as a line of JSON. Several processes may do so at the same time."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:
            file.write(json.dumps(asdict(self)).encode() + b"\n")


Record: TypeAlias = Callable[[str, str], contextlib.AbstractContextManager[Outcome]]
"""Records a case: it is called with the fault and the case."""


@contextlib.contextmanager
def recorded(fault: str, case: str, published: Path | None = None) -> Iterator[Outcome]:
    """Record a case. An AssertionError if a row was lost, repeated or corrupted, or anything is left behind.

    Args:
        fault: The row of the published table.
        case: What is done, in plain words.
        published: The file that gets the record.
    """
    outcome, before = Outcome(fault, case), present()
    yield outcome
    outcome.add_left(left_behind(before))
    print(outcome.line())  # noqa: T201 - `pytest -s` shows it
    if published is not None:
        outcome.append_to(published)
    assert outcome.is_exact, outcome.line()
    assert not outcome.left, outcome.line()


def left_behind(before: Mapping[str, set[Any]]) -> dict[str, int]:
    """Return how much that was not there before is still there `END_SEC` later, of each kind.

    What only appears within that time is not counted: other processes of the machine have files in shared memory, too.
    """
    if any(found - before[kind] for kind, found in present().items()):
        collect_garbage()
    new = {kind: found - before[kind] for kind, found in present().items()}

    def still_there() -> dict[str, set[Any]]:
        return {kind: found for kind, now in present().items() if (found := now & new[kind])}

    left = wait_until_none(still_there, END_SEC)
    shared = ownerless(left.pop("shared memory", set()))
    return {kind: len(found) for kind, found in left.items()} | ({"shared memory": len(shared)} if shared else {})


def present() -> dict[str, set[Any]]:
    """Return what this process has: its processes, threads, open files and files in shared memory.

    Sockets and the thread of fsspec's loop stay with the filesystem that opened them, so they are not counted.
    """
    threads = {thread for thread in threading.enumerate() if thread.name not in {"fsspecIO", "asyncio_0"}}
    return {
        "processes": own_children(),
        "threads": threads,
        "descriptors": set(_open_files()),
        "shared memory": shared_memory(),
    }


def _open_files() -> Iterator[tuple[str, str]]:
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            link = os.readlink(entry)  # noqa: PTH115 - a pipe's is no path
            if link.startswith("/") and link != "/dev/null" and not link.startswith(ARENAS):
                yield entry.name, link
