"""What users exclude: rows by file and number, checked against the files."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torch_dataloader_utils.dataset.discovery import require_selectable, with_expression
from torch_dataloader_utils.dataset.ledger import LedgerDataset
from torch_dataloader_utils.dataset.options import Filters, parse_filters
from torch_dataloader_utils.errors import cut, nearest, shown
from torch_dataloader_utils.formats.opened_files import OpenedFiles, expression_digest, files_of
from torch_dataloader_utils.loader.arguments import PathLike
from torch_dataloader_utils.planning.excluded import NO_BOUNDS, Bounds, ExcludedRows, bounds_of

RowsByPath: TypeAlias = Iterable[tuple[PathLike, int]] | Mapping[PathLike, Iterable[int]]
"""Rows, each as its file's path relative to the dataset's root and its number in the file, from 0."""


class ExcludingDataset(LedgerDataset):
    """A dataset of which users exclude rows."""

    @property
    def loses_rows(self) -> bool:
        """Whether batches of the current epoch lose rows that were excluded in it: a step may have none left."""
        excluded = self._epoch_state.excluded_in(self._epoch_state.epoch)
        return bool(excluded.removed or excluded.removed_by)

    def exclude(self, rows: RowsByPath | Filters) -> None:
        """Exclude bad or withdrawn rows, from the next ``iter`` on. They stay excluded; states record them.

        In the current epoch, also after each resume of it, excluded rows keep their place: batches have the rows that
        they would have had, without the excluded ones. A batch of which no row is left is not delivered, but counts as
        a step. From the next epoch on excluded rows are left out before the epoch is planned: ranks are balanced, and
        ``len(loader)`` counts, without them. The same call has to be made on all ranks.

        A state that is loaded brings along what was excluded when it was saved. What this dataset excludes and the
        state does not is excluded in the state's epoch, as if the call came after the load.

        Args:
            rows: Pairs of a path and a row number, or a mapping from paths to row numbers. Paths are relative to the
                dataset's root, with forward slashes; the rows of a file count from 0, without deleted rows of tables.
                This is what `get_metrics` returns as ``uneven_rows_dropped``. Or an expression, or lists of conditions,
                as `filters` has them: rows for which it is true are excluded. From the next epoch on it is as a part of
                the filter, so that only reading tells how many rows there are. A state names an expression, and cannot
                run it: in a new process exclude it again before `load_state_dict`.

        Raises:
            TypeError: If `rows` is something else.
            ValueError: If there is a transform, or rows are packed; if a file or a row does not exist; if the rows of
                text files were not counted; or if ranks are balanced (`uneven_ranks`) and `rows` is an expression.
            ColumnError: If the expression does not fit the columns, or rows of a column cannot be left out.
        """
        files = files_of(self._opened_files, "exclude")
        if self._stream.options.packing is not None:
            raise ValueError("exclude: rows cannot be excluded beside packing; leave them out with filters")
        if files.transform is not None:
            msg = "exclude is not possible with a transform: of which rows a row was made is not known; leave rows "
            raise ValueError(f"{msg}out by `filters`, or in the transform")
        require_selectable(files.schema)
        if not is_expression(rows):
            self._epoch_state.exclude(parse_rows(rows, files))
            return
        expression = parse_filters(rows)
        opened_files = with_expression(files, expression, self._stream.options)
        self._epoch_state.exclude_by(opened_files, expression_digest(expression))
        self.use_files(opened_files)


EXPECTED = "expected pairs of a path and a row number, or a mapping from paths to row numbers; or an expression"


def is_expression(value: Any) -> bool:
    """Whether a value is an expression, or conditions as `filters` has them, and not pairs of a path and a row."""
    if isinstance(value, pc.Expression):
        return True
    first = value[0] if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and value else None
    match first:
        case [str(), str(), _] | [[*_], *_]:
            return True
    return False


def parse_rows(rows: Any, files: OpenedFiles) -> ExcludedRows:
    """Return the rows that a user names.

    Raises:
        TypeError: If they are not pairs of a path and a row number, and not a mapping of paths to row numbers.
        ValueError: If a file or a row does not exist, or if the files' rows are not counted.
    """
    if files.format.unknown_rows is not None:
        msg = f"exclude: rows cannot be named by their numbers, since {files.format.unknown_rows}; "
        raise ValueError(msg + "an expression can name them")
    bounds: dict[str, Bounds] = {}
    for path, numbers in _by_path(rows).items():
        name = _relative_path(path)
        count = files.manifest.rows_of.get(name)
        if count is None:
            known = nearest(name, files.manifest.rows_of) if len(files.manifest.files) <= MOST_COMPARED else ""
            msg = f"exclude: the dataset has no file {cut(name)!r}; paths are relative to {files.manifest.root}"
            raise ValueError(f"{msg}{known}")
        of_file = _bounds(name, numbers, count)
        # A mapping may have a path twice, as a text and as a Path.
        before = ExcludedRows({name: bounds.get(name, NO_BOUNDS)})
        bounds.update(before.union(ExcludedRows({name: of_file})).bounds)
    return ExcludedRows(bounds)


MOST_COMPARED = 1000
"""Among more paths than this the most similar one is not looked for."""


def _by_path(rows: Any) -> Mapping[Any, Any]:
    """Return the row numbers of each path."""
    if isinstance(rows, Mapping):
        return rows
    if isinstance(rows, (str, bytes)) or not isinstance(rows, Iterable):
        raise TypeError(f"exclude({shown(rows)}): {EXPECTED}")
    by_path: defaultdict[Any, list[Any]] = defaultdict(list)
    for pair in rows:
        if not isinstance(pair, Sequence) or isinstance(pair, (str, bytes)) or len(pair) != len(("path", "row")):
            raise TypeError(f"exclude: {shown(pair)} is no pair of a path and a row number: {EXPECTED}")
        path, row = pair
        by_path[_relative_path(path)].append(row)
    return by_path


def _relative_path(path: Any) -> str:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"exclude: {shown(path)} is {type(path).__name__}, expected a path: {EXPECTED}")
    return os.fspath(path)


def _bounds(path: str, numbers: Any, count: int) -> Bounds:
    """Return the ranges of row numbers of a file that has so many rows."""
    values: Any
    if isinstance(numbers, (range, np.ndarray)):
        values = numbers
    elif isinstance(numbers, (pa.Array, pa.ChunkedArray)):
        values = numbers.to_pylist()
    elif isinstance(numbers, Iterable) and not isinstance(numbers, (str, bytes)):
        values = list(numbers)
    else:
        raise _no_row_numbers(path, numbers)
    try:
        array = np.array([values[0], values[-1]]) if isinstance(values, range) and values else np.asarray(values)
    except ValueError:  # lists of different lengths
        raise _no_row_numbers(path, numbers) from None
    if array.size and (array.dtype.kind not in "iuO" or array.ndim != 1):
        raise _no_row_numbers(path, numbers)
    if array.dtype.kind == "O" and not all(isinstance(row, Integral) for row in array):
        raise _no_row_numbers(path, numbers)
    for row in [array.min(), array.max()] if array.size else []:
        if not 0 <= row < count:
            raise ValueError(f"exclude: {cut(path)} has no row {row}: its {count} rows have the numbers from 0")
    return bounds_of(values)


def _no_row_numbers(path: str, numbers: Any) -> TypeError:
    return TypeError(f"exclude: the rows of {cut(path)} are {shown(numbers)}, expected row numbers")
