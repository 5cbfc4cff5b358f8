"""Where in a Parquet file the columns of a row group lie, and how large they are."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from torch_dataloader_utils.formats.footers import leaves_of

__all__ = ["Layout", "width"]


class Layout:
    """A file's footer, parsed, and which of its column chunks are needed.

    Args:
        metadata: The footer.
        columns: Names of the columns that are needed.

    Attributes:
        metadata: The footer.
        row_bytes: What a row takes in memory, columns of no fixed width left out.
        variable: The leaves of those that have none, by column.
    """

    def __init__(self, metadata: pq.FileMetaData, columns: Sequence[str]) -> None:
        schema = metadata.schema.to_arrow_schema()
        leaves = leaves_of(schema)
        self.metadata = metadata
        self._leaves = [leaf for name in columns for leaf in leaves[name]]
        widths = {name: width(schema.field(name).type) for name in columns}
        self.row_bytes = sum(widths.values())
        self.variable = {name: leaves[name] for name in columns if not widths[name]}

    def stored_bytes(self, number: int) -> int:
        """Return the compressed bytes of the needed columns in a row group."""
        return sum(chunk.total_compressed_size for chunk in self._chunks(number, self._leaves))

    def uncompressed_bytes(self, number: int, leaves: Sequence[int]) -> int:
        """Return the uncompressed bytes of some leaves in a row group; those of a dictionary count once."""
        return sum(chunk.total_uncompressed_size for chunk in self._chunks(number, leaves))

    def ranges(self, number: int) -> list[tuple[int, int]]:
        """Return where in the file the needed chunks lie."""
        return [_range(chunk) for chunk in self._chunks(number, self._leaves)]

    def extent(self, number: int) -> tuple[int, int]:
        """Return from where to where they lie, all together; columns need not be any."""
        ranges = self.ranges(number)
        return min((start for start, _ in ranges), default=0), max((stop for _, stop in ranges), default=0)

    def _chunks(self, number: int, leaves: Sequence[int]) -> list[pq.ColumnChunkMetaData]:
        group = self.metadata.row_group(number)
        return [group.column(leaf) for leaf in leaves]


def _range(chunk: pq.ColumnChunkMetaData) -> tuple[int, int]:
    start = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset:  # some writers set it to 0 where there is none
        start = min(start, chunk.dictionary_page_offset)
    return start, start + chunk.total_compressed_size


def width(kind: pa.DataType) -> float:
    """Return the bytes that a value of a type takes in memory; 0 where that differs from value to value.

    Booleans, bits in Arrow, take a byte as they are decoded, and one in tensors and arrays.
    """
    if pa.types.is_boolean(kind):
        return 1
    if pa.types.is_fixed_size_list(kind):
        size: int = kind.list_size
        return size * width(kind.value_type)
    if pa.types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType):
        return 0
    try:
        return float(kind.bit_width) / 8
    except ValueError:
        return 0
