"""Worker processes whose queue is full when their training process is killed, and batches that cannot be sent."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
from jobs import forked
from jobs.processes import descendants, inherited, living, wait_until_none
from jobs.torchrun import JOBS
from support import open_loader, write_dataset


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("start", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.soak)])
def test_workers_with_full_queues_end_with_a_killed_training_process(tmp_path, start):
    """A pipe holds 64 KiB; a process that writes more waits until another one reads."""
    write_dataset(tmp_path / "data", ((80_000, 4_000),))
    output = tmp_path / "output"
    output.touch()
    process = forked.start(JOBS / "stalled_job.py", str(tmp_path / "data"), start, output=output, environment={})
    try:
        assert not wait_until_none(lambda: process.is_alive() and "begun" not in output.read_text(), 240)
        assert output.read_text() == "begun\n"
        family = descendants(process.pid)
        time.sleep(1)
    finally:
        process.kill()
        process.join()
    assert len(family) >= 2
    left = wait_until_none(lambda: family & living())
    kill(sorted(left))
    assert not left


def unpicklable(batch):
    return {"row": batch["row"], "open": open(__file__)}  # noqa: PTH123 - an object that cannot be pickled


def test_a_batch_that_cannot_be_pickled_is_an_error_not_a_hang(tmp_path):
    write_dataset(tmp_path)
    loader, _ = open_loader(tmp_path, num_workers=1, collate_fn=unpicklable)
    with pytest.raises(TypeError, match="cannot pickle"):
        next(iter(loader))


ORPHANS = """
import os, signal, sys, time
import multiprocessing
from support import open_loader
if __name__ == "__main__":
    loader, _ = open_loader(sys.argv[1], batch_size=20_000, num_workers=2, multiprocessing_context=sys.argv[2])
    next(iter(loader))
    time.sleep(1)  # until the workers have filled the queue with more than a pipe holds
    batches = iter(loader)
    next(batches)
    time.sleep(1)
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.soak)])
def test_workers_end_with_a_killed_training_process_whatever_waits_in_the_queue(tmp_path, start_method):
    write_dataset(tmp_path / "data", files=((200_000, 20_000),))
    program, output = tmp_path / "program.py", tmp_path / "output"
    program.write_text(ORPHANS, encoding="utf-8")
    process = forked.start(program, str(tmp_path / "data"), start_method, output=output, environment={})
    process.join(240)
    process.kill()
    process.join()
    printed = output.read_text()
    assert process.exitcode == -signal.SIGKILL, printed
    workers = [int(pid) for pid in printed.split()]
    assert len(workers) == 2
    left = wait_until_none(lambda: set(workers) & living())
    assert not left, f"processes {left} are still there"


INTERRUPTED_AT_EXIT = """
import os, signal, sys
from multiprocessing import active_children, popen_fork
from support import open_loader

again = signal.Signals[sys.argv[2]]
kill = popen_fork.Popen.kill


def interrupted(popen):
    popen_fork.Popen.kill = kill
    os.kill(os.getpid(), again)
    kill(popen)


def leave(number, frame):
    sys.exit(3)


if again is not signal.SIGINT:
    signal.signal(again, leave)
popen_fork.Popen.kill = interrupted  # Python kills the workers when it exits
loader, _ = open_loader(sys.argv[1], num_workers=2, multiprocessing_context="fork")
batches = iter(loader)
next(batches)
print(*(child.pid for child in active_children()), flush=True)
raise KeyboardInterrupt
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_signal_while_python_exits_leaves_no_process(tmp_path, name):
    """Workers are killed before its handler is called, or when Python deletes the iterator, if the handler raised."""
    write_dataset(tmp_path / "data")
    program, output = tmp_path / "program.py", tmp_path / "output"
    program.write_text(INTERRUPTED_AT_EXIT, encoding="utf-8")
    with output.open("w", encoding="utf-8") as written:
        command = [sys.executable, str(program), str(tmp_path / "data"), name]
        process = subprocess.Popen(command, stdout=written, stderr=subprocess.PIPE, env=inherited(), text=True)
        try:
            _, errors = process.communicate(timeout=120)
        finally:
            process.kill()  # its workers, if any are left, end with it
    workers = {int(pid) for pid in output.read_text().split()}
    assert len(workers) == 2
    assert not wait_until_none(lambda: workers & living())
    assert "Exception ignored in: <function _MultiProcessing" not in errors
