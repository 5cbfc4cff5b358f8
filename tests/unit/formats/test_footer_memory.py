"""Footers by the million: nothing of a parsed footer stays but what is kept of it."""

from __future__ import annotations

import gc
import pathlib

import pyarrow.parquet as pq
import pytest
from support import open_loader, write_dataset

FILES = 30


@pytest.fixture
def resting_gc():
    """The garbage collector rests while files are opened, so what needs it would stay until all are."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("resting_gc")
def test_opening_files_leaves_no_parsed_footer_that_only_the_garbage_collector_frees(tmp_path: pathlib.Path):
    write_dataset(tmp_path, [(8, 4)] * FILES)
    loader, _ = open_loader(tmp_path, batch_size=4)
    parsed = [found for found in gc.get_objects() if isinstance(found, pq.FileMetaData)]
    assert len(parsed) <= 1  # that of the columns, with which those of the next file are compared
    assert len(loader) == FILES * 2
