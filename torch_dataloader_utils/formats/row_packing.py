"""Documents of a row group packed into sequences, so that each of them is a row that plans can count.

So it is in mixtures, whose shares are exact: the number of sequences of a row group depends on nothing but its rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from torch_dataloader_utils.columns.convert import convert, list_lengths
from torch_dataloader_utils.columns.options import Packing
from torch_dataloader_utils.columns.packed import Numbers, document_lengths, joined_pieces
from torch_dataloader_utils.columns.ragged import Ragged
from torch_dataloader_utils.columns.transform import ColumnTransform
from torch_dataloader_utils.errors import ColumnError
from torch_dataloader_utils.planning.packing import Pieces, pack

SEGMENTS_COLUMN = "\ufdd0segments"
"""The name of the column of each sequence's segments: their lengths, without padding."""

ENDED_COLUMN = "\ufdd0ended"
"""The name of the column that counts the documents that end in each sequence."""

DROPPED_COLUMN = "\ufdd0dropped"
"""The name of the column that counts tokens in no sequence: the first sequence of a row group has those of all."""

FACTS = pa.schema({SEGMENTS_COLUMN: pa.large_list(pa.int64()), ENDED_COLUMN: pa.int64(), DROPPED_COLUMN: pa.int64()})
"""What is delivered beside the packed columns, until batches are made of the sequences."""


@dataclass(frozen=True, slots=True)
class RowGroupPacking:
    """Packs the documents of whole row groups.

    Attributes:
        packing: How documents become sequences.
        text: The same as states record it.
        documents: What is delivered of the columns that are read: nulls are filled before documents are packed.
        schema: The columns of the sequences: the packed ones, the constant ones, and the `FACTS`.
        constants: The values of columns that are the same in all sequences.
    """

    packing: Packing
    text: str
    documents: ColumnTransform
    schema: pa.Schema
    constants: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, packing: Packing, text: str, columns: pa.Schema, documents: ColumnTransform) -> RowGroupPacking:
        """Return what packs tables of these columns, each of which has lists of numbers."""
        made = cls(packing, text, documents, pa.schema([]))
        packed = made._packed(columns.empty_table(), "no rows")
        return replace(made, schema=packed.schema)

    def with_constants(self, constants: Mapping[str, int]) -> RowGroupPacking:
        """Return the same with columns that have one value in all sequences."""
        packed = [self.schema.field(name) for name in self.schema.names if name not in FACTS.names]
        schema = pa.schema([*packed, *(pa.field(name, pa.int64()) for name in constants), *FACTS])
        return replace(self, schema=schema, constants=constants)

    def sequences(self, table: pa.Table, row_group: str) -> int:
        """Return how many sequences are made of all documents of a row group. Only the packed column is needed."""
        name = self.packing.column
        alone = replace(
            self.documents, columns=tuple(column for column in self.documents.columns if column.name == name)
        )
        try:
            lengths = list_lengths(alone.apply(table), name)
        except ColumnError as error:
            raise ColumnError(f"{error} ({row_group})") from None
        return self._pieces(lengths + (self.packing.separator is not None)).sequences

    def apply(self, table: pa.Table, row_group: str) -> pa.Table:
        """Return the sequences of all documents of a row group, which messages name.

        Raises:
            ColumnError: If a value cannot be delivered, or columns that are packed together differ in lengths.
        """
        packed = self._packed(table, row_group)
        for name, value in self.constants.items():
            values = pa.array(np.full(len(packed), value, np.int64))
            packed = packed.add_column(packed.num_columns - len(FACTS), name, values)
        return packed

    def _packed(self, table: pa.Table, row_group: str) -> pa.Table:
        try:
            columns = convert(self.documents.apply(table), self.documents)
        except ColumnError as error:
            raise ColumnError(f"{error} ({row_group})") from None
        tokens: Ragged = columns[self.packing.column]
        lengths = document_lengths(tokens, self.packing)
        pieces = self._pieces(lengths)
        bounds = np.concatenate([[0], np.cumsum(pieces.lengths)])[pieces.bounds]
        made: dict[str, pa.Array] = {}
        for name, column in columns.items():
            if not np.array_equal(np.diff(column.offsets), np.diff(tokens.offsets)):
                msg = (
                    f"column {name!r} has lists of other lengths than {self.packing.column!r}, with which it is packed"
                )
                raise ColumnError(f"{msg} ({row_group})")
            values = joined_pieces(column, pieces, self.packing.separator_of(name))
            made[name] = pa.LargeListArray.from_arrays(pa.array(bounds), pa.array(values))
        made[SEGMENTS_COLUMN] = pa.LargeListArray.from_arrays(pa.array(pieces.bounds), pa.array(pieces.lengths))
        made[ENDED_COLUMN] = pa.array(_ended(pieces, lengths))
        dropped = np.zeros(pieces.sequences, np.int64)
        dropped[:1] = pieces.dropped
        made[DROPPED_COLUMN] = pa.array(dropped)
        return pa.table(made)

    def _pieces(self, lengths: Numbers) -> Pieces:
        packing = self.packing
        return pack(lengths, length=packing.length, strategy=packing.strategy, split_documents=packing.split_documents)


def _ended(pieces: Pieces, lengths: Numbers) -> Numbers:
    """Return how many documents end in each sequence."""
    ends = np.concatenate([[0], np.cumsum(pieces.firsts + pieces.lengths == lengths[pieces.documents])])
    return np.diff(ends[pieces.bounds])
