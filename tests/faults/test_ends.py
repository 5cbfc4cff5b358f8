"""An epoch that ends early, however: break, an exception, Ctrl-C, SIGTERM. What was delivered is counted to the row."""

from __future__ import annotations

import gzip
import os
import random
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pytest
from faults.outcome import Record, Row, rows_in
from jobs.processes import inherited
from jobs.resuming import resumed
from pairwise import pairwise
from support import all_rows_of, batches_of, open_loader, rows_of, write_dataset

FAULT = "break, exception in the loop and in `collate_fn`, Ctrl-C, SIGTERM with a handler that saves"

FILES = ((500, 60), (300, 40))
OPTIONS: dict[str, Any] = {"shuffle": True, "shuffle_buffer_size": 200}

WORKERS: dict[str, dict[str, Any]] = {
    "no workers": {"num_workers": 0},
    "persistent workers": {"num_workers": 2, "persistent_workers": True},
    "new workers": {"num_workers": 2, "persistent_workers": False},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("rows")
    write_dataset(directory, FILES)
    return directory


@pytest.fixture(scope="module")
def expected(path: Path) -> list[Row]:
    """Return all rows. Workers have delivered them: what they need once per process is there before a case begins."""
    return [row for batch in open_loader(path, num_workers=2)[0] for row in rows_in(batch)]


@pytest.fixture
def handlers() -> Iterator[None]:
    """Have signals handled as in a program of its own, and as before afterwards."""
    before = {signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler)}
    before[signal.SIGALRM] = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    before[signal.SIGTERM] = signal.getsignal(signal.SIGTERM)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
        signal.signal(number, handler)


class BrokenError(Exception):
    """Made up."""


class Breaks:
    """A `collate_fn` that fails at a row as long as a file exists."""

    def __init__(self, row: int, while_exists: Path) -> None:
        self._row = row
        self._file = while_exists

    def __call__(self, batch: Any) -> Any:
        if self._row in rows_of(batch) and self._file.exists():
            raise BrokenError
        return batch


Train = Callable[[Any, list[Row]], None]


def leave(loader: Any, committed: list[Row]) -> None:
    for batch in loader:
        committed += rows_in(batch)
        if len(committed) > 300:
            break


def fail(loader: Any, committed: list[Row]) -> None:
    with pytest.raises(BrokenError):
        raise_after(loader, committed)


def raise_after(loader: Any, committed: list[Row]) -> None:
    for batch in loader:
        committed += rows_in(batch)
        if len(committed) > 300:
            raise BrokenError


def fail_in_collate_fn(loader: Any, committed: list[Row]) -> None:
    with pytest.raises(BrokenError):
        committed.extend(row for batch in loader for row in rows_in(batch))


def interrupt(loader: Any, committed: list[Row]) -> None:
    """Send SIGINT to this process and all workers, as Ctrl-C in a terminal does, while a step is made."""
    with pytest.raises(KeyboardInterrupt):
        interrupt_after(loader, committed)


def interrupt_after(loader: Any, committed: list[Row]) -> None:
    for batch in loader:
        committed += rows_in(batch)
        if len(committed) > 300:
            signal_all(loader, signal.SIGINT)


def terminate(loader: Any, committed: list[Row]) -> None:
    """Send SIGTERM to this process and all workers, as a scheduler does, and save in the handler; then train on."""
    saved: list[tuple[dict[str, Any], int]] = []
    signal.signal(signal.SIGTERM, lambda *_: saved.append((loader.state_dict(), len(committed))))
    for batch in loader:
        committed += rows_in(batch)
        if len(committed) > 300 and not saved:
            signal_all(loader, signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    (state, count), *more = saved
    assert not more
    del committed[count:]
    loader.load_state_dict(state)


def signal_all(loader: Any, number: signal.Signals) -> None:
    for worker in loader._answers().workers if loader.num_workers else ():
        os.kill(worker.pid, number)
    os.kill(os.getpid(), number)


ENDS: dict[str, Train] = {
    "break": leave,
    "exception in the loop": fail,
    "exception in collate_fn": fail_in_collate_fn,
    "Ctrl-C": interrupt,
    "SIGTERM with a handler that saves": terminate,
}


@pairwise(most=6, workers=list(WORKERS), end=list(ENDS), resumed_in=["the same process", "a new process"])
@pytest.mark.usefixtures("handlers")
def test_after_an_early_end_a_resume_delivers_each_row_once(
    path: Path, expected: list[Row], tmp_path: Path, record: Record, *, workers: str, end: str, resumed_in: str
):
    broken = tmp_path / "broken"
    broken.touch()
    options = {**OPTIONS, **WORKERS[workers]}
    with record(FAULT, f"{end}, {workers}, resumed in {resumed_in}") as outcome:
        row = all_rows_of(open_loader(path, **options)[0])[400]
        breaks = Breaks(row, broken) if end == "exception in collate_fn" else None
        loader = open_loader(path, **options, collate_fn=breaks)[0]
        committed: list[Row] = []
        ENDS[end](loader, committed)
        assert 0 < len(committed) < len(expected)
        broken.unlink()
        committed += resumed(loader, path, options, tmp_path, in_new_process=resumed_in == "a new process")
        outcome.compare(expected, committed)
        del loader


# Ctrl-C at any moment -------------------------------------------------------------------------------------------------


class InterruptsAtLine:
    """Raises a KeyboardInterrupt at the n-th line that the main thread runs of the wait for a `threading.Condition`."""

    def __init__(self, number: int) -> None:
        self._left = number
        self.raised = False

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if frame.f_code is not threading.Condition.wait.__code__:
            return None
        if event == "line" and not self.raised:
            self._left -= 1
            if self._left < 0:
                self.raised = True
                raise KeyboardInterrupt
        return self


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_interrupt_at_any_line_of_a_wait_is_a_keyboard_interrupt_and_the_state_is_exact(path):
    """Where a lock raised an error in its place, four of 962 Ctrl-C were no KeyboardInterrupt."""
    loader, _ = open_loader(path, **OPTIONS)
    whole = batches_of(loader)
    number = missed = 0
    while missed < 20:  # where a thread is ready before the main thread asks, there is nothing to wait for
        loader.load_state_dict(loader.state_dict())
        loader.set_epoch(1)
        loader.set_epoch(0)
        interrupts = InterruptsAtLine(number)
        kept: deque[Any] = deque()
        iterator = iter(loader)
        before = sys.gettrace()
        sys.settrace(interrupts)
        try:
            kept.extend(islice(iterator, 3))
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        assert loader.state_dict()["batches_delivered"] == len(kept)
        if not interrupts.raised:
            missed += 1
            continue
        number, missed = number + 1, 0
        loader.load_state_dict(loader.state_dict())
        assert batches_of(kept) + batches_of(loader) == whole
    assert 5 < number < 1000


@pytest.mark.soak
@pytest.mark.parametrize("workers", list(WORKERS))
@pytest.mark.usefixtures("handlers")
def test_interrupts_at_random_moments_leave_an_exact_state(
    path: Path, record: Record, seeds: Any, workers: str, monkeypatch: pytest.MonkeyPatch
):
    # Python drops an interrupt in a finalizer. pytest would keep it, and with it all that its frames refer to.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    with record(FAULT, f"Ctrl-C at random moments, {workers}") as outcome:
        loader = open_loader(path, **OPTIONS, **WORKERS[workers])[0]
        whole = batches_of(loader)
        interrupted = 0
        for seed in seeds(1000 if workers == "no workers" else 150):
            loader.set_epoch(1)
            loader.set_epoch(0)
            kept: deque[Any] = deque()
            try:
                signal.setitimer(
                    signal.ITIMER_REAL, random.Random(seed).uniform(1e-4, 0.03 if loader.num_workers == 0 else 0.3)
                )
                kept.extend(iter(loader))
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            assert loader.state_dict()["batches_delivered"] == len(kept)
            loader.load_state_dict(loader.state_dict())
            assert batches_of(kept) + batches_of(loader) == whole
            kept.clear()
        outcome.faults = interrupted
        assert interrupted
        del loader


# The end of the process -----------------------------------------------------------------------------------------------


ENDS_IN_MID_EPOCH = """
import sys
from support import open_loader

loader, _ = open_loader(sys.argv[1], format=sys.argv[2], row_id_column=None)
iterator = iter(loader)
next(iterator)
"""


@pytest.mark.parametrize("count", [1, pytest.param(30, marks=pytest.mark.soak)])
@pytest.mark.parametrize("file_format", ["csv", pytest.param("parquet", marks=pytest.mark.soak)])
def test_a_process_that_ends_in_mid_epoch_is_not_aborted(tmp_path: Path, count: int, file_format: str):
    """Arrow reads compressed CSV ahead in a thread that calls Python, which it must not at the interpreter's end."""
    if file_format == "csv":
        # Slow to decompress, and with a column of no known width: Arrow's thread still reads when the process ends.
        columns = np.random.default_rng(0).random((8, 10_000))
        table = pa.table(
            {"text": [f"row {row}" for row in range(10_000)], **dict(zip("abcdefgh", columns, strict=True))}
        )
        lines, named = pa.BufferOutputStream(), pa.BufferOutputStream()
        pacsv.write_csv(table, lines, pacsv.WriteOptions(include_header=False))
        pacsv.write_csv(table.slice(0, 1), named)
        rows = gzip.compress(lines.getvalue().to_pybytes(), compresslevel=1)  # to compress all of them takes seconds
        (tmp_path / "a.csv.gz").write_bytes(gzip.compress(named.getvalue().to_pybytes()) + 25 * rows)
    else:
        write_dataset(tmp_path, ((100_000, 5_000),))
    program = tmp_path / "program.py"
    program.write_text(ENDS_IN_MID_EPOCH, encoding="utf-8")
    data = tmp_path / "a.csv.gz" if file_format == "csv" else tmp_path / "part-000.parquet"
    for first in range(0, count, 3):
        command = [sys.executable, str(program), str(data), file_format]
        processes = [
            subprocess.Popen(command, env=inherited(), stderr=subprocess.PIPE)
            for _ in range(first, min(first + 3, count))
        ]
        ended = [(process.communicate(timeout=240)[1], process.returncode) for process in processes]
        assert ended == [(b"", 0)] * len(ended)


READ_ONLY = """
import sys
from support import all_rows_of, open_loader

if __name__ == "__main__":
    print(len(all_rows_of(open_loader(sys.argv[1])[0])))
    try:
        iter(open_loader(sys.argv[1], num_workers=2)[0])
    except OSError as error:
        print(error)
"""


def test_without_workers_nothing_needs_shared_memory_and_with_workers_an_error_says_what_does(path, tmp_path):
    mount = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o ro tmpfs /dev/shm && "$@"', "sh"]
    if subprocess.run([*mount, "true"], check=False, capture_output=True).returncode:
        pytest.skip("a /dev/shm of one's own takes the right to mount")
    program = tmp_path / "program.py"
    program.write_text(READ_ONLY, encoding="utf-8")
    done = subprocess.run(
        [*mount, sys.executable, str(program), str(path)],
        env=inherited(),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    rows, error = done.stdout.splitlines()
    assert int(rows) == sum(count for count, _ in FILES)
    assert "need semaphores" in error
    assert "num_workers=0" in error
