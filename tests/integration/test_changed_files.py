"""Local files that are written while they are read: an error that names them, never a row of theirs, never a crash."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jobs.forked import run_forked
from jobs.processes import wait_until_asleep
from pairwise import pairwise
from support import open_loader

from torch_dataloader_utils import UnreadableFileError
from torch_dataloader_utils.workers import message_size

GROUP = 100
ROWS = 1000
STEPS = 3
READ_AHEAD = 2 * GROUP * 8 + 100
"""So little that most of the file is still unread after some steps."""


def write(path: Path, first: int) -> bytes:
    """Write a file of random-looking values, all from `first` on, that is as long whatever `first` is."""
    values = np.random.default_rng(0).permutation(ROWS).astype(np.int64) + first
    table = pa.table({"value": values})
    pq.write_table(table, path, row_group_size=GROUP, compression="none", use_dictionary=False, column_encoding="PLAIN")
    return path.read_bytes()


def overwrite(path: Path, content: bytes) -> None:
    """Write over a file in place, under the eyes of those who have it open."""
    with path.open("r+b") as file:
        file.write(content)


def cut_short(path: Path, content: bytes) -> None:
    os.truncate(path, len(content) // 10)


def replace(path: Path, content: bytes) -> None:
    """Put another file in its place; who has the old one open goes on reading that."""
    path.with_suffix(".new").write_bytes(content)
    path.with_suffix(".new").replace(path)


ORDERS: dict[str, dict[str, Any]] = {"in order": {}, "mixed": {"shuffle": True, "shuffle_buffer_size": 200}}


@pytest.fixture
def changing(tmp_path):
    other = write(tmp_path / "other.parquet", first=10_000)
    content = write(tmp_path / "part.parquet", first=0)
    assert len(other) == len(content)
    (tmp_path / "other.parquet").unlink()
    return tmp_path / "part.parquet", other


@pytest.fixture
def single_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers send single batches: with many in each message they would have read all of so small files by then."""
    monkeypatch.setattr(message_size, "MAX_BATCHES", 1)


@pytest.mark.usefixtures("single_batches")
@pairwise(change=[overwrite, cut_short], order=ORDERS, workers=[0, 2], memory_map=[True, False])
def test_a_file_that_is_written_while_it_is_open_is_an_error_that_names_it(
    changing, change, order, workers, memory_map
):
    path, other = changing
    options = ORDERS[order] | {
        "batch_size": 10,
        "num_workers": workers,
        "read_ahead_bytes": READ_AHEAD,
        "memory_map": memory_map,
    }
    loader, dataset = open_loader(path, **options)
    batches = iter(loader)
    delivered = [batch["value"] for batch in itertools.islice(batches, STEPS)]
    # A mapped file that is cut short while it is read ends the process: see the guide's page about trouble.
    wait_until_asleep([os.getpid(), *(process.pid for process in multiprocessing.active_children())])
    change(path, other)
    with pytest.raises(UnreadableFileError, match=r"part\.parquet"):
        delivered.extend(batch["value"] for batch in batches)
    assert max(int(values.max()) for values in delivered) < ROWS
    assert dataset.state_dict()["batches_delivered"] == len(delivered)


@pytest.mark.usefixtures("single_batches")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_that_is_replaced_is_read_to_its_end_or_refused_never_mixed(changing, workers):
    path, other = changing
    loader, _ = open_loader(path, batch_size=10, num_workers=workers, read_ahead_bytes=READ_AHEAD)
    batches = iter(loader)
    values = [value for batch in itertools.islice(batches, STEPS) for value in batch["value"].tolist()]
    replace(path, other)
    try:
        values += [value for batch in batches for value in batch["value"].tolist()]
    except UnreadableFileError as error:
        assert "part.parquet" in str(error)  # noqa: PT017 - either way is right
    assert max(values) < ROWS
    with pytest.raises(UnreadableFileError, match=r"part\.parquet was rewritten"):
        list(loader)


def test_a_file_that_is_only_touched_is_read_on(changing):
    path, _ = changing
    loader, _ = open_loader(path, batch_size=10, read_ahead_bytes=READ_AHEAD)
    batches = iter(loader)
    values = []
    for step, batch in enumerate(batches):
        values += batch["value"].tolist()
        if step % 30 == 0:
            os.utime(path, (step + 1, step + 1))
    assert sorted(values) == list(range(ROWS))


CUT_IN_MIDAIR = """
import os, sys
import torch_dataloader_utils.reading.row_groups.decoder as decoder
from torch_dataloader_utils import StructuredDataset, UnreadableFileError

path, memory_map = sys.argv[1], sys.argv[2] == "mapped"
loader, _ = StructuredDataset.create_dataloader(path, num_workers=0, memory_map=memory_map)
require_unchanged = decoder._OpenFile.require_unchanged

def cut_after(opened):
    require_unchanged(opened)
    os.truncate(path, 0)  # nobody looks again before the row group is decoded

decoder._OpenFile.require_unchanged = cut_after
try:
    list(loader)
except UnreadableFileError as error:
    print(error, flush=True)
"""
"""Cuts a file short after its size was checked and before its row group is decoded."""


def cut_in_midair(path: Path, directory: Path, how: str) -> str:
    return run_forked(CUT_IN_MIDAIR, directory, str(path), how)


def test_a_file_that_is_cut_short_while_it_is_read_is_an_error_where_it_is_not_mapped(changing, tmp_path):
    path, _ = changing
    assert "part.parquet" in cut_in_midair(path, tmp_path, "read")


def test_a_mapped_file_that_is_cut_short_while_it_is_read_ends_the_process(changing, tmp_path):
    path, _ = changing
    with pytest.raises(AssertionError, match="status -7"):  # SIGBUS
        cut_in_midair(path, tmp_path, "mapped")


OTHERS = {
    "a pipe": (getattr(os, "mkfifo", None), "this is no regular file any more"),
    "a directory": (os.mkdir, "this is no regular file any more"),
    "an empty file": (lambda path: path.touch(), "changed since it was listed: .* then, 0 bytes now"),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("memory_map", [False, True], ids=["read", "mapped"])
def test_what_takes_a_files_place_before_it_is_read_is_an_error_at_once(tmp_path, other, memory_map):
    """To open a pipe waits for somebody who writes, and an empty file cannot be mapped."""
    path = tmp_path / "part.parquet"
    write(path, first=0)
    loader, _ = open_loader(path, num_workers=0, row_id_column=None, memory_map=memory_map)
    path.unlink()
    make, expected = OTHERS[other]
    if make is None:
        pytest.skip("the system has no pipes with names")
    make(path)
    with pytest.raises(UnreadableFileError, match=rf"part\.parquet.*{expected}"):
        next(iter(loader))
