"""The thread that reads ahead: it ends with its iterator, holds no more than it may, and changes nothing else."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs.forked import run_forked
from jobs.processes import collect_garbage, inherited, wait_until_none
from ranged import RangedFileSystem, ranged
from support import all_rows_of, batches_of, examples, open_loader, rows_of, write_dataset

from torch_dataloader_utils import UnreadableFileError
from torch_dataloader_utils.reading.read_ahead import ReadAhead
from torch_dataloader_utils.workers import producer as streams

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")

ROWS = 3800

THREADS = ("read_ahead", "decode", "fetch")


def threads() -> list[str]:
    """Return the names of the threads that read, of this process."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(THREADS)]


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    directory: Path = tmp_path_factory.mktemp("readahead")
    write_dataset(directory, ((3000, 200), (800, 100)))
    return directory


# The end of the thread -----------------------------------------------------------------------------------------------


def leave(loader: Any) -> None:
    for _ in itertools.islice(loader, 20):
        assert "read_ahead" in threads()


def fail(loader: Any) -> None:
    def train() -> None:
        for _ in loader:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()


def finish(loader: Any) -> None:
    assert len(all_rows_of(loader)) == ROWS


def begin_again(loader: Any) -> None:
    first = iter(loader)
    next(first)
    second = iter(loader)
    next(second)
    assert threads().count("read_ahead") == 1


def lie_in_a_ring(loader: Any) -> None:
    ring: list[Any] = [iter(loader)]
    next(ring[0])
    ring.append(ring)
    del ring
    collect_garbage()
    wait_until_none(threads)  # a collection in another thread may have found the ring: nothing waits there


@pytest.mark.parametrize("end", [leave, fail, finish, begin_again, lie_in_a_ring])
@pytest.mark.parametrize("limit", [10_000, "128MiB"])
@pytest.mark.parametrize("remote", [False, True])
def test_no_thread_is_left_however_an_iteration_ends(path, end, limit, remote):
    loader, _ = open_loader(ranged(path) if remote else path, read_ahead_bytes=limit)
    end(loader)
    assert threads() == []


def collect(loader: Any, rows: list[int]) -> None:
    """Add the row ids of every batch to a list."""
    for batch in loader:
        rows += rows_of(batch)


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_arrives_after_all_that_was_read_before_it_and_leaves_no_thread(tmp_path, remote, workers):
    write_dataset(tmp_path, ((400, 50), (400, 50)))
    url = ranged(tmp_path) if remote else tmp_path
    loader, _ = open_loader(url, num_workers=workers)
    damaged = tmp_path / "part-001.parquet"
    group = pq.ParquetFile(damaged).metadata.row_group(3)
    stamp = damaged.stat()
    with damaged.open("r+b") as file:
        file.seek(group.column(0).data_page_offset)
        file.write(b"\xff" * 20)
    os.utime(damaged, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    delivered: list[int] = []
    with pytest.raises(UnreadableFileError, match=r"row group 3 of .*part-001"):
        collect(loader, delivered)
    assert delivered == list(range(550 // 16 * 16))
    assert threads() == []


def not_to_be_pickled(batch: Any) -> Any:
    return threading.Lock() if rows_of(batch)[0] == 16 * 999 else batch


def test_what_cannot_be_pickled_is_an_error_after_all_batches_before_it(tmp_path):
    write_dataset(tmp_path, ((17_000, 1000),))
    loader, _ = open_loader(tmp_path, num_workers=1, collate_fn=not_to_be_pickled)
    delivered: list[int] = []
    with pytest.raises(TypeError, match="cannot pickle"):
        collect(loader, delivered)
    assert delivered == list(range(16 * 999))


UNFINISHED = """
import gc, os, sys
from ranged import ranged
from support import open_loader, rows_of
gc.freeze()  # what was imported: to look through it takes most of the time of an interpreter's end
for number, (storage, limit, status) in enumerate([("local", 1, 0), ("local", "1GiB", 3), ("remote", 50_000, 0)]):
    if child := os.fork():  # to import once; a copy ends like any interpreter, for this is its main module
        print(number, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    loader, _ = open_loader(ranged(sys.argv[1]) if storage == "remote" else sys.argv[1], read_ahead_bytes=limit)
    batches = iter(loader)
    print(rows_of(next(batches))[-1])
    raise SystemExit(status)
"""


def test_interpreters_end_with_an_unfinished_iterator(path):
    """Of local files with little and with much room, and of others; by no status of their own, and by another."""
    ignored = "ignore:This process (pid=:DeprecationWarning"  # of os.fork where there are threads, since Python 3.12
    command = [sys.executable, "-W", ignored, "-c", UNFINISHED, str(path)]
    ended = subprocess.run(command, env=inherited(), capture_output=True, text=True, check=False, timeout=240)
    printed = ["15", "0 0", "15", "1 3", "15", "2 0"]
    assert (ended.returncode, ended.stdout.splitlines(), ended.stderr) == (0, printed, "")


COLLECTED = """
import gc, itertools, os, sys, threading, time
from ranged import ranged
from support import open_loader
from torch_dataloader_utils.reading import read_ahead

read_ahead.JOIN_SEC = 0.2  # so long a thread that fetches waits for the one that waits for it
gc.collect()
gc.freeze()  # what was imported: to look through it takes most of the time of a collection
for place in sys.argv[2:]:  # each in a process of its own, forked from this one, to import once
    if not (child := os.fork()):
        break
    os.waitpid(child, 0)
else:
    raise SystemExit
numbers = itertools.count()
arrived, dropped = threading.Event(), threading.Event()

def collect(frame, event, _):  # a collection may happen at any call
    if event == "call" and frame.f_code.co_name == place and next(numbers) == 6:
        arrived.set()
        dropped.wait()
        gc.collect()

gc.disable()
threading.setprofile(collect)
loader, _ = open_loader(ranged(sys.argv[1]), read_ahead_bytes=80_000)
ring = [iter(loader)]
ring.append(ring)
next(ring[0])
arrived.wait()
del ring
dropped.set()
end, left = time.monotonic() + 60, None
while left != [] and time.monotonic() < end:
    time.sleep(0.01)
    names = [thread.name for thread in threading.enumerate()]
    left = [name for name in names if name.startswith(("read_ahead", "decode", "fetch"))]
print(place, left, flush=True)
os._exit(0)  # the usual end would hang, if they do
"""


def test_an_iterator_may_be_garbage_collected_in_any_of_its_own_threads(path, tmp_path):
    places = ("convert", "_decode_all", "_fetch_range")
    assert run_forked(COLLECTED, tmp_path, str(path), *places).splitlines() == [f"{place} []" for place in places]


COLLECTED_BY_FSSPEC = """
import asyncio, gc, sys, time
from pathlib import Path
import fsspec.asyn
import pyarrow as pa
import pyarrow.parquet as pq
from ranged import RangedFile, ranged
from support import open_loader

async def request(path, start, end):
    await asyncio.sleep(0.05)
    return Path(path).read_bytes()[start:end]

def fetch(file, start, end):  # as s3fs does: a thread that needs bytes waits for fsspec's only event loop
    return fsspec.asyn.sync(fsspec.asyn.get_loop(), request, file.path, start, end)

RangedFile._fetch_range = fetch
pq.write_table(pa.table({"x": range(200_000)}), sys.argv[1], row_group_size=2000)
gc.disable()
loader, _ = open_loader(ranged(sys.argv[1]), read_ahead_bytes=200_000)
ring = [iter(loader)]
ring.append(ring)
next(ring[0])
del ring
fsspec.asyn.get_loop().call_soon_threadsafe(gc.collect)
time.sleep(0.2)
print(len(fsspec.asyn.sync(fsspec.asyn.get_loop(), request, sys.executable, 0, 4)))
"""


def test_an_iterator_may_be_garbage_collected_in_the_thread_that_fetches_for_all(tmp_path):
    assert run_forked(COLLECTED_BY_FSSPEC, tmp_path, str(tmp_path / "a.parquet")) == "4\n"


# The same batches, whatever the budget ------------------------------------------------------------


@st.composite
def tables(draw: st.DrawFn) -> list[tuple[pa.Table, int]]:
    """One or two files with their row group sizes; texts are much larger than their footer says, or much smaller."""
    files = []
    first = 0
    for _ in range(draw(st.integers(1, 2))):
        rows = draw(st.integers(0, 300))
        values = np.arange(first, first + rows)
        text = pa.array(["x" * draw(st.sampled_from([0, 1, 500]))] * rows, pa.string())
        files.append((pa.table({"value": values, "text": text}), draw(st.integers(1, 120))))
        first += rows
    return files


VALUE = pads.field("value")
LIMITS = st.one_of(st.integers(1, 20_000), st.sampled_from([1, 2, 10**9]))


class Recorded(ReadAhead[Any]):
    """Keeps a list of all that there are."""

    all: list[ReadAhead[Any]]

    def __init__(self, read: Any, limit: int) -> None:
        super().__init__(read, limit)
        self.all.append(self)


@pytest.mark.parametrize("storage", ["local", "ranged", "memory"])
@examples(20, least=8)
@given(files=tables(), limit=LIMITS, batch_size=st.integers(1, 90), filtered=st.booleans(), mixed=st.booleans(),
       kind=st.sampled_from(["torch", "arrow", "dict"]), drop_last=st.booleans())  # fmt: skip
def test_room_of_any_size_gives_the_same_batches_in_the_same_order(
    *, storage, files, limit, batch_size, filtered, mixed, kind, drop_last
):
    options: dict[str, Any] = {"batch_size": batch_size, "drop_last": drop_last, "output_format": kind}
    if filtered:
        options["filters"] = ((VALUE > 40) & (VALUE < 90)) | (VALUE > 130)
    if mixed:
        options.update(shuffle=True, shuffle_buffer_size=100)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        directory = Path(name)
        for number, (table, group) in enumerate(files):
            pq.write_table(table, directory / f"{number}.parquet", row_group_size=group)
        url: Any = {"local": directory, "ranged": ranged(directory), "memory": f"memory://{name}"}[storage]
        if storage == "memory":
            fsspec.filesystem("memory").put(f"{name}/", f"{name}/", recursive=True)
        expected = batches_of_rows(open_loader(directory, **options)[0])
        patch.setattr(streams, "ReadAhead", Recorded)
        patch.setattr(Recorded, "all", [], raising=False)
        assert batches_of_rows(open_loader(url, read_ahead_bytes=limit, **options)[0]) == expected
        assert [ahead.budget.leased for ahead in Recorded.all] == [0]
        fsspec.filesystem("memory").store.clear()
    assert threads() == []


def batches_of_rows(loader: Any) -> list[list[int]]:
    """Return the row ids of every batch of any kind."""
    return [
        list(map(int, batch["row"].to_pylist() if isinstance(batch, pa.Table) else batch["row"])) for batch in loader
    ]


@pytest.mark.parametrize("limit", [1, 20_000])
def test_a_worker_reads_a_storage_that_is_not_local_with_little_room(tmp_path, limit):
    write_dataset(tmp_path, ((600, 200), (100, 50)))  # with room for one byte, each row is read by itself
    here, _ = open_loader(tmp_path)
    there, _ = open_loader(ranged(tmp_path), num_workers=1, read_ahead_bytes=limit)
    assert batches_of(there) == batches_of(here)


def test_a_storage_that_fails_now_and_then_is_asked_again(path, monkeypatch):
    numbers = itertools.count()

    def fail_at_times(*_: Any) -> None:
        if next(numbers) % 10 == 5:
            raise OSError("made up")

    loader, _ = open_loader(ranged(path), read_ahead_bytes=20_000)
    monkeypatch.setattr(RangedFileSystem, "on_fetch", staticmethod(fail_at_times))
    assert sorted(all_rows_of(loader)) == list(range(ROWS))
    assert next(numbers) > 20
