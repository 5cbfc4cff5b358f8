"""A worker that is killed, crashes, is stopped or has no memory: it is named with what it reads, and no row is lost."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults.outcome import Record, Row, rows_in
from jobs.forked import run_forked, start
from jobs.processes import inherited, living, wait_until_none
from jobs.resuming import resumed
from pairwise import pairwise
from support import open_loader, rows_of, write_dataset
from torch.utils.data import _utils as torch_workers
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import torch_dataloader_utils.workers.torch_iterator as workers_module
from torch_dataloader_utils import SilentWorkerWarning, WorkerError
from torch_dataloader_utils.workers import messages

FAULT = "SIGKILL, SIGSEGV, SIGSTOP, out-of-memory of one worker, between and within epochs, persistent and not"

OPTIONS: dict[str, Any] = {"num_workers": 2, "batch_size": 4, "shuffle": True, "shuffle_buffer_size": 500}

READS = r"(reading|last read): (row group \d+|row groups \d+ to \d+) of .*part-00\d\.parquet"
"""Small row groups are decoded several at a time."""

NAMED_SEC = 10.0
"""Within this time of waiting a dead worker is named."""


@dataclass(frozen=True)
class Data:
    """Files, and all their rows."""

    path: Path
    rows: list[Row]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Write files, and have workers deliver them: what they need once per process is there before a case begins."""
    directory: Path = tmp_path_factory.mktemp("rows")
    write_dataset(directory, ((1500, 100), (1500, 100), (1200, 90)))
    return Data(directory, delivered(open_loader(directory, num_workers=2)[0]))


def delivered(batches: Iterable[Any]) -> list[Row]:
    """Return the rows of batches."""
    return [row for batch in batches for row in rows_in(batch)]


def commit(batches: Iterable[Any], committed: list[Row]) -> None:
    """Add the rows of batches, each as it comes."""
    committed.extend(row for batch in batches for row in rows_in(batch))


def workers_of(loader: Any) -> list[Any]:
    return loader._answers().workers


def vain_waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list that gets the seconds of each wait for a message that ends without one.

    The record has how long a named error took by the clock. But that is long on a busy machine, whose workers are as
    slow; the waits that the loader asks for are not.
    """
    seconds: list[float] = []
    wait = _MultiProcessingDataLoaderIter._try_get_data

    def noted(iterator: Any, timeout: float) -> Any:
        seconds.append(timeout)
        arrived = wait(iterator, timeout)
        if arrived[0]:
            seconds.pop()
        return arrived

    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "_try_get_data", noted)
    return seconds


class TakesMemory:
    """A `collate_fn` that takes far more memory than its process may have, as long as a file exists."""

    def __init__(self, while_exists: Path) -> None:
        self._file = while_exists

    def limit(self, _worker: int) -> None:
        """Let this process have no more memory than it has now, and a little."""
        taken = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + (2 << 30), resource.RLIM_INFINITY))

    def __call__(self, batch: Any) -> Any:
        if self._file.exists() and threading.current_thread() is threading.main_thread():
            bytearray(8 << 30)
        return batch


FAULTS: dict[str, tuple[signal.Signals, str]] = {
    "SIGKILL": (signal.SIGKILL, rf"worker 1 \(process \d+; {READS}\) was killed by signal 9 \(SIGKILL\)"),
    "SIGSEGV": (signal.SIGSEGV, rf"worker 1 \(process \d+; {READS}\) was killed by signal 11 \(SIGSEGV\)"),
    "SIGSTOP": (
        signal.SIGSTOP,
        rf"timed out: it waited 2 s for .*worker 1 \(process \d+; {READS}; stopped by a signal",
    ),
}


@pairwise(
    most=4,
    fault=list(FAULTS),
    when=["between epochs, persistent", "within an epoch, persistent", "within an epoch, not persistent"],
    resumed_in=["the same process", "a new process"],
)
def test_a_worker_that_fails_is_named_with_what_it_reads_and_no_row_is_lost(
    data: Data,
    tmp_path: Path,
    record: Record,
    monkeypatch: pytest.MonkeyPatch,
    *,
    fault: str,
    when: str,
    resumed_in: str,
):
    number, message = FAULTS[fault]
    options = {**OPTIONS, "persistent_workers": not when.endswith("not persistent")}
    with record(FAULT, f"{fault} {when}, resumed in {resumed_in}") as outcome:
        loader = open_loader(data.path, **options, timeout=2 if fault == "SIGSTOP" else 0)[0]
        committed: list[Row] = []
        iterator = iter(loader)
        if when.startswith("between"):
            assert len(delivered(iterator)) == len(data.rows)
            loader.set_epoch(1)
        else:
            commit(islice(iterator, 5), committed)
        waits = vain_waits(monkeypatch)
        os.kill(workers_of(loader)[1].pid, number)
        with outcome.timed(), pytest.raises(WorkerError, match=message):
            commit(iter(loader) if when.startswith("between") else iterator, committed)
        assert sum(waits) < NAMED_SEC
        assert loader.state_dict()["epoch"] == when.startswith("between")
        committed += resumed(loader, data.path, options, tmp_path, in_new_process=resumed_in == "a new process")
        outcome.compare(data.rows, committed)
        del iterator, loader


@pairwise(most=1, persistent=[True, False], resumed_in=["the same process", "a new process"])
def test_a_worker_without_memory_is_an_error_and_no_row_is_lost(
    data: Data, tmp_path: Path, record: Record, *, persistent: bool, resumed_in: str
):
    greedy = tmp_path / "greedy"
    takes_memory = TakesMemory(greedy)
    options = {**OPTIONS, "persistent_workers": persistent}
    case = f"out of memory within an epoch, {'persistent' if persistent else 'not persistent'}, resumed in {resumed_in}"
    with record(FAULT, case) as outcome:
        loader = open_loader(data.path, **options, collate_fn=takes_memory, worker_init_fn=takes_memory.limit)[0]
        iterator = iter(loader)
        committed = delivered(islice(iterator, 5))
        greedy.touch()
        with outcome.timed(), pytest.raises(MemoryError, match=r"in DataLoader worker process \d"):
            commit(iterator, committed)
        greedy.unlink()
        committed += resumed(loader, data.path, options, tmp_path, in_new_process=resumed_in == "a new process")
        outcome.compare(data.rows, committed)
        del iterator, loader


@pytest.mark.soak
def test_workers_killed_at_random_moments_lose_no_row(data: Data, record: Record, seeds: Any):
    with record(FAULT, "SIGKILL at random moments, resumed in the same process") as outcome:
        loader = open_loader(data.path, **OPTIONS)[0]
        for seed in seeds(300):
            random = np.random.default_rng(seed)
            committed: list[Row] = []
            loader.set_epoch(seed)
            for attempt in range(3):
                seconds = float(random.uniform(0, 0.3)) if attempt < 2 else 60  # the last one is left alone
                kills = threading.Timer(seconds, kill_one, [loader])
                kills.start()
                with contextlib.suppress(WorkerError):
                    commit(loader, committed)
                kills.cancel()
                kills.join()
                loader.load_state_dict(loader.state_dict())
            outcome.compare(data.rows, committed)
        del loader, kills


def kill_one(loader: Any) -> None:
    with contextlib.suppress(AttributeError, IndexError, ProcessLookupError, TypeError):  # none runs at this moment
        os.kill(workers_of(loader)[-1].pid, signal.SIGKILL)


# A failed iter ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loads", [False, True], ids=["after a finished pass", "after a loaded state"])
@pytest.mark.parametrize("again", ["iter", "load_state_dict and iter"])
def test_after_a_failed_iter_the_state_is_that_of_the_pass_which_was_to_begin(data, loads, again):
    loader = open_loader(data.path, **OPTIONS)[0]
    whole = [rows_of(batch) for batch in loader]
    if loads:
        iterator = iter(loader)
        assert [rows_of(next(iterator)) for _ in range(3)] == whole[:3]
        loader.load_state_dict(loader.state_dict())
    worker = workers_of(loader)[0]
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    with pytest.raises(WorkerError, match="worker 0"):
        iter(loader)
    state = loader.state_dict()
    assert state["batches_delivered"] == (3 if loads else 0)
    if again != "iter":
        loader.load_state_dict(state)
    assert [rows_of(batch) for batch in loader] == whole[3 if loads else 0 :]


def test_a_worker_that_dies_is_an_error_of_the_loader_not_of_the_line_that_runs(data):
    loader = open_loader(data.path, **OPTIONS)[0]
    iterator = iter(loader)
    next(iterator)
    worker = workers_of(loader)[1]
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()  # torch's handler of SIGCHLD would raise here
    for _ in range(1000):
        pass
    state = loader.state_dict()
    assert state["batches_delivered"] == 1
    with pytest.raises(WorkerError, match="worker 1"):
        list(iterator)


def test_a_worker_that_dies_while_another_thread_waits_for_it_is_an_error_of_that_thread(data):
    loader = open_loader(data.path, **OPTIONS)[0]
    iterator = iter(loader)
    worker = workers_of(loader)[1]
    os.kill(worker.pid, signal.SIGSTOP)
    errors: list[str] = []

    def train() -> None:
        try:
            list(iterator)
        except WorkerError as error:
            errors.append(str(error))

    thread = threading.Thread(target=train)
    thread.start()
    assert not wait_until_none(lambda: "_try_get_data" not in functions_of(thread))
    os.kill(worker.pid, signal.SIGKILL)
    thread.join()  # torch's handler of SIGCHLD would raise here
    assert len(errors) == 1
    assert f"worker 1 (process {worker.pid};" in errors[0]
    assert "was killed by signal 9" in errors[0]


def functions_of(thread: threading.Thread) -> list[str]:
    """Return the names of the functions that a thread is in."""
    frame = sys._current_frames().get(thread.ident or 0)
    return [] if frame is None else [called.f_code.co_name for called, _ in traceback.walk_stack(frame)]


@pytest.mark.parametrize("persistent", [True, False])
def test_a_dead_worker_for_which_the_program_itself_has_waited_is_an_error(data, persistent):
    """The first process of a container waits for any child, and takes the status of workers along."""
    loader = open_loader(data.path, **OPTIONS, persistent_workers=persistent)[0]
    iterator = iter(loader)
    committed = delivered(islice(iterator, 1))
    pid = workers_of(loader)[1].pid
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0) == (pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=rf"worker 1 \(process {pid}; ({READS}|nothing read yet)\) ended"):
        commit(iterator, committed)
    loader.load_state_dict(loader.state_dict())
    commit(loader, committed)
    assert sorted(committed) == sorted(data.rows)


# Silence ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.soak)])
def test_a_stopped_worker_is_named_in_one_warning_and_the_epoch_goes_on_once_it_does(
    data: Data, record: Record, monkeypatch: pytest.MonkeyPatch, start: str
):
    """All of them are stopped: on a busy machine, one that is not may be silent for as long, now and then."""
    with record(FAULT, f"SIGSTOP within an epoch, continued after the warning, {start}") as outcome:
        loader = open_loader(data.path, **OPTIONS, multiprocessing_context=start)[0]
        iterator = iter(loader)
        committed = delivered(islice(iterator, 2))  # one of each, so each has read
        stopped = [worker.pid for worker in workers_of(loader)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            monkeypatch.setattr(workers_module, "SILENCE_SEC", 1.0)
            continues = threading.Thread(target=continue_once_warned, args=(caught, stopped, monkeypatch))
            continues.start()
            with outcome.timed():
                commit(iterator, committed)
            continues.join()
        outcome.compare(data.rows, committed)
        del iterator, loader
    messages = [str(warning.message) for warning in caught if warning.category is SilentWorkerWarning]
    assert len(messages) == 1
    named = [rf"worker {number} \(process {pid}; {READS}; stopped by a signal\)" for number, pid in enumerate(stopped)]
    assert re.search(rf"waited \d+ s for {', '.join(named)}", messages[0])
    assert caught[0].filename == __file__


def continue_once_warned(caught: list[Any], stopped: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    wait_until_none(lambda: not caught)
    time.sleep(2)  # of this silence nothing more is said
    monkeypatch.setattr(workers_module, "SILENCE_SEC", 3600.0)  # a busy machine is silent for a second now and then
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)


# Pinning --------


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch's thread that pins memory run without an accelerator, whose memory it copies instead."""
    accelerator = {
        "is_available": True,
        "current_device_index": 0,
        "set_device_index": None,
        "current_accelerator": None,
    }
    if not hasattr(torch, "accelerator"):
        pytest.skip("this release of torch has no torch.accelerator, which the test replaces")
    for name, found in accelerator.items():
        monkeypatch.setattr(torch.accelerator, name, lambda *_, found=found: found)
    monkeypatch.setattr(messages, "_pinned", torch.clone)


@pytest.mark.usefixtures("pins", "leaves_nothing_behind")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("writes", ["nothing", "a part of a message"])
def test_a_worker_that_is_killed_while_it_sends_leaves_no_thread_that_waits_for_the_rest(data, monkeypatch, writes):
    """Messages without a block of shared memory are larger than a pipe, so that a worker writes them in parts."""
    monkeypatch.setattr(torch_workers, "MP_STATUS_CHECK_INTERVAL", 0.2)  # so long torch waits for one that is stopped
    monkeypatch.setattr(workers_module, "END_SEC", 1.0)  # and so long this package for a thread that waits in vain
    loader = open_loader(data.path, **OPTIONS, pin_memory=True)[0]
    iterator = iter(loader)
    committed = delivered(islice(iterator, 1))
    answers = loader._answers()
    for worker in answers.workers:
        os.kill(worker.pid, signal.SIGSTOP)
    thread = answers._pin_memory_thread
    if writes == "a part of a message":
        os.write(answers._worker_result_queue._writer.fileno(), (1 << 20).to_bytes(4, "big") + bytes(100))
        assert not wait_until_none(lambda: "_recv" not in functions_of(thread))
    del answers
    os.kill(workers_of(loader)[1].pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"worker 1 .* was killed by signal 9"):
        commit(iterator, committed)
    assert not thread.is_alive()
    loader.load_state_dict(loader.state_dict())
    commit(loader, committed)
    assert sorted(committed) == sorted(data.rows)


# The end ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.usefixtures("leaves_nothing_behind")
def test_a_stopped_worker_ends_with_its_loader(data, persistent):
    loader = open_loader(data.path, num_workers=2, persistent_workers=persistent)[0]
    iterator = iter(loader)
    next(iterator)
    stopped = workers_of(loader)[1]
    os.kill(stopped.pid, signal.SIGSTOP)
    del iterator, loader
    assert not wait_until_none(lambda: {stopped.pid} & living())


STOPPED = """
import multiprocessing, os, signal, sys
from torch_dataloader_utils import StructuredDataset

if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["torch_dataloader_utils.dataset.structured"])  # imported once, not by each
    loader = StructuredDataset.create_dataloader(
        sys.argv[1], num_workers=2, batch_size=16, multiprocessing_context=sys.argv[3]
    )[0]
    iterator = iter(loader)
    for _ in range(2):  # one of each worker: one that is stopped before its first line knows nothing of its parent
        next(iterator)
    pids = [worker.pid for worker in loader._answers().workers]
    os.kill(pids[1], signal.SIGSTOP)
    print(*pids, flush=True)
    if sys.argv[2] == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""


ENDS_WITH_WORKERS = """
import os, signal, sys
from support import open_loader

if __name__ == "__main__":
    loader = open_loader(sys.argv[1], num_workers=2, multiprocessing_context="fork")[0]
    iterator = iter(loader)
    next(iterator)
    if sys.argv[2] == "stopped":
        os.kill(loader._answers().workers[1].pid, signal.SIGSTOP)
"""


@pytest.mark.parametrize("workers", ["running", "stopped"])
def test_a_process_that_multiprocessing_started_exits_whatever_its_workers_do(data, tmp_path, workers):
    """It runs no exit handlers, and sends its children a SIGTERM that workers leave to the training process."""
    run_forked(ENDS_WITH_WORKERS, tmp_path, str(data.path), workers)


# A fork server lives on while a stopped worker does, which has its pipe: after a SIGKILL nobody ends that worker.
ENDS = [("is killed", "fork"), ("exits", "forkserver"), ("is killed", "spawn"), ("exits", "fork"), ("exits", "spawn")]


@pytest.mark.parametrize(
    ("end", "method"), [pytest.param(*pair, marks=[pytest.mark.soak] if pair in ENDS[2:] else []) for pair in ENDS]
)
def test_a_stopped_worker_ends_with_a_training_process_that(data: Data, tmp_path: Path, end: str, method: str):
    program, output = tmp_path / "program.py", tmp_path / "output.txt"
    program.write_text(STOPPED, encoding="utf-8")
    arguments = [str(data.path), end, method]
    if end == "is killed":
        process = start(program, *arguments, output=output, environment={})
        process.join(240)
        code = process.exitcode
        process.kill()
        process.join()
        assert code == -signal.SIGKILL, output.read_text(encoding="utf-8")
    else:  # as an interpreter does, with its exit handlers
        command = [sys.executable, str(program), *arguments]
        done = subprocess.run(command, env=inherited(), capture_output=True, text=True, check=False, timeout=240)
        assert done.returncode == 0, done.stderr
        output.write_text(done.stdout, encoding="utf-8")
    pids = {int(pid) for pid in output.read_text(encoding="utf-8").split()}
    assert len(pids) == 2
    left = wait_until_none(lambda: pids & living(), 30)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def exits(batch: Any) -> Any:
    if 100 in rows_of(batch):
        os._exit(0)
    return batch


def stops(batch: Any) -> Any:
    return next(iter(())) if 100 in rows_of(batch) else batch


def test_a_worker_that_exits_as_though_it_had_ended_is_named(data):
    loader, _ = open_loader(data.path, num_workers=1, batch_size=50, collate_fn=exits)
    with pytest.raises(WorkerError, match=r"worker 0 .* exited unexpectedly with status 0"):
        list(loader)


NOT_IN_A_MODULE = """
import sys
from torch_dataloader_utils import StructuredDataset, WorkerError

def same(batch):
    return batch

if __name__ == "__main__":
    loader, _ = StructuredDataset.create_dataloader(
        sys.argv[1], num_workers=1, collate_fn=same, multiprocessing_context="spawn"
    )
    try:
        list(loader)
    except WorkerError as error:
        print(error)
"""
"""Run as ``python -c``, where a worker finds no `same` in the main module."""


def test_a_worker_that_does_not_find_a_function_is_an_error_that_says_what_to_do(data):
    command = [sys.executable, "-c", NOT_IN_A_MODULE, str(data.path)]
    done = subprocess.run(command, env=inherited(), capture_output=True, text=True, check=False, timeout=240)
    assert "exited unexpectedly with status 1, and its standard error may say why" in done.stdout, done.stderr
    assert "such as collate_fn, must be defined at the top level of a module that the worker can import" in done.stdout
    assert "Can't get attribute 'same'" in done.stderr


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("size", [20, 101])
def test_a_collate_fn_that_raises_stop_iteration_ends_in_an_error_that_says_so(data, workers, size):
    loader, _ = open_loader(data.path, num_workers=workers, batch_size=size, collate_fn=stops)
    delivered = []
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        delivered.extend(map(rows_of, loader))
    assert [row for batch in delivered for row in batch] == list(range(100 - 100 % size))


def raises_own_error(batch: Any) -> Any:
    class MadeHereError(Exception):
        """A class that cannot be pickled, as libraries make some at run time."""

    raise MadeHereError(f"no image for {rows_of(batch)[0]}")


def test_an_error_of_a_class_that_cannot_be_pickled_says_what_was_raised(data):
    loader, _ = open_loader(data.path, num_workers=1, batch_size=50, collate_fn=raises_own_error)
    with pytest.raises(RuntimeError, match="MadeHereError: no image for 0"):
        next(iter(loader))
