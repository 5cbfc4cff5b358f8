"""What other systems lack, taken away: workers without memfd_create, and one process without what only Linux has."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jobs.processes import inherited, processes_with, wait_until_none
from support import open_loader, rows_of, write_dataset

from torch_dataloader_utils import SlowTransportWarning, WorkerError
from torch_dataloader_utils.loader.user_warnings import warn_of_slow_transport

pytestmark = [
    pytest.mark.usefixtures("leaves_nothing_behind"),
    pytest.mark.filterwarnings("ignore::torch_dataloader_utils.SlowTransportWarning"),
]

FILES = ((900, 100), (30, 30), (1500, 170))
ROWS = sum(rows for rows, _ in FILES)
ORDER = {"shuffle": True, "shuffle_buffer_size": 300}
soak = pytest.mark.soak


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    assert write_dataset(directory, FILES) == ROWS
    return directory


@pytest.fixture
def _without_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    warn_of_slow_transport.cache_clear()


without_memfd = pytest.mark.usefixtures("_without_memfd")


def mixed(batch: Any) -> Any:
    rows = batch["row"]
    return {
        "row": rows,
        "score": batch["score"].numpy(),
        "half": rows.to(torch.bfloat16),
        "names": batch["name"],
        "empty": np.empty(0),
    }


def heavy(batch: Any) -> Any:
    """Return a batch of which a message holds 13 at most: a worker two messages ahead has not sent all of its 76."""
    return {"row": batch["row"], "more": torch.zeros(150_000)}


def content(batches: Any) -> list[Any]:
    """Return every value of every batch."""
    return [
        {name: value if isinstance(value, list) else value.tolist() for name, value in batch.items()}
        for batch in batches
    ]


@pytest.mark.parametrize(
    ("workers", "collate_fn"),
    [
        pytest.param((2, "fork"), None, id="2 forked workers"),
        pytest.param((2, "fork"), mixed, id="2 forked workers, mixed"),
        pytest.param((1, "forkserver"), mixed, id="a worker of a fork server, mixed"),
        pytest.param((1, "spawn"), None, id="a spawned worker", marks=soak),
        pytest.param((1, "spawn"), mixed, id="a spawned worker, mixed", marks=soak),
        pytest.param((2, "forkserver"), None, id="2 workers of a fork server", marks=soak),
        pytest.param((2, "forkserver"), mixed, id="2 workers of a fork server, mixed", marks=soak),
    ],
)
@without_memfd
def test_without_memfd_create_workers_deliver_the_same_batches_and_say_once_that_it_is_slower(
    path, workers, collate_fn
):
    count, start = workers
    options = {"num_workers": count, "collate_fn": collate_fn, **ORDER}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader, _ = open_loader(path, multiprocessing_context=start, **options)
        whole = content(loader)
        other, _ = open_loader(path, multiprocessing_context="fork", **options)
        again = content(other)
    said = [warning for warning in caught if warning.category is SlowTransportWarning]
    assert [Path(warning.filename).name for warning in said] == [Path(__file__).name]
    assert loader._channels[0].pool is None
    assert sorted(row for batch in whole for row in batch["row"]) == list(range(ROWS))
    assert whole == again
    if count == 1:  # one stream, as without workers
        assert whole == content(open_loader(path, **{**options, "num_workers": 0})[0])


@without_memfd
def test_a_resume_after_any_batch_continues_with_the_next(path):
    loader, _ = open_loader(path, num_workers=2, multiprocessing_context="fork", **ORDER)
    seen, states = [], []
    for batch in loader:
        seen.append(rows_of(batch))
        states.append(loader.state_dict())
    for count in (1, 17, 90, len(seen)):
        loader.load_state_dict(states[count - 1])
        assert seen[:count] + [rows_of(batch) for batch in loader] == seen


@without_memfd
@pytest.mark.parametrize("seen", [0, pytest.param(5, marks=soak), 40])
def test_a_worker_that_is_killed_is_named_and_no_row_is_lost(path, seen):
    options = {"num_workers": 2, "collate_fn": heavy, **ORDER}  # a worker is killed while it writes a message
    loader, _ = open_loader(path, **options)
    whole = [rows_of(batch) for batch in open_loader(path, num_workers=2, **ORDER)[0]]
    iterator = iter(loader)
    committed = [rows_of(batch) for batch in islice(iterator, seen)]
    os.kill(loader._answers().workers[1].pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"worker 1 .*SIGKILL"):
        committed.extend(map(rows_of, iterator))
    loader.load_state_dict(loader.state_dict())
    assert committed + [rows_of(batch) for batch in loader] == whole


KILLED = """
import gc, os, signal, sys
del os.memfd_create  # in spawned workers as well
from support import all_rows_of, open_loader

def job(path, start, end):
    loader, _ = open_loader(path, num_workers=2, multiprocessing_context=start)
    iterator = iter(loader)
    rows = all_rows_of(next(iterator) for _ in range(9))
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    rows += all_rows_of(iterator)
    print(len(rows), len(set(rows)))

if __name__ == "__main__":
    path, start = sys.argv[1:]
    gc.freeze()  # what was imported: to look through it takes most of the time of an interpreter's end
    for end in ("killed", "finished"):
        if not (child := os.fork()):  # to import once; a copy ends like any interpreter, for this is its main module
            job(path, start, end)
            break
        print(end, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=soak)])
def test_a_job_leaves_no_process_and_no_file_behind_however_it_ends(path, tmp_path, start):
    program, mark = tmp_path / "program.py", f"JOB={uuid.uuid4()}"
    program.write_text(KILLED, encoding="utf-8")
    name, value = mark.split("=")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), str(path), start],
        env=inherited(**{name: value}),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    printed = [f"killed {-signal.SIGKILL}", f"{ROWS} {ROWS}", "finished 0"]
    assert (done.returncode, done.stdout.splitlines()) == (0, printed), done.stderr
    assert not wait_until_none(lambda: processes_with(mark))


SMALL = """
import os, sys
import torch
del os.memfd_create
from support import all_rows_of, open_loader
def add(batch):
    return {**batch, "more": torch.zeros(300_000)}
loader, _ = open_loader(sys.argv[1], num_workers=2, batch_size=600, collate_fn=add)
print(sorted(all_rows_of(loader)) == list(range(int(sys.argv[2]))))
"""


@soak
def test_batches_take_no_room_in_shared_memory(path, tmp_path):
    mount = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=256k tmpfs /dev/shm && "$@"', "sh"]
    if subprocess.run([*mount, "true"], check=False, capture_output=True).returncode:
        pytest.skip("a /dev/shm of one's own takes the right to mount")
    program = tmp_path / "program.py"
    program.write_text(SMALL, encoding="utf-8")
    command = [*mount, sys.executable, "-W", "ignore", str(program), str(path), str(ROWS)]
    done = subprocess.run(command, env=inherited(), capture_output=True, text=True, check=False, timeout=240)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


MISSING = """
import mmap, multiprocessing, os, signal, sys
import fsspec, numpy, pyarrow.compute, pyarrow.dataset, pyarrow.orc, pyarrow.parquet, s3fs, torch.distributed

taken = [(os, "fork preadv pread memfd_create register_at_fork sched_getaffinity O_CLOEXEC eventfd posix_fadvise"),
         (signal, "SIGKILL SIGBUS SIGCHLD SIGHUP SIGUSR1 SIGSTOP pthread_sigmask"),
         (mmap, "MADV_WILLNEED MADV_DONTNEED MAP_SHARED MAP_PRIVATE MAP_ANONYMOUS")]
for module, names in taken:
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
sys.platform = "of another kind"

assert "torch_dataloader_utils" not in sys.modules
from torch_dataloader_utils import StructuredDataset, to_device

path, rows = sys.argv[1], int(sys.argv[2])
for memory_map in (None, True, False):
    for options in ({}, {"shuffle": True, "shuffle_buffer_size": 300}, {"read_ahead_bytes": 4096}):
        def make():
            return StructuredDataset.create_dataloader(
                path, num_workers=0, row_id_column="row", memory_map=memory_map, **options)[0]
        whole = [batch["row"].tolist() for batch in make()]
        assert sorted(sum(whole, [])) == list(range(rows))
        first, then = make(), to_device(make(), "cpu")
        iterator = iter(first)
        next(iterator)
        then.load_state_dict(first.state_dict())
        assert then.progress()["initial"] == first.progress()["initial"] == 1
        assert whole == whole[: then.progress()["initial"]] + [batch["row"].tolist() for batch in then]
print("done")
"""


def test_one_process_needs_nothing_that_other_systems_lack(path, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(MISSING, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), str(path), str(ROWS)],
        env=inherited(),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
