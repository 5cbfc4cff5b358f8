"""How much of a dataset is in memory at once, by Arrow's own count."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jobs.forked import ONE_ALLOCATOR, start
from jobs.ranks import JOBS
from ranged import ranged

pytestmark = pytest.mark.alone

ROWS = 800_000
COLUMNS = 10
WIDTH = COLUMNS * 8
BUFFER = 200_000
GROUP = 10_000
PAGE = 1 << 20
"""Bytes of a data page, as pyarrow writes them."""

LIMIT = 16_000_000
TEXT_ROWS = 8000
"""Rows that take 8 MB in memory, and so little in a file that its footer speaks of some ten kB."""


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    directory: Path = tmp_path_factory.mktemp("memory")
    chance = np.random.default_rng(0)
    table = pa.table({f"c{number}": chance.random(ROWS) for number in range(COLUMNS)})
    pq.write_table(table, directory / "a.parquet", row_group_size=GROUP, use_dictionary=False)
    pq.write_table(table, directory / "large", row_group_size=ROWS, use_dictionary=False)
    words = pa.array([f"{number:04}" * 250 for number in range(50)])
    texts = pa.table({"c0": words.take(pa.array(chance.integers(0, 50, TEXT_ROWS)))})
    with pq.ParquetWriter(directory / "texts", texts.schema) as writer:
        for _ in range(20):
            writer.write_table(texts)
    pq.write_table(pa.concat_tables([texts] * 20), directory / "large_texts", row_group_size=20 * TEXT_ROWS)
    return directory


def peak_of(path: Path | str, rows: int = ROWS, **options: Any) -> int:
    """Return the most bytes that Arrow held in a process that reads an epoch."""
    with tempfile.NamedTemporaryFile("r") as output:
        reader = start(
            JOBS / "peak_job.py", str(path), repr(options), output=Path(output.name), environment=ONE_ALLOCATOR
        )
        reader.join()
        said = output.read()
    assert reader.exitcode == 0, said
    found, peak = map(int, said.split())
    assert found == rows
    return peak


@pytest.mark.parametrize("output_format", ["torch", "arrow"])
def test_two_shards_of_shuffled_rows_are_in_memory_and_a_column_or_so_on_its_way(path, output_format):
    options = {"shuffle": True, "shuffle_buffer_size": BUFFER, "output_format": output_format}
    assert peak_of(path / "a.parquet", read_ahead_bytes=1 << 30, **options) < 2.3 * BUFFER * WIDTH + 2e6


def test_two_shards_are_in_memory_where_row_groups_larger_than_the_buffer_are_small_enough_to_be_read_whole(path):
    shard = 8 * GROUP * WIDTH
    options = {"shuffle": True, "shuffle_buffer_size": GROUP // 2, "read_ahead_bytes": 5 * shard}
    assert peak_of(path / "a.parquet", **options) < 2.3 * shard + 2e6


def test_two_such_shards_are_in_memory_within_read_ahead_bytes(path):
    limit = int(2.64 * 8 * GROUP * WIDTH)
    options = {"shuffle": True, "shuffle_buffer_size": GROUP // 2, "read_ahead_bytes": limit}
    assert peak_of(path / "a.parquet", **options) < 1.1 * limit


@pytest.mark.parametrize("shards", [1.32, 2.2])
def test_only_one_such_shard_is_in_memory_if_it_takes_more_than_half_of_read_ahead_bytes(path, shards):
    shard = 8 * GROUP * WIDTH
    options = {"shuffle": True, "shuffle_buffer_size": GROUP // 2, "read_ahead_bytes": int(shards * shard)}
    assert peak_of(path / "a.parquet", **options) < 1.5 * shard


@pytest.mark.parametrize("shards", [4, 5])
def test_shuffled_rows_of_one_column_take_no_more_than_read_ahead_bytes(path, shards):
    """A shard of one column is in memory four times while it is permuted."""
    limit = shards * 8 * GROUP * (8 + 8)
    options = {"columns": ["c0"], "shuffle": True, "shuffle_buffer_size": GROUP // 2, "read_ahead_bytes": limit}
    assert peak_of(path / "a.parquet", **options) < 1.1 * limit + 2e6


@pytest.mark.parametrize("output_format", ["torch", "arrow"])
@pytest.mark.parametrize("groups", [4, 12])
def test_no_more_than_read_ahead_bytes_is_in_memory(path, groups, output_format):
    limit = groups * GROUP * WIDTH
    assert peak_of(path / "a.parquet", output_format=output_format, read_ahead_bytes=limit) < 1.1 * limit


def test_no_more_is_in_memory_where_local_files_are_not_mapped(path):
    limit = 12 * GROUP * WIDTH
    assert peak_of(path / "a.parquet", memory_map=False, read_ahead_bytes=limit) < 1.1 * limit


def test_the_stored_bytes_of_a_larger_row_group_are_in_memory_where_files_are_not_mapped(path):
    stored = (path / "large").stat().st_size
    peak = peak_of(path / "large", memory_map=False, read_ahead_bytes=LIMIT)
    assert peak < 1.1 * LIMIT + COLUMNS * PAGE + stored


@pytest.mark.parametrize("output_format", ["torch", "arrow"])
def test_a_row_group_that_is_larger_is_read_in_pieces_with_a_page_of_each_column_beside_them(path, output_format):
    peak = peak_of(path / "large", output_format=output_format, read_ahead_bytes=LIMIT)
    assert peak < 1.1 * LIMIT + COLUMNS * PAGE


@pytest.mark.parametrize("name", ["texts", "large_texts"])
@pytest.mark.parametrize("storage", [str, ranged])
def test_texts_that_are_much_longer_than_their_footer_says_are_held_to_it_too(path, name, storage):
    assert pq.read_metadata(path / "texts").row_group(0).total_byte_size < 100_000
    peak = peak_of(storage(path / name), 20 * TEXT_ROWS, output_format="arrow", read_ahead_bytes=LIMIT)
    part = LIMIT // 4  # a part that is decoded takes as much again for a moment; a busy machine shows it
    assert peak < 1.1 * LIMIT + part + PAGE


def test_columns_that_only_the_filter_needs_count(path):
    peak = peak_of(path / "large", columns=["c0"], sum_at_least=0, read_ahead_bytes=LIMIT)
    assert peak < 1.1 * LIMIT + COLUMNS * PAGE


def test_booleans_count_as_the_bytes_that_they_become(tmp_path):
    rows, columns = 20_000, 20
    flags = np.random.default_rng(0).random((columns, rows)) < 0.5
    table = pa.table({f"c{number}": column for number, column in enumerate(flags)})
    with pq.ParquetWriter(tmp_path / "flags", table.schema) as writer:
        for _ in range(100):
            writer.write_table(table)
    limit = 4 * rows * columns
    assert peak_of(tmp_path / "flags", 100 * rows, read_ahead_bytes=limit) < 1.1 * limit
