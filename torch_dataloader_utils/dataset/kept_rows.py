"""Counts the rows that a filter keeps of each row group, once, so that it is known how many are delivered."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from torch_dataloader_utils.formats.base import OpenedFiles
from torch_dataloader_utils.formats.read_cache import ReadCache
from torch_dataloader_utils.planning.manifest import RowGroup
from torch_dataloader_utils.reading.row_groups import FileRowGroup, RowGroupReader


@dataclass(frozen=True, slots=True)
class KeptRows:
    """How many rows a filter keeps of each row group, by path; the filter is given by its digests."""

    filter_digest: str
    filter_binding: str
    rows: Mapping[str, tuple[int, ...]]

    def are_of(self, files: OpenedFiles) -> bool:
        """Whether they were counted with the filter of these files, and for these row groups."""
        if (self.filter_digest, self.filter_binding) != (files.filter_digest, files.filter_binding):
            return False
        groups = {file.path: file.row_groups for file in files.manifest.files}
        return self.rows.keys() == groups.keys() and all(
            len(rows) == len(groups[path])
            and all(0 <= kept <= group.rows for kept, group in zip(rows, groups[path], strict=True))
            for path, rows in self.rows.items()
        )


def kept_rows(files: OpenedFiles) -> KeptRows | None:
    """Return the counts of files whose rows were counted with a filter; None for others."""
    if files.stored_rows is None or files.filter_digest is None or files.filter_binding is None:
        return None
    counts = {file.path: tuple(group.rows for group in file.row_groups) for file in files.manifest.files}
    return KeptRows(files.filter_digest, files.filter_binding, counts)


def with_kept_rows(files: OpenedFiles, known: KeptRows | None) -> OpenedFiles:
    """Return files with a filter whose manifest has only the rows that the filter keeps.

    `known` are counts of an earlier run; they are used if they are of the same filter. Else the filter's columns are
    read.

    Raises:
        UnreadableFileError: If a file cannot be read.
    """
    rows = known.rows if known is not None and known.are_of(files) else _counted(files)
    manifest = files.manifest
    reduced = [
        replace(file, row_groups=tuple(map(_with_rows, file.row_groups, rows[file.path]))) for file in manifest.files
    ]
    stored = {file.path: tuple(group.rows for group in file.row_groups) for file in manifest.files}
    return replace(files, manifest=replace(manifest, files=tuple(reduced)), stored_rows=stored)


def _with_rows(group: RowGroup, rows: int) -> RowGroup:
    return RowGroup(rows, group.bytes)


def _counted(files: OpenedFiles) -> dict[str, tuple[int, ...]]:
    """Read the filter's columns of the row groups that may hold rows for it, and count those that it keeps."""
    kept = {file.path: [0] * len(file.row_groups) for file in files.manifest.files}
    for group, table in read_row_groups(files.for_filter_alone(), _selected(files)):
        kept[group.path][group.number] = table.num_rows
    return {path: tuple(rows) for path, rows in kept.items()}


def read_row_groups(files: OpenedFiles, groups: Iterable[tuple[str, int]]) -> Iterator[tuple[FileRowGroup, pa.Table]]:
    """Read row groups, each given as its path and number, and yield them in their order."""
    reader = RowGroupReader(files, ReadCache.of_opened(files.footers))
    waiting: deque[FileRowGroup] = deque()
    try:
        for path, number in groups:
            group = reader.group(path, number)
            reader.request(group, whole=True)
            waiting.append(group)
            if len(waiting) >= reader.most_requested(group):
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
