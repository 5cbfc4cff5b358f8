"""Row groups to what a transform or packing makes of their rows, which must be as many as were counted."""

from __future__ import annotations

import pyarrow as pa

from torch_dataloader_utils.errors import TransformError, UnreadableFileError
from torch_dataloader_utils.formats.opened_files import OpenedFiles
from torch_dataloader_utils.reading.row_groups.file_row_group import FileRowGroup


class MadeRows:
    """Makes the rows that are delivered of those that a filter keeps; they are the same where nothing makes others."""

    def __init__(self, files: OpenedFiles) -> None:
        self._files = files

    @property
    def are_packed(self) -> bool:
        """Whether sequences are made of a row group's documents, all of them together."""
        return self._files.packing is not None

    def of(self, group: FileRowGroup, table: pa.Table) -> pa.Table:
        """Return what is delivered of a whole row group.

        Raises:
            TransformError: If the transform fails, or makes other rows than when they were counted.
            UnreadableFileError: If the rows have changed since they were counted.
        """
        return self.packed(group, self.transformed(group, table))

    def transformed(self, group: FileRowGroup, table: pa.Table) -> pa.Table:
        """Return what the transform makes of rows of a row group, or these rows where there is none."""
        transform = self._files.transform
        return table if transform is None else transform.apply(table, self._name(group))

    def packed(self, group: FileRowGroup, table: pa.Table) -> pa.Table:
        """Return the sequences of a row group, or its rows where none are made of them."""
        packing = self._files.packing
        made = table if packing is None else packing.apply(table, self._name(group))
        self.require_counted(group, made.num_rows, is_whole=True)
        return made

    def require_counted(self, group: FileRowGroup, rows: int, *, is_whole: bool) -> None:
        """Raise an error unless so many rows are made of a row group as were counted; of a part, no more."""
        files = self._files
        if files.stored_rows is None or not files.makes_rows or rows == group.rows:
            return
        name = self._name(group)
        if files.transform is None:
            msg = f"{name} gave {group.rows} sequences when they were counted, and now {rows}: its rows have changed"
            raise UnreadableFileError(msg)
        if is_whole or rows > group.rows:
            of_source = "" if files.source is None else f" of source {files.source!r}"
            unit = "rows" if files.packing is None else "sequences"
            msg = (
                f"transform{of_source}: it makes {rows} {unit} of {name}, and made {group.rows} when they were counted"
            )
            raise TransformError(f"{msg}: it has to make the same rows of the same table each time")

    def _name(self, group: FileRowGroup) -> str:
        return self._files.row_group_name(group.path, group.number, group.count)
