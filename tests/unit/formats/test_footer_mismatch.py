"""A Parquet footer whose total of rows disagrees with its row groups is read as pyarrow reads it, with a warning."""

from __future__ import annotations

import warnings
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from support import all_rows_of, open_loader

from torch_dataloader_utils import FooterMismatchWarning, UnreadableFileError

ROWS = 100
GROUP = 50
I64 = 0x16
"""Thrift's compact protocol: an int64 whose field number is the last one plus 1."""
LIST = 0x19


def varint(value: int) -> bytes:
    """Return an integer as Thrift's compact protocol writes it: zigzag, seven bits a byte."""
    left = value * 2 if value >= 0 else -2 * value - 1
    content = b""
    while left >= 0x80:
        content += bytes([left & 0x7F | 0x80])
        left >>= 7
    return content + bytes([left])


def edit_footer(path: Path, before: bytes, after: bytes) -> None:
    """Replace bytes that are in a file's footer once."""
    content = path.read_bytes()
    length = int.from_bytes(content[-8:-4], "little")
    footer = content[-8 - length : -8]
    assert footer.count(before) == 1
    footer = footer.replace(before, after)
    path.write_bytes(content[: -8 - length] + footer + len(footer).to_bytes(4, "little") + b"PAR1")


def set_total(path: Path, rows: int) -> None:
    """Write another total of rows into a footer: field 3 of FileMetaData, before the list of row groups."""
    edit_footer(path, bytes([I64]) + varint(ROWS) + bytes([LIST]), bytes([I64]) + varint(rows) + bytes([LIST]))
    assert pq.read_metadata(path).num_rows == rows


def write(path: Path, first: int = 0) -> Path:
    pq.write_table(pa.table({"row": range(first, first + ROWS)}), path, row_group_size=GROUP)
    return path


@pytest.mark.parametrize("total", [99, 101, 0, 40, 10**12, -5])
def test_the_row_groups_count_as_they_do_for_pyarrow(tmp_path, total):
    path = write(tmp_path / "a.parquet")
    set_total(path, total)
    assert pq.read_table(path).num_rows == pads.dataset(path).to_table().num_rows == ROWS
    assert [pq.ParquetFile(path).read_row_group(number).num_rows for number in (0, 1)] == [GROUP, GROUP]
    with pytest.warns(
        FooterMismatchWarning, match=rf"a\.parquet says {total} rows and has 100\. Write the files again"
    ):
        loader, _ = open_loader(path, row_id_column=None)
    assert all_rows_of(loader) == list(range(ROWS))
    assert len(loader) == 7


@pytest.mark.parametrize("workers", [0, 1])
def test_it_is_filtered_shuffled_read_in_parts_and_resumed(tmp_path, workers):
    path = write(tmp_path / "a.parquet")
    set_total(path, 3)
    options = {"shuffle": True, "shuffle_buffer_size": 20, "filters": pads.field("row") >= 30, "read_ahead_bytes": 100}
    with pytest.warns(FooterMismatchWarning):
        loader, dataset = open_loader(path, num_workers=workers, row_id_column=None, **options)
    batches = iter(loader)
    before = [int(row) for row in next(batches)["row"]]
    state = dataset.state_dict()
    rest = all_rows_of(batches)
    assert sorted(before + rest) == list(range(30, ROWS))
    dataset.load_state_dict(state)
    assert all_rows_of(loader) == rest


def test_one_warning_names_a_few_of_many_files_and_points_at_the_line_that_opened_them(tmp_path):
    for number in range(60):
        path = write(tmp_path / f"{number:02}.parquet", number * ROWS)
        if number >= 52:  # the footers of the last ones may be read in other threads
            set_total(path, 1)
    with pytest.warns(FooterMismatchWarning, match=r"52\.parquet .*; and 5 more files\.") as warned:
        _, dataset = open_loader(tmp_path, row_id_column=None)
    assert len(warned) == 1
    assert warned[0].filename.endswith("support.py")
    with pytest.warns(FooterMismatchWarning, match="and 5 more files"):
        open_loader(tmp_path, row_id_column=None, manifest=dataset.dump_manifest())


def test_a_row_group_with_a_negative_number_of_rows_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"row": range(ROWS)}), path, row_group_size=77)
    group = pq.read_metadata(path).row_group(0)
    after = bytes([I64]) + varint(group.num_rows)
    edit_footer(
        path, bytes([I64]) + varint(group.total_byte_size) + after, bytes([I64]) + varint(5) + b"\x16" + varint(-77)
    )
    with pytest.raises(UnreadableFileError, match=r"a\.parquet: a row group has a negative number of rows"):
        open_loader(path)


def test_a_footer_that_agrees_gives_no_warning(tmp_path):
    write(tmp_path / "a.parquet")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_loader(tmp_path, row_id_column=None)
