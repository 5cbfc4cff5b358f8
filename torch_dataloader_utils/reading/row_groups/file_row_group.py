"""The row groups of data files: which rows of its file each one has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, repeat

from torch_dataloader_utils.planning.manifest import DataFile


@dataclass(frozen=True, slots=True)
class FileRowGroup:
    """A row group of a data file, and which of the file's rows it has; or several consecutive ones, read as one.

    Attributes:
        path: The file, relative to the root.
        number: Number of the row group in its file; of several, the first one's.
        first_row: The file's rows before it, deleted ones not counted, nor those that a counted filter drops.
        rows: Its rows, counted in the same way; where rows are not counted at all, more than it can have.
        first_unfiltered: The file's rows before it, deleted ones not counted.
        unfiltered: Its rows, deleted ones not counted.
        count: How many row groups these are.
    """

    path: str
    number: int
    first_row: int
    rows: int
    first_unfiltered: int
    unfiltered: int
    count: int = 1

    @property
    def numbers(self) -> range:
        """The numbers of the row groups in their file."""
        return range(self.number, self.number + self.count)

    def is_followed_by(self, group: FileRowGroup) -> bool:
        """Whether a row group is the next one of the file."""
        return group.path == self.path and group.number == self.number + self.count

    def joined_with(self, following: FileRowGroup) -> FileRowGroup:
        """Return this and the next one as one."""
        return replace(
            self,
            rows=self.rows + following.rows,
            unfiltered=self.unfiltered + following.unfiltered,
            count=self.count + following.count,
        )


def row_groups_of(file: DataFile, stored: Sequence[int] | None) -> tuple[FileRowGroup, ...]:
    """Return the row groups of a file. `stored` are their rows before a counted filter; None without one."""
    rows = [group.rows for group in file.row_groups]
    firsts = accumulate(rows, initial=0)
    stored = rows if stored is None else stored
    before = accumulate(stored, initial=0)
    return tuple(map(FileRowGroup, repeat(file.path), range(len(rows)), firsts, rows, before, stored))
