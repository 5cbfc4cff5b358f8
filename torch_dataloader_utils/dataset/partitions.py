"""Partition columns: values that the directories of a file's path stand for, parsed by pyarrow.

pyarrow infers integers of 32 bits and texts (see
https://arrow.apache.org/docs/python/generated/pyarrow.dataset.HivePartitioning.html). Here wider integers and dates are
found too, and a column has the type that all values of the dataset fit.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date
from typing import Any, Literal, TypeAlias
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.dataset as pads

from torch_dataloader_utils.dataset.discovery import Annotations
from torch_dataloader_utils.errors import ColumnError

__all__ = ["Partitioning", "partition_columns", "require_partitioning"]


Partitioning: TypeAlias = Literal["hive"] | pads.Partitioning


NULL = "__HIVE_DEFAULT_PARTITION__"
"""What Hive writes in place of a value that is null."""


INTEGER = re.compile(r"-?[0-9]+")


DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


def require_partitioning(value: object) -> Partitioning | None:
    """Return the argument `partitioning`, or raise."""
    if value is None or value == "hive" or isinstance(value, pads.Partitioning):
        return value
    msg = f"partitioning={value!r}: expected 'hive', or a pyarrow.dataset.Partitioning with a schema, such as "
    msg += "pyarrow.dataset.partitioning(pyarrow.schema([('year', pyarrow.int32())]))"
    raise TypeError(msg)


def partition_columns(paths: Sequence[str], partitioning: Partitioning | None, root: str) -> Annotations:
    """Return the partition columns of files and their values.

    Args:
        paths: The files, relative to the dataset's root: only directories below it stand for values.
        partitioning: How directories stand for values; None if they do not.
        root: The root, for people.

    Raises:
        ColumnError: If a directory does not stand for a value of its column's type; the message names the file.
    """
    if partitioning is None:
        return Annotations()
    parser: pads.Partitioning = partitioning
    if isinstance(partitioning, str):
        parser = pads.HivePartitioning(_inferred(paths), null_fallback=NULL, segment_encoding="uri")
    names = parser.schema.names
    values = {}
    known: dict[str, tuple[Any, ...]] = {}
    for path in paths:
        where = path if isinstance(parser, pads.FilenamePartitioning) else posixpath.dirname(path)
        if where not in known:
            found = _parsed(parser, path, root)
            known[where] = tuple(found.get(name) for name in names)
        values[path] = known[where]
    columns = pa.schema([_plain(column) for column in parser.schema])
    return Annotations(constant_schema=columns, constants=values)


def _plain(column: pa.Field) -> pa.Field:
    """Return a column without dictionary: its values are few, but its dictionary would be another in every file."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    return pa.field(column.name, kind)


def _parsed(partitioning: pads.Partitioning, path: str, root: str) -> Mapping[str, Any]:
    try:
        return pads.get_partition_keys(partitioning.parse(path))  # type: ignore[no-any-return]
    except (pa.ArrowException, ValueError) as error:
        msg = f"the directories of {path} under {root} do not fit the partitioning {partitioning.schema}: {error}"
        raise ColumnError(msg) from None


def _inferred(paths: Iterable[str]) -> pa.Schema:
    """Return the columns that Hive's directories stand for, each with the narrowest type that all of its values fit."""
    texts: dict[str, dict[str, None]] = {}
    for directory in dict.fromkeys(posixpath.dirname(path) for path in paths):
        for name, text in _segments(directory):
            texts.setdefault(name, {})[text] = None
    return pa.schema([(name, _kind([text for text in found if text != NULL])) for name, found in texts.items()])


def _segments(directory: str) -> Iterator[tuple[str, str]]:
    """Yield the keys and values of a directory, decoded, in order."""
    seen = set()
    for segment in directory.split("/"):
        name, mark, text = segment.partition("=")
        if not mark:
            continue
        name, text = unquote(name), unquote(text)
        if name in seen:
            msg = f"the directory {directory} has two values of the partition column {name!r}"
            raise ColumnError(msg)
        seen.add(name)
        yield name, text


def _kind(texts: Sequence[str]) -> pa.DataType:
    if texts and all(map(INTEGER.fullmatch, texts)):
        values = [int(text) for text in texts]
        for kind, limit in ((pa.int32(), 2**31), (pa.int64(), 2**63)):
            if -limit <= min(values) and max(values) < limit:
                return kind
    elif texts and all(map(_is_date, texts)):
        return pa.date32()
    return pa.string()


def _is_date(text: str) -> bool:
    if not DATE.fullmatch(text):
        return False
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True
