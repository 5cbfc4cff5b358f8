"""What batches in shared memory leave behind, however an iteration ends, and what may be scarce."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from multiprocessing import active_children
from multiprocessing.synchronize import SemLock
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs.processes import collect_garbage, inherited, wait_until_none
from pairwise import pairwise
from support import all_rows_of, open_loader, rows_of, write_dataset

from torch_dataloader_utils.errors import IterationEndedError

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")

FILES = ((9000, 1000), (30, 30), (8000, 700))
ROWS = sum(rows for rows, _ in FILES)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    directory: Path = tmp_path_factory.mktemp("blocks")
    write_dataset(directory, FILES)
    return directory


def open_files() -> Counter[str]:
    """Return what this process has open, pipes and the like by their kind."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            links.append(str(entry.readlink()).partition(":")[0])
    return Counter(links)


def settled_files() -> Counter[str]:
    """Return the same once it has not changed for a while: processes of what ran before may still be ending."""
    collect_garbage()
    found, since = open_files(), time.monotonic()
    while time.monotonic() - since < 0.3:
        time.sleep(0.05)
        if (now := open_files()) != found:
            found, since = now, time.monotonic()
    return found


def fails(batch: Any) -> Any:
    if rows_of(batch)[0] > 6000:
        raise ValueError("made up")
    return batch


def leave(loader: Any) -> None:
    for number, _ in enumerate(loader):
        if number == 25:
            break


def take_all(loader: Any) -> None:
    assert len(all_rows_of(loader)) == ROWS


def fail(loader: Any) -> None:
    with pytest.raises(ValueError, match="made up"):
        all_rows_of(loader)


def lose_a_worker(loader: Any) -> None:
    batches = iter(loader)
    kept = [next(batches)]
    os.kill(batches._on_error.__self__._answers()._workers[0].pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"killed by signal|exited unexpectedly"):
        kept += batches
    assert rows_of(kept[0]) == list(range(64))


@pairwise(most=4, end=[leave, take_all, fail, lose_a_worker], persistent=[True, False])
def test_no_file_stays_open_however_an_iteration_ends(path, end, persistent):
    options = {"batch_size": 64, "num_workers": 2, "persistent_workers": persistent}
    options["collate_fn"] = fails if end is fail else None

    def iterate() -> None:
        loader, _ = open_loader(path, **options)
        end(loader)

    iterate()  # starts what the interpreter keeps
    before = settled_files()
    iterate()
    collect_garbage()
    assert not wait_until_none(lambda: open_files() - before)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_any_number_of_blocks_can_be_asked_for(path):
    loader, _ = open_loader(path, num_workers=2, prefetch_factor=2048)
    assert sorted(all_rows_of(loader)) == list(range(ROWS))


def test_a_limit_on_the_size_of_files_is_no_obstacle(path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, limits[1]))
    try:
        loader, _ = open_loader(path, num_workers=1)
        assert sorted(all_rows_of(loader)) == list(range(ROWS))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


TINY = """
import gc, os, signal, sys
from support import open_loader
if __name__ == "__main__":
    gc.freeze()  # what was imported: to look through it takes most of the time of an interpreter's end
    for how in ("finish", "kill"):  # each in a process of its own, forked from this one, to import once
        if child := os.fork():
            print(how, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            continue
        loader, _ = open_loader(sys.argv[1], num_workers=2, batch_size=3000)
        rows = 0
        for batch in loader:
            rows += len(batch["row"])
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        print(rows, flush=True)
        raise SystemExit
"""


def test_shared_memory_of_a_few_pages_is_enough_and_a_killed_job_leaves_nothing_in_it(path, tmp_path):
    mount = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=256k tmpfs /dev/shm && "$@"', "sh"]
    if subprocess.run([*mount, "true"], check=False, capture_output=True).returncode:
        pytest.skip("a /dev/shm of one's own takes the right to mount")
    program = tmp_path / "program.py"
    program.write_text(TINY, encoding="utf-8")
    settled = 'for _ in $(seq 300); do [ -z "$(ls -A /dev/shm)" ] && break; sleep 0.2; done; ls -A /dev/shm'
    then = f'"$@"; echo "status $?"; {settled}'
    job = [sys.executable, str(program), str(path)]
    done = subprocess.run(
        [*mount, "sh", "-c", then, "sh", *job],
        env=inherited(),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.stdout.splitlines() == [str(ROWS), "finish 0", "kill -9", "status 0"], done.stderr


@pytest.mark.parametrize("persistent", [None, False, True])
def test_a_forked_process_leaves_an_iterator_and_its_workers_to_the_one_that_began_it(path, persistent):
    options = {} if persistent is None else {"persistent_workers": persistent, "multiprocessing_context": "fork"}
    loader, _ = open_loader(path, num_workers=0 if persistent is None else 2, batch_size=10, **options)
    iterator = iter(loader)
    first = rows_of(next(iterator))
    read, write = os.pipe()
    process = os.fork()
    if not process:
        signal.alarm(60)
        try:
            next(iterator)
        except IterationEndedError as error:
            os.write(write, f"{error}\n".encode())
        os.write(write, str(len(all_rows_of(loader))).encode())
        os._exit(0)
    os.close(write)
    assert os.waitpid(process, 0)[1] == 0
    with os.fdopen(read, encoding="utf-8") as written:
        message, rows = written.read().split("\n")
    assert f"forked from process {os.getpid()}" in message
    assert int(rows) == ROWS
    assert sorted(first + all_rows_of(iterator)) == list(range(ROWS))


def require_all_rows_of(loader: Any) -> None:
    assert len(all_rows_of(loader)) == ROWS


def test_a_process_that_multiprocessing_forks_does_not_end_the_workers_of_the_one_that_started_them(path):
    loader, _ = open_loader(path, num_workers=2, multiprocessing_context="fork")
    require_all_rows_of(loader)
    process = torch.multiprocessing.get_context("fork").Process(target=require_all_rows_of, args=(loader,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert sorted(all_rows_of(loader)) == list(range(ROWS))


def test_semaphores_that_have_no_room_are_one_error_and_nothing_more(path, monkeypatch):
    """Whichever of them it is: they are files in /dev/shm."""
    made: list[Any] = []
    make = SemLock.__init__

    def semaphore(self: SemLock, *args: Any, **options: Any) -> None:
        if len(made) == room:
            raise OSError(errno.ENOSPC, "No space left on device")
        made.append(make(self, *args, **options))

    loader, _ = open_loader(path, num_workers=2, multiprocessing_context="fork")
    ignored: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", ignored.append)
    monkeypatch.setattr(SemLock, "__init__", semaphore)
    room = -1
    iter(loader)
    most = len(made)
    assert most > 8, "there are several for each worker"
    for room in range(most):
        made.clear()
        loader, _ = open_loader(path, num_workers=2, multiprocessing_context="fork")
        with pytest.raises(OSError, match=r"workers cannot be started: .*make /dev/shm larger|need semaphores"):
            iter(loader)
        collect_garbage()
        assert not ignored, room


@pytest.mark.parametrize("last", [0, 1])
def test_a_process_that_cannot_be_forked_is_one_error_and_nothing_more(path, monkeypatch, last):
    forks = []
    fork = os.fork

    def forked() -> int:
        if len(forks) == last:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        forks.append(fork())
        return forks[-1]

    loader, _ = open_loader(path, num_workers=2, multiprocessing_context="fork")
    ignored: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", ignored.append)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fork", forked)
        with pytest.raises(BlockingIOError, match=r"workers cannot be started: .*ulimit -u"):
            iter(loader)
    collect_garbage()
    assert not ignored
    assert sorted(all_rows_of(loader)) == list(range(ROWS))


@pytest.mark.parametrize("last", [0, 1])
def test_a_thread_that_cannot_be_started_with_the_workers_is_one_error_and_nothing_more(path, monkeypatch, last):
    """The system refuses threads for the same reasons as processes."""
    started, own = [], os.getpid()
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if len(started) == last and os.getpid() == own:
            raise RuntimeError("can't start new thread")
        started.append(start(thread))

    loader, _ = open_loader(path, num_workers=2, multiprocessing_context="fork")
    ignored: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", ignored.append)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        with pytest.raises(BlockingIOError, match=r"workers cannot be started: .*ulimit -u; pids.max"):
            iter(loader)
        collect_garbage()
        assert not active_children()
    assert not ignored
    assert sorted(all_rows_of(loader)) == list(range(ROWS))


def test_a_thread_that_cannot_be_started_in_a_worker_is_an_error_at_once(path, monkeypatch):
    start, own = threading.Thread.start, os.getpid()

    def refused(thread: threading.Thread) -> None:
        if os.getpid() != own:
            raise RuntimeError("can't start new thread")
        start(thread)

    loader, _ = open_loader(path, num_workers=2, multiprocessing_context="fork", persistent_workers=False)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match=r"worker process 0(.|\n)*can't start new thread"):
            next(iter(loader))
    collect_garbage()
    assert not active_children()
    assert sorted(all_rows_of(loader)) == list(range(ROWS))


@pytest.mark.parametrize("how", ["left", "read to its end", "replaced"])
@pytest.mark.parametrize("persistent", [False, True], ids=["new workers", "persistent"])
def test_workers_end_where_no_thread_can_be_started_any_more(path, monkeypatch, how, persistent):
    """To ask them to end takes one. Nothing else would end them, and Python would wait for them when it exits."""

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    loader, _ = open_loader(path, num_workers=2, multiprocessing_context="fork", persistent_workers=persistent)
    iterator = iter(loader)
    rows = rows_of(next(iterator))
    ignored: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", ignored.append)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        if how == "read to its end":
            rows += [row for batch in iterator for row in rows_of(batch)]
            assert sorted(rows) == list(range(ROWS))
        elif how == "replaced":
            loader.set_epoch(1)
        del iterator, loader
        collect_garbage()
        assert not active_children()
    assert not ignored
