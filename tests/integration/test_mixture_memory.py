"""How much of a mixture is in memory at once, by Arrow's count: as much as of one dataset, a little more for sources.

What is shared by weight are `shuffle_buffer_size` and `read_ahead_bytes`. A source adds at most a row group.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jobs.forked import ONE_ALLOCATOR, start
from jobs.ranks import JOBS

pytestmark = pytest.mark.alone

ROWS = 100_000
"""Rows of a source."""

WIDTH = 10 * 8
"""Bytes of a row."""

GROUP = 5_000
BUFFER = 80_000
BLOCKS = 2 * (4 << 20)
"""Bytes of the steps that are put together at once: of those that are delivered, and of those that are made."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> list[str]:
    directory = tmp_path_factory.mktemp("mixture_memory")
    chance = np.random.default_rng(0)
    for number in range(8):
        table = pa.table({f"c{column}": chance.random(ROWS) for column in range(10)})
        pq.write_table(table, directory / f"{number}.parquet", row_group_size=GROUP, use_dictionary=False)
    return sorted(map(str, directory.iterdir()))


def peak_of(paths: list[str], **options: object) -> int:
    """Return the most bytes that Arrow held in a process that reads an epoch."""
    with tempfile.NamedTemporaryFile("r") as output:
        arguments = repr(paths), repr(options)
        reader = start(JOBS / "mixed_peak_job.py", *arguments, output=Path(output.name), environment=ONE_ALLOCATOR)
        reader.join()
        said = output.read()
    assert reader.exitcode == 0, said
    found, peak = map(int, said.split())
    assert found == ROWS * len(paths)
    return peak


@pytest.mark.parametrize("output_format", ["torch", "arrow"])
@pytest.mark.parametrize("sources", [2, 8])
def test_the_shards_of_all_sources_together_are_as_large_as_those_of_one_dataset(paths, sources, output_format):
    options = {"shuffle": True, "shuffle_buffer_size": BUFFER, "output_format": output_format}
    peak = peak_of(paths[:sources], read_ahead_bytes=1 << 30, **options)
    assert peak < 2.3 * BUFFER * WIDTH + BLOCKS + sources * GROUP * WIDTH


@pytest.mark.parametrize("output_format", ["torch", "arrow"])
@pytest.mark.parametrize("sources", [2, 8])
def test_all_sources_together_hold_no_more_than_read_ahead_bytes(paths, sources, output_format):
    limit = 12 * GROUP * WIDTH
    peak = peak_of(paths[:sources], read_ahead_bytes=limit, output_format=output_format)
    assert peak < 1.1 * limit + sources * GROUP * WIDTH
