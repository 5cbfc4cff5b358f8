"""Counts the tokens of documents, once, so that it is known how many sequences they are packed into.

Footers tell the tokens of row groups where their statistics are exact. Else a column of integers tells those of each
document, or the documents are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from torch_dataloader_utils.columns.convert import list_lengths
from torch_dataloader_utils.columns.options import Packing
from torch_dataloader_utils.dataset.discovery import with_column_alone
from torch_dataloader_utils.dataset.kept_rows import read_row_groups
from torch_dataloader_utils.errors import ColumnError
from torch_dataloader_utils.formats.opened_files import OpenedFiles
from torch_dataloader_utils.planning.token_counts import Lengths, TokenCounts, needs_lengths
from torch_dataloader_utils.reading.row_groups.file_row_group import FileRowGroup

MOST_TOKENS = np.iinfo(np.int32).max


def with_tokens(
    files: OpenedFiles,
    packing: Packing,
    length_column: str | None,
    *,
    known: TokenCounts | None,
    nulls_are_values: bool,
) -> OpenedFiles:
    """Return files whose documents' tokens are counted.

    `length_column` is the column that says how many tokens each document has, if there is one. `known` are counts of an
    earlier run, which are used if they are of the same documents. `nulls_are_values` says that null tokens are filled.

    Raises:
        ValueError: If a filter decides which documents are packed.
        ColumnError: If the column of lengths does not exist, or has something else than numbers of tokens.
        UnreadableFileError: If a file cannot be read.
    """
    if files.filter is not None:
        msg = f"count_tokens: {files.filter_name} leaves out documents, and only reading tells which; "
        raise ValueError(f"{msg}leave out one of the two")
    rows = {file.path: tuple(group.rows for group in file.row_groups) for file in files.manifest.files}
    wants_lengths = needs_lengths(packing.strategy, split_documents=packing.split_documents)
    if known is not None and _are_of(known, rows, packing.column, length_column, wants_lengths=wants_lengths):
        return replace(files, tokens=known)
    source = with_column_alone(files, length_column or packing.column)
    dtype = source.schema[0].type
    if length_column is not None and not pa.types.is_integer(dtype):
        raise ColumnError(f"count_tokens={length_column!r}: that column is {dtype}, expected integers")
    stated: Mapping[str, Sequence[int | None]] = {}
    if not wants_lengths:
        stated = files.format.list_values(files, packing.column, nulls_are_values=nulls_are_values)
    sums: dict[str, list[int | None]] = {
        path: list(stated.get(path, [None] * len(of_file))) for path, of_file in rows.items()
    }
    parts: dict[str, list[Lengths]] = {path: [] for path in rows}
    groups = [
        (path, number)
        for path, of_file in rows.items()
        for number, count in enumerate(of_file)
        if count and sums[path][number] is None
    ]
    for group, table in read_row_groups(source, groups):
        lengths = _lengths(files, group, table)
        sums[group.path][group.number] = int(lengths.sum())
        if wants_lengths:
            parts[group.path].append(lengths.astype(np.int32))
    none = np.empty(0, np.int32)
    return replace(
        files,
        tokens=TokenCounts(
            packing.column,
            length_column,
            rows,
            {path: tuple(tokens or 0 for tokens in of_file) for path, of_file in sums.items()},
            {path: np.concatenate([none, *of_file]) for path, of_file in parts.items()} if wants_lengths else None,
        ),
    )


def _are_of(
    known: TokenCounts,
    rows: Mapping[str, tuple[int, ...]],
    column: str,
    length_column: str | None,
    *,
    wants_lengths: bool,
) -> bool:
    """Whether tokens were counted of the same documents, in the same way."""
    is_same = (known.column, known.length_column, known.rows) == (column, length_column, rows)
    return is_same and (known.lengths is not None or not wants_lengths)


def _lengths(files: OpenedFiles, group: FileRowGroup, table: pa.Table) -> npt.NDArray[np.int64]:
    """Return the tokens of each document of a row group, given the column that has, or says, them."""
    name = table.column_names[0]
    if not pa.types.is_integer(table[name].type):
        return list_lengths(table, name)
    place = files.row_group_name(group.path, group.number)
    if table[name].null_count:
        raise ColumnError(f"count_tokens={name!r}: that column has nulls, which are no numbers of tokens ({place})")
    lengths: npt.NDArray[np.int64] = table[name].cast(pa.int64()).to_numpy()
    for wrong in (lengths.min(initial=0), lengths.max(initial=0)):
        if not 0 <= wrong <= MOST_TOKENS:
            raise ColumnError(f"count_tokens={name!r}: {wrong} is no number of tokens of a document ({place})")
    return lengths
