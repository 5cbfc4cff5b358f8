"""Which ranges of a file are fetched together, and the file that is made of them."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from ranged import RangedFileSystem, ranged
from support import open_loader

from torch_dataloader_utils.reading.row_groups.fetcher import LARGEST_GAP
from torch_dataloader_utils.storage.byte_ranges import SparseFile, coalesced


def ranges_of(least: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    return st.lists(st.tuples(st.integers(0, 300), st.integers(least, 40)).map(lambda one: (one[0], one[0] + one[1])))


RANGES = ranges_of(0)


@given(ranges_of(1), st.integers(0, 60))
@example([], 0)
@example([(0, 10), (2, 3)], 0)
def test_ranges_are_covered_by_as_few_as_the_gap_allows_rising_and_apart(ranges, gap):
    merged = coalesced(ranges, gap)
    assert all(any(start <= low and high <= stop for start, stop in merged) for low, high in ranges)
    assert merged == sorted(merged)
    assert all(after[0] - before[1] > gap for before, after in itertools.pairwise(merged))
    assert {start for start, _ in merged} <= {start for start, _ in ranges}
    assert {stop for _, stop in merged} <= {stop for _, stop in ranges}
    wanted = {byte for low, high in ranges for byte in range(low, high)}
    for start, stop in merged:  # no hole within is too large to be fetched along
        inside = sorted(wanted & set(range(start, stop)) | {start - 1, stop})
        assert all(after - before - 1 <= gap for before, after in itertools.pairwise(inside))


@given(RANGES, st.integers(0, 60), st.randoms())
def test_the_order_of_ranges_does_not_matter_and_to_merge_again_changes_nothing(ranges, gap, chance):
    merged = coalesced(ranges, gap)
    assert coalesced(merged, gap) == merged
    chance.shuffle(ranges)
    assert coalesced(ranges, gap) == merged


CONTENT = bytes(range(256)) * 2


def sparse(*ranges: tuple[int, int]) -> SparseFile:
    file = SparseFile(len(CONTENT))
    for start, stop in ranges:
        file.add(start, CONTENT[start:stop])
    return file


@given(RANGES.filter(bool), st.integers(-3, 400), st.integers(-1, 60))
def test_what_is_there_is_read_as_from_the_whole_file_and_the_rest_is_an_error(ranges, start, size):
    file, whole = sparse(*ranges), io.BytesIO(CONTENT)
    if start < 0:
        file.seek(start, io.SEEK_END)
        whole.seek(start, io.SEEK_END)
    else:
        file.seek(start)
        whole.seek(start)
    begin = whole.tell()
    expected = whole.read(size)
    if any(low <= begin and begin + len(expected) <= high for low, high in ranges):
        assert file.read(size) == expected
        assert file.tell() == whole.tell()
        file.seek(-len(expected), io.SEEK_CUR)
        assert file.read_buffer(size).to_pybytes() == expected
    else:
        with pytest.raises(OSError, match=f"bytes {begin} to {begin + len(expected)} were not fetched"):
            file.read(size)
        assert file.tell() == begin


def test_a_file_that_was_cleared_has_nothing_and_still_knows_its_size():
    file = sparse((0, 10))
    file.clear()
    assert file.size() == len(CONTENT)
    assert file.readable()
    with pytest.raises(OSError, match="bytes 0 to 5 were not fetched"):
        file.read(5)


def test_a_buffer_outlasts_the_file():
    file = sparse((0, 10))
    buffer = file.read_buffer(10)
    file.clear()
    del file
    assert buffer.to_pybytes() == CONTENT[:10]


# Fetched from a storage ----------------------------------------------------------------------------------------------

ROWS, GROUP = 24_000, 8_000
COLUMN = GROUP * 8
"""Bytes of a column chunk of 8 bytes a value, and a little less than the largest gap."""


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """A file whose columns c0, c1 and so on are all about as large as the largest gap; `half` ones are half of that."""
    directory: Path = tmp_path_factory.mktemp("sparse")
    chance = np.random.default_rng(0)
    columns = {f"c{number}": chance.integers(0, 2**62, ROWS) for number in range(8)}
    pq.write_table(
        pa.table(columns), directory / "a.parquet", row_group_size=GROUP, use_dictionary=False, compression="none"
    )
    return directory


def rows_of(loader: Iterable[Any]) -> list[int]:
    return [row for batch in loader for row in batch["row"].tolist()]


@pytest.mark.parametrize(
    ("columns", "runs"),
    [
        (["c0"], [[0]]),
        (["c0", "c1", "c2"], [[0, 1, 2]]),
        (["c0", "c2"], [[0, 2]]),  # what is between is fetched along
        (["c0", "c3"], [[0], [3]]),
        (["c7", "c0", "c4", "c2"], [[0, 2, 4], [7]]),
        ([f"c{number}" for number in range(8)], [list(range(8))]),
    ],
)
@pytest.mark.parametrize("workers_share", ["whole", "in slices"])
def test_a_row_group_is_fetched_in_as_many_ranges_as_its_columns_have_runs(
    path, monkeypatch, columns, runs, workers_share
):
    fetched: list[tuple[int, int]] = []
    room = "128MiB" if workers_share == "whole" else 2 * COLUMN
    loader, _ = open_loader(ranged(path), columns=columns, read_ahead_bytes=room, batch_size=500)
    monkeypatch.setattr(RangedFileSystem, "on_fetch", staticmethod(lambda _, *one: fetched.append(one)))
    assert rows_of(loader) == list(range(ROWS))
    metadata = pq.ParquetFile(path / "a.parquet").metadata
    chunks = [[metadata.row_group(group).column(column) for column in range(8)] for group in range(ROWS // GROUP)]
    assert all(GROUP * 8 <= chunk.total_compressed_size <= LARGEST_GAP for group in chunks for chunk in group)
    expected = [
        (group[run[0]].data_page_offset, group[run[-1]].data_page_offset + group[run[-1]].total_compressed_size)
        for group in chunks
        for run in runs
    ]
    assert sorted(fetched) == expected


def test_columns_of_a_filter_are_fetched_with_the_others(path, monkeypatch):
    fetched: list[tuple[int, int]] = []
    condition = pa.dataset.field("c7") >= 0
    loader, _ = open_loader(ranged(path), columns=["c0"], filters=condition)
    monkeypatch.setattr(RangedFileSystem, "on_fetch", staticmethod(lambda _, *one: fetched.append(one)))
    assert rows_of(loader) == list(range(ROWS))
    assert len(fetched) == 2 * ROWS // GROUP
