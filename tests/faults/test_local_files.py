"""Local files that change during an epoch: an error that names the file before a wrong row, or every row as it was."""

from __future__ import annotations

import ctypes
import errno
import itertools
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.orc as pa_orc
import pyarrow.parquet as pq
import pytest
from faults.outcome import Row, rows_in
from jobs.processes import wait_until_asleep
from pairwise import pairwise

from torch_dataloader_utils import StructuredDataset, UnreadableFileError
from torch_dataloader_utils.storage import attempts


@pytest.fixture(autouse=True)
def idle_threads_end_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each case waits until nothing is left, and a thread that has asked the storage stays for the next call."""
    monkeypatch.setattr(attempts, "IDLE_SEC", 0.05)


FAULT = "local files changed during the epoch"
FILES = 4
GROUPS = 10
GROUP = 40
ROWS = GROUPS * GROUP
STEPS = 3

SMALL: dict[str, Any] = {"batch_size": 10, "read_ahead_bytes": 4096, "split_bytes": 4096, "output_format": "dict"}
"""So little is read ahead that most rows of most files are still unread after some steps."""


def table_of(first: int) -> pa.Table:
    """Return the rows of a file, in an order and with values that follow from the first row's id."""
    ids = np.random.default_rng(7).permutation(ROWS) + first
    return pa.table({"row": ids, "score": ids / 8, "name": [f"row {number:07d}" for number in ids]})


def parquet_of(table: pa.Table, path: Path) -> None:
    pq.write_table(table, path, row_group_size=GROUP, compression="none", use_dictionary=False)


def orc_of(table: pa.Table, path: Path) -> None:
    with pa_orc.ORCWriter(path, stripe_size=1, batch_size=GROUP) as writer:
        for first in range(0, ROWS, GROUP):
            writer.write(table.slice(first, GROUP))


def csv_of(table: pa.Table, path: Path) -> None:
    lines = (f"{row['row']:07d},{row['score']:.3f},{row['name']}\n" for row in table.to_pylist())
    path.write_text("row,score,name\n" + "".join(lines))


def jsonl_of(table: pa.Table, path: Path) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in table.to_pylist()))


WRITERS = {"parquet": parquet_of, "orc": orc_of, "csv": csv_of, "jsonl": jsonl_of}

Change: TypeAlias = Callable[[Path, Path], None]


def replaced(path: Path, other: Path) -> None:
    """Rename another file to its name."""
    other.replace(path)


def overwritten(path: Path, other: Path) -> None:
    """Write another file's content into it."""
    with path.open("r+b") as file:
        file.write(other.read_bytes())
        file.truncate()


def cut(path: Path, other: Path) -> None:
    """Cut it to a tenth."""
    os.truncate(path, path.stat().st_size // 10)


def grown(path: Path, other: Path) -> None:
    """Append another file's content."""
    with path.open("ab") as file:
        file.write(other.read_bytes())


def deleted(path: Path, other: Path) -> None:
    """Delete it."""
    path.unlink()


def permissions_lost(path: Path, other: Path) -> None:
    """Take the permission to read it from everybody."""
    path.chmod(0)


CHANGES: dict[str, Change] = {
    change.__name__.replace("_", " "): change
    for change in (replaced, overwritten, cut, grown, deleted, permissions_lost)
}


class Capabilities(ctypes.Structure):
    """A thread's capabilities: see capset(2)."""

    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


VERSION_3 = 0x20080522
READS_EVERYTHING = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: root may read a file without the permission."""


@pytest.fixture
def no_privilege() -> Iterator[None]:
    """Let permissions count for root, too: in this thread, and in threads and processes that it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, held = (ctypes.c_uint32 * 2)(VERSION_3, 0), (Capabilities * 2)()
    assert libc.capget(header, held) == 0
    before = held[0].effective
    held[0].effective &= ~READS_EVERYTHING
    assert libc.capset(header, held) == 0
    yield
    held[0].effective = before
    assert libc.capset(header, held) == 0


@pytest.mark.usefixtures("no_privilege")
@pairwise(
    most=12,
    change=CHANGES,
    kind=WRITERS,
    workers=[0, 2],
    how=["mapped", "read"],
    which=["the file in use", "a file not begun"],
)
def test_a_file_that_changes_is_an_error_that_names_it_before_a_wrong_row_or_read_as_it_was(
    tmp_path: Path, record: Any, *, change: str, kind: str, workers: int, how: str, which: str
):
    expected = write_files(tmp_path / "data", tmp_path / "other", kind)
    path = tmp_path / "data" / f"part-{0 if which == 'the file in use' else FILES - 1}.{kind}"
    options = SMALL | {"num_workers": workers, "memory_map": how == "mapped"}
    options |= {"persistent_workers": False} if workers else {}
    with record(FAULT, f"{change}, {kind}, {workers} workers, {how}, {which}") as outcome:
        loader = StructuredDataset.create_dataloader(tmp_path / "data", kind, **options)[0]
        batches = iter(loader)
        rows = [row for batch in itertools.islice(batches, STEPS) for row in rows_in(batch)]
        # A mapped file that is cut short while it is read ends the process: see the guide's page about trouble.
        wait_until_asleep([os.getpid(), *(process.pid for process in multiprocessing.active_children())])
        CHANGES[change](path, tmp_path / "other")
        try:
            with outcome.timed():
                for batch in batches:
                    rows += rows_in(batch)
        except OSError as error:
            outcome.failed(error)
            assert path.name in str(error)  # noqa: PT017 - either way is right
            expected = {row: content for row, content in expected.items() if row in dict(rows)}
        outcome.compare(expected.items(), rows)
        del batches, loader


def write_files(directory: Path, other: Path, kind: str) -> dict[int, str]:
    """Write the files, and another one with other rows; return the rows of the files."""
    directory.mkdir()
    WRITERS[kind](table_of(1_000_000), other)
    rows: list[Row] = []
    for number in range(FILES):
        table = table_of(number * ROWS)
        WRITERS[kind](table, directory / f"part-{number}.{kind}")
        rows += rows_in(table.to_pydict())
    return dict(rows)


@pairwise(most=4, code=[errno.EIO, errno.ESTALE], kind=WRITERS)
def test_a_read_that_the_system_fails_for_good_is_an_error_that_names_file_and_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: Any, code: int, kind: str
):
    # Only a broken disk or server makes this fault otherwise.
    expected = write_files(tmp_path / "data", tmp_path / "other", kind)
    with record(FAULT, f"{errno.errorcode[code]} for good, {kind}") as outcome:
        loader = StructuredDataset.create_dataloader(
            tmp_path / "data", kind, num_workers=0, memory_map=False, storage_timeout=1, **SMALL
        )[0]
        batches = iter(loader)
        rows = [row for batch in itertools.islice(batches, STEPS) for row in rows_in(batch)]
        monkeypatch.setattr(os, "preadv", partial(failing, code))
        with pytest.raises(UnreadableFileError, match=rf"part-\d\.{kind}.*{os.strerror(code)}") as caught:
            rows += [row for batch in batches for row in rows_in(batch)]
        outcome.failed(caught.value)
        outcome.compare([(row, expected[row]) for row, _ in rows], rows)
        del batches, loader, caught


@pytest.mark.parametrize("kind", WRITERS)
def test_a_read_that_fails_for_a_moment_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: Any, kind: str
):
    expected = write_files(tmp_path / "data", tmp_path / "other", kind)
    read, calls = os.preadv, itertools.count()

    def sometimes(number: int, buffers: Any, offset: int) -> int:
        return failing(errno.ESTALE) if next(calls) % 10 == 5 else read(number, buffers, offset)

    with record(FAULT, f"ESTALE at each tenth read, {kind}") as outcome:
        loader = StructuredDataset.create_dataloader(tmp_path / "data", kind, num_workers=0, memory_map=False, **SMALL)[
            0
        ]
        monkeypatch.setattr(os, "preadv", sometimes)
        outcome.compare(expected.items(), [row for batch in loader for row in rows_in(batch)])
        del loader
    assert next(calls) > 10


def failing(code: int, *_: object) -> int:
    """Fail, as a call of the system does."""
    raise OSError(code, os.strerror(code))
