"""Partition columns: their values are the directories of a file's path, which pyarrow parses.

pyarrow infers 32-bit integers and strings (see
https://arrow.apache.org/docs/python/generated/pyarrow.dataset.HivePartitioning.html). This module also infers wider
integers and dates: a column has the narrowest type that all its values in the dataset fit.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterable, Mapping
from datetime import date
from typing import Any, Literal, TypeAlias
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.dataset as pads

from torch_dataloader_utils.dataset.discovery import Annotations
from torch_dataloader_utils.errors import ColumnError

Partitioning: TypeAlias = Literal["hive"] | pads.Partitioning
NULL = "__HIVE_DEFAULT_PARTITION__"
"""The value that Hive writes for null."""

INTEGER = re.compile(r"-?[0-9]+")
DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


def require_partitioning(value: object) -> Partitioning | None:
    """Return the argument `partitioning`, or raise."""
    if value is None or value == "hive" or isinstance(value, pads.Partitioning):
        return value
    msg = f"partitioning={value!r}: expected 'hive', or a pyarrow.dataset.Partitioning with a schema, such as "
    msg += "pyarrow.dataset.partitioning(pyarrow.schema([('year', pyarrow.int32())]))"
    raise TypeError(msg)


def is_hive(partitioning: Partitioning | None) -> bool:
    """Whether directories are named ``key=value``, so that any of them can become a column."""
    return partitioning == "hive" or isinstance(partitioning, pads.HivePartitioning)


def partition_columns(paths: Mapping[str, str], partitioning: Partitioning | None, root: str) -> Annotations:
    """Return the partition columns of files and their values.

    `paths` has for each file, by its path relative to the dataset's root, the path whose directories become columns.

    Raises:
        ColumnError: If a directory's value does not fit its column's type; the message names the file.
    """
    if partitioning is None:
        return Annotations()
    parser: pads.Partitioning = partitioning
    if isinstance(partitioning, str):
        directories = dict.fromkeys(map(posixpath.dirname, paths.values()))
        parser = pads.HivePartitioning(_inferred(directories), null_fallback=NULL, segment_encoding="uri")
    names = parser.schema.names
    constants = {}
    known: dict[str, tuple[Any, ...]] = {}
    for path, parsed in paths.items():
        key = parsed if isinstance(parser, pads.FilenamePartitioning) else posixpath.dirname(parsed)
        if key not in known:
            values = _parse(parser, parsed, f"{path} under {root}")
            known[key] = tuple(values.get(name) for name in names)
        constants[path] = known[key]
    columns = pa.schema([(column.name, _without_dictionary(column.type)) for column in parser.schema])
    return Annotations(constant_schema=columns, constants=constants)


def _without_dictionary(dtype: pa.DataType) -> pa.DataType:
    """Return the type of a dictionary's values: each file would have another dictionary."""
    return dtype.value_type if pa.types.is_dictionary(dtype) else dtype


def _parse(partitioning: pads.Partitioning, path: str, shown: str) -> Mapping[str, Any]:
    try:
        return pads.get_partition_keys(partitioning.parse(path))  # type: ignore[no-any-return]
    except (pa.ArrowException, ValueError) as error:
        msg = f"the directories of {shown} do not fit the partitioning {partitioning.schema}: {error}"
        raise ColumnError(msg) from None


def _inferred(directories: Iterable[str]) -> pa.Schema:
    """Return the columns that Hive's directories become, each with the narrowest type that all its values fit."""
    values: dict[str, dict[str, None]] = {}
    for directory in directories:
        for name, value in _segments(directory).items():
            values.setdefault(name, {})[value] = None
    return pa.schema([(name, _narrowest_type(found.keys() - {NULL})) for name, found in values.items()])


def _segments(directory: str) -> dict[str, str]:
    """Return the keys and values of a directory, URL-decoded, in order."""
    values: dict[str, str] = {}
    for segment in directory.split("/"):
        name, equals, value = map(unquote, segment.partition("="))
        if equals and name in values:
            raise ColumnError(f"the directory {directory} has two values of the partition column {name!r}")
        if equals:
            values[name] = value
    return values


def _narrowest_type(values: Collection[str]) -> pa.DataType:
    if values and all(map(INTEGER.fullmatch, values)):
        numbers = [int(value) for value in values]
        for dtype, limit in ((pa.int32(), 2**31), (pa.int64(), 2**63)):
            if -limit <= min(numbers) and max(numbers) < limit:
                return dtype
    elif values and all(map(_is_date, values)):
        return pa.date32()
    return pa.string()


def _is_date(value: str) -> bool:
    if not DATE.fullmatch(value):
        return False
    try:
        date.fromisoformat(value)
    except ValueError:
        return False
    return True
