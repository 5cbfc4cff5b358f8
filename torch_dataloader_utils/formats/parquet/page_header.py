"""How many values the dictionary of a column chunk has, by the header of its page.

A header is the struct `PageHeader` in Thrift's compact protocol:
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift and
https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

MOST_BYTES = 64
"""No header of a dictionary page is longer: it has six numbers of up to five bytes, and a byte before each field."""

END, TRUE, FALSE, STRUCT = 0, 1, 2, 12
NUMBERS = (4, 5, 6)
"""Types of fields: of 16, 32 and 64 bits."""

DICTIONARY_PAGE_HEADER = 7
NUM_VALUES = 1
"""Numbers of fields, of `PageHeader` and of `DictionaryPageHeader`."""


def dictionary_values(file: pa.NativeFile, chunk: pq.ColumnChunkMetaData) -> int | None:
    """Return how many values the dictionary of a column chunk has; None if the header does not tell."""
    size = min(MOST_BYTES, chunk.total_compressed_size)
    content = iter(file.read_at(size, chunk.dictionary_page_offset))
    try:
        header = _struct(content).get(DICTIONARY_PAGE_HEADER)
    except StopIteration:
        return None
    return None if header is None else header.get(NUM_VALUES)


def _struct(content: Iterator[int]) -> dict[int, Any]:
    """Read the numbers and structs within a struct, by the numbers of their fields, up to a field of another type."""
    found: dict[int, Any] = {}
    field = 0
    while (head := next(content)) != END:
        step, kind = head >> 4, head & 15
        field = field + step if step else _number(content)
        if kind in NUMBERS:
            found[field] = _number(content)
        elif kind == STRUCT:
            found[field] = _struct(content)
        elif kind not in (TRUE, FALSE):  # which are their own value
            break
    return found


def _number(content: Iterator[int]) -> int:
    """Read an integer: seven bits of each byte, the lowest first, in zigzag order."""
    number = shift = 0
    while True:
        byte = next(content)
        number |= (byte & 127) << shift
        if byte < 128:  # noqa: PLR2004 - the highest bit says that another byte follows
            return (number >> 1) ^ -(number & 1)
        shift += 7
