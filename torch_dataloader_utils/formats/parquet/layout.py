"""Which bytes of a Parquet file hold the columns of a row group, and how large they are."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow.parquet as pq

from torch_dataloader_utils.columns.arrow import width
from torch_dataloader_utils.formats.base import Layout, Measures
from torch_dataloader_utils.formats.parquet.footer import leaves_of

__all__ = ["ParquetLayout"]


class ParquetLayout(Layout):
    """A parsed footer, and which of the file's column chunks are needed.

    Args:
        metadata: The footer.
        columns: Names of the columns that are needed.
    """

    def __init__(self, metadata: pq.FileMetaData, columns: Sequence[str]) -> None:
        schema = metadata.schema.to_arrow_schema()
        leaves = leaves_of(schema)
        self.metadata = metadata
        self._leaves = [leaf for name in columns for leaf in leaves[name]]
        widths = {name: width(schema.field(name).type) for name in columns}
        self._row_bytes = sum(widths.values())
        self._variable = {name: leaves[name] for name in columns if not widths[name]}

    def measures(self) -> Measures:
        """Return how large the row groups are."""
        numbers = range(self.metadata.num_row_groups)
        stored = [
            sum(chunk.total_compressed_size for chunk in self._chunks(number, self._leaves)) for number in numbers
        ]
        variable = {
            name: tuple(
                sum(chunk.total_uncompressed_size for chunk in self._chunks(number, leaves)) for number in numbers
            )
            for name, leaves in self._variable.items()
        }
        return Measures(self._row_bytes, tuple(stored), variable)

    def ranges(self, number: int) -> list[tuple[int, int]]:
        """Return the ranges of bytes of the needed column chunks."""
        return [_range(chunk) for chunk in self._chunks(number, self._leaves)]

    def _chunks(self, number: int, leaves: Sequence[int]) -> list[pq.ColumnChunkMetaData]:
        group = self.metadata.row_group(number)
        return [group.column(leaf) for leaf in leaves]


def _range(chunk: pq.ColumnChunkMetaData) -> tuple[int, int]:
    start = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset:  # some writers set it to 0 if there is none
        start = min(start, chunk.dictionary_page_offset)
    return start, start + chunk.total_compressed_size
