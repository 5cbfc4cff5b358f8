"""Footers by the million: nothing of a parsed footer stays but what is kept of it."""

from __future__ import annotations

import gc
import pathlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import open_loader, write_dataset

from torch_dataloader_utils.formats import read_cache
from torch_dataloader_utils.formats.parquet.footer import list_values

FILES = 30
KEPT = 3


@pytest.fixture
def resting_gc():
    """The garbage collector rests while files are opened, so what needs it would stay until all are."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def parsed_footers() -> int:
    return sum(isinstance(found, pq.FileMetaData) for found in gc.get_objects())


@pytest.mark.usefixtures("resting_gc")
def test_opening_files_leaves_no_parsed_footer_beyond_those_that_are_kept(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    write_dataset(tmp_path, [(8, 4)] * FILES)
    content = next(tmp_path.iterdir()).read_bytes()
    monkeypatch.setattr(read_cache, "PARSED_BYTES", KEPT * (int.from_bytes(content[-8:-4], "little") + 8))
    before = parsed_footers()
    loader, _ = open_loader(tmp_path, batch_size=4)
    # One more is that of the columns, with which those of the next file are compared.
    assert before + KEPT <= parsed_footers() <= before + KEPT + 1
    assert len(loader) == FILES * 2


@pytest.mark.usefixtures("resting_gc")
def test_counting_the_values_of_lists_leaves_no_parsed_footer(tmp_path: pathlib.Path):
    pq.write_table(pa.table({"tokens": [[1, 2], [3]] * 4}), tmp_path / "part.parquet", row_group_size=4)
    content = (tmp_path / "part.parquet").read_bytes()
    before = parsed_footers()
    for _ in range(FILES):
        assert list_values(content, "tokens", nulls_are_values=True) == [6, 6]
    assert parsed_footers() == before
