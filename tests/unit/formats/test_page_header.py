"""The header of a dictionary page says how many values it has."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torch_dataloader_utils.formats.parquet.page_header import MOST_BYTES, dictionary_values

COUNTS = [1, 2, 63, 64, 300, 20_000]

WRITTEN: dict[str, dict[str, Any]] = {
    "plain": {"compression": "none"},
    "snappy": {},
    "zstd": {"compression": "zstd"},
    "checksums": {"write_page_checksum": True},
    "pages of format 2": {"data_page_version": "2.0"},
    "format 1.0": {"version": "1.0"},
}


def written(count: int, **options: Any) -> tuple[bytes, pq.ColumnChunkMetaData]:
    sink = io.BytesIO()
    column = [f"{'value' * 5} {row % count}" for row in range(2 * count)]
    pq.write_table(pa.table({"number": range(2 * count), "a": column}), sink, **options)
    sink.seek(0)
    return sink.getvalue(), pq.read_metadata(sink).row_group(0).column(1)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("options", WRITTEN.values(), ids=WRITTEN)
def test_a_header_has_the_number_of_values(count, options):
    content, chunk = written(count, **options)
    assert dictionary_values(pa.BufferReader(content), chunk) == count
    assert dictionary_values(pa.PythonFile(io.BytesIO(content), mode="r"), chunk) == count


def test_what_is_no_header_tells_nothing():
    content, chunk = written(5)
    start = chunk.dictionary_page_offset
    for damaged in (b"\0", b"\xff" * MOST_BYTES, b"\x15\x04\x18\x00", b"\x15\x80"):
        changed = bytearray(content)
        changed[start : start + MOST_BYTES] = damaged.ljust(MOST_BYTES, damaged[-1:])
        assert dictionary_values(pa.BufferReader(bytes(changed)), chunk) is None
    cut = content[: start + 4]
    assert dictionary_values(pa.BufferReader(cut), chunk) is None
