"""Counts what a filter, a transform or packing makes of each row group, so that it is known ahead."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from torch_dataloader_utils.formats.opened_files import OpenedFiles
from torch_dataloader_utils.formats.read_cache import ReadCache
from torch_dataloader_utils.planning.manifest import RowGroup
from torch_dataloader_utils.reading.row_groups.file_row_group import FileRowGroup
from torch_dataloader_utils.reading.row_groups.reader import RowGroupReader

MOST_WHOLE = 2
"""Row groups that are in memory at once where all of their columns are read."""


@dataclass(frozen=True, slots=True)
class KeptRows:
    """How many rows are delivered of each row group, by path, where only reading tells.

    Attributes:
        filter_digest: Digest of the filter that keeps them; None without one.
        filter_binding: Digest of what the filter's columns are.
        rows: The rows of each row group.
        made: Digest of what makes them of the rows that are kept; None where these are delivered.
    """

    filter_digest: str | None
    filter_binding: str | None
    rows: Mapping[str, tuple[int, ...]]
    made: str | None = None

    def are_of(self, files: OpenedFiles) -> bool:
        """Whether they were counted with the filter and the transform of these files, and for these row groups."""
        if (self.filter_digest, self.filter_binding) != (files.filter_digest, files.filter_binding):
            return False
        if files.makes_rows != (self.made is not None) or self.made != made_digest(files):
            return False
        groups = {file.path: file.row_groups for file in files.manifest.files}
        return self.rows.keys() == groups.keys() and all(
            len(rows) == len(groups[path])
            and all(
                kept >= 0 and (kept <= group.rows or self.made is not None)
                for kept, group in zip(rows, groups[path], strict=True)
            )
            for path, rows in self.rows.items()
        )


def made_digest(files: OpenedFiles) -> str | None:
    """Return the digest of what makes rows of those that are read; None if nothing does, or it has no name."""
    transform, packing = files.transform, files.packing
    if not files.makes_rows or (transform is not None and not transform.id):
        return None
    columns = [(column.name, str(column.type)) for column in files.schema] if transform is not None else []
    makers = None if transform is None else transform.id, None if packing is None else packing.text
    return hashlib.blake2b(repr((makers, columns)).encode(), digest_size=8).hexdigest()


def kept_rows(files: OpenedFiles) -> KeptRows | None:
    """Return the counts of files whose rows were counted with a filter or a transform; None for others.

    Those of a transform without a name are not kept: nothing tells later whether it is the same.
    """
    made = made_digest(files)
    if files.stored_rows is None or (files.makes_rows and made is None):
        return None
    counts = {file.path: tuple(group.rows for group in file.row_groups) for file in files.manifest.files}
    return KeptRows(files.filter_digest, files.filter_binding, counts, made)


def with_kept_rows(files: OpenedFiles, known: KeptRows | None, row_id_column: str | None = None) -> OpenedFiles:
    """Return files whose manifest has the rows, or the sequences, that are delivered, as only reading tells.

    `known` are counts of an earlier run; they are used if they are of the same filter, transform and packing. Else the
    filter's columns are read, with the column that is packed, or all that the transform gets, with the row id column.

    Raises:
        UnreadableFileError: If a file cannot be read.
        TransformError: If the transform fails.
        ColumnError: If documents cannot be packed.
    """
    rows = known.rows if known is not None and known.are_of(files) else _counted(files, row_id_column)
    manifest = files.manifest
    reduced = [
        file._replace(row_groups=tuple(map(_with_rows, file.row_groups, rows[file.path]))) for file in manifest.files
    ]
    stored = {file.path: tuple(group.rows for group in file.row_groups) for file in manifest.files}
    return replace(files, manifest=replace(manifest, files=tuple(reduced)), stored_rows=stored)


def _with_rows(group: RowGroup, rows: int) -> RowGroup:
    return RowGroup(rows, group.bytes)


def _counted(files: OpenedFiles, row_id_column: str | None) -> dict[str, tuple[int, ...]]:
    """Read the row groups that may hold rows for the filter, and count those that are delivered."""
    kept = {file.path: [0] * len(file.row_groups) for file in files.manifest.files}
    packing = files.packing
    if packing is not None:
        read = files.for_lengths_alone()
    elif files.makes_rows:
        read = files
    else:
        read = files.for_filter_alone()
    for group, table in read_row_groups(read, _selected(files), row_id_column if read is files else None):
        rows = table.num_rows
        if packing is not None:
            rows = packing.sequences(table, files.row_group_name(group.path, group.number))
        kept[group.path][group.number] = rows
    return {path: tuple(rows) for path, rows in kept.items()}


def read_row_groups(
    files: OpenedFiles, groups: Iterable[tuple[str, int]], row_id_column: str | None = None
) -> Iterator[tuple[FileRowGroup, pa.Table]]:
    """Read row groups, each given as its path and number, and yield them in their order."""
    reader = RowGroupReader(files, ReadCache.of_opened(files.footers), row_id_column)
    waiting: deque[FileRowGroup] = deque()
    try:
        for path, number in groups:
            group = reader.group(path, number)
            reader.request(group, whole=True)
            waiting.append(group)
            if len(waiting) >= (MOST_WHOLE if files.makes_rows else reader.most_requested(group)):
                yield waiting[0], reader.read(waiting.popleft())
        while waiting:
            yield waiting[0], reader.read(waiting.popleft())
    finally:
        reader.close()


def _selected(files: OpenedFiles) -> Iterator[tuple[str, int]]:
    """Yield the row groups that the filter does not rule out, each as its path and number."""
    for index, file in enumerate(files.manifest.files):
        numbers: Sequence[int] = range(len(file.row_groups)) if files.selection is None else files.selection[index]
        yield from ((file.path, number) for number in numbers if file.row_groups[number].rows)
