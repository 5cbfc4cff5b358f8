"""Which of the rows that are stored of a row group are delivered, and with which columns."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import chain

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads

from torch_dataloader_utils.columns.arrow import encoded_schema, nested_fixed_lists, takeable
from torch_dataloader_utils.columns.selection import filter_rows
from torch_dataloader_utils.formats.filters import filter_columns
from torch_dataloader_utils.formats.opened_files import OpenedFiles
from torch_dataloader_utils.planning.excluded import EpochExclusions, Flags
from torch_dataloader_utils.planning.row_hash import file_key, row_marks
from torch_dataloader_utils.reading.row_groups.file_row_group import FileRowGroup

NONE_DELETED = np.empty(0, dtype=np.int64)

ADDED_BYTES = 8
"""What a row takes in each column that is added: of row ids, and of row marks."""

MARKS_COLUMN = "\ufdd0row marks"
"""The name of the column of row marks. It begins with a character that Unicode reserves for use inside programs."""

REMOVED_COLUMN = "\ufdd0removed"
"""The name of the column that flags the rows which batches lose after they are cut."""


class RowSelection:
    """The rows of row groups without those that are deleted, filtered out or excluded, in the columns of the dataset.

    The arguments are those of `RowGroupReader`.

    Attributes:
        schema: The columns, and last those that are added.
        compared: The columns whose values decide which rows are delivered.
        added_bytes: What a row takes in those that are added.
    """

    def __init__(
        self,
        files: OpenedFiles,
        row_id_column: str | None,
        excluded: EpochExclusions,
        *,
        adds_marks: bool,
        flags_removed: bool,
    ) -> None:
        self._files = files
        self._excluded = excluded
        self._row_id_column = row_id_column
        self._adds_marks = adds_marks
        self._flags_removed = flags_removed
        self._nests_fixed_lists = bool(nested_fixed_lists(files.needed))
        self._file_key = cache(lambda path: file_key(files.manifest.file(path)))
        added = [*([] if row_id_column is None else [row_id_column]), *([MARKS_COLUMN] if adds_marks else [])]
        flags = [pa.field(REMOVED_COLUMN, pa.bool_())] if flags_removed else []
        self.schema = pa.schema([*files.schema, *(pa.field(name, pa.int64()) for name in added), *flags])
        excluding = [files.expressions[digest] for digest in (*excluded.removed_by, *excluded.left_out_by)]
        names = chain.from_iterable(filter_columns(expression, files.needed).names for expression in excluding)
        self.compared = frozenset([*files.filter_columns, *names])
        self.added_bytes = ADDED_BYTES * len(added) + len(flags)

    def deleted(self, group: FileRowGroup) -> npt.NDArray[np.int64]:
        """Return the deleted rows of a row group, counted from its first row."""
        deletes = self._files.deletes.get(group.path)
        return NONE_DELETED if deletes is None else deletes.within(group.number, group.count)

    def stored_rows(self, group: FileRowGroup) -> int:
        """Return how many rows are stored of a row group, deleted ones included."""
        return group.unfiltered + len(self.deleted(group))

    def apply(self, group: FileRowGroup, table: pa.Table, first: int) -> tuple[pa.Table, int]:
        """Return the rows to deliver of a row group's stored rows from `first` on, and how many are not deleted."""
        files = self._files
        rows = table.num_rows
        constants = files.constants_of(group.path)
        table = files.projection(group.path).apply(table, files.needed, constants)
        if self._nests_fixed_lists:
            table = takeable(table)
        deleted = self.deleted(group)
        begin, end = np.searchsorted(deleted, [first, first + rows]) if len(deleted) else (0, 0)
        if end > begin:
            kept = np.ones(rows, dtype=bool)
            kept[deleted[begin:end] - first] = False
            table = filter_rows(table, pa.array(kept))
        count = rows - int(end - begin)
        first_row = group.first_unfiltered + first - int(begin)  # in the file, deleted rows not counted
        if self._row_id_column is not None:
            first_id = self._files.first_unfiltered[group.path] + first_row
            row_ids = np.arange(first_id, first_id + count, dtype=np.int64)
            table = table.append_column(self._row_id_column, pa.array(row_ids))
        if self._adds_marks:
            marks = row_marks(self._file_key(group.path), first_row, count)
            table = table.append_column(MARKS_COLUMN, pa.array(marks.view(np.int64)))
        table = self._without_excluded(table, group.path, first_row)
        if not table.schema.equals(self.schema, check_metadata=True):
            columns = [table[name] for name in self.schema.names]
            table = pa.table(columns, schema=encoded_schema(self.schema, columns))
        return table, count

    def _without_excluded(self, table: pa.Table, path: str, first: int) -> pa.Table:
        """Return the rows of a table that the plan and the filter keep, and flag those that batches are to lose.

        The table has all rows of a file from `first` on, but deleted ones.
        """
        rows = path, first, first + table.num_rows
        excluded = self._excluded
        mask = None if self._files.filter is None else _mask(table, self._files.filter)
        flags = (
            excluded.removed.flags(*rows) | self._meets_any(table, excluded.removed_by) if self._flags_removed else None
        )
        if excluded.left_out_by or path in excluded.left_out.bounds:
            kept = pa.array(~(excluded.left_out.flags(*rows) | self._meets_any(table, excluded.left_out_by)))
            mask = kept if mask is None else pc.and_(mask, kept)
        if flags is not None:
            table = table.append_column(REMOVED_COLUMN, pa.array(flags))
        return table if mask is None else filter_rows(table, mask)

    def _meets_any(self, table: pa.Table, expressions: Iterable[str]) -> Flags:
        """Return for each row whether one of some expressions, given by their digests, is true."""
        met = np.zeros(table.num_rows, dtype=bool)
        for digest in expressions:
            met |= pc.fill_null(_mask(table, self._files.expressions[digest]), False).to_numpy()  # noqa: FBT003
        return met


def _mask(table: pa.Table, filters: pc.Expression) -> pa.ChunkedArray:
    """Evaluate a filter row by row; a scan without threads keeps the order."""
    return pads.dataset(table).scanner(columns={"keep": filters}, use_threads=False).to_table()["keep"]
