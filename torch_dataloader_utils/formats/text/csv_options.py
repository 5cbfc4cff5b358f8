"""What users tell pyarrow.csv, checked, and made its option objects where they are used: they cannot be pickled."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from pyarrow import csv

from torch_dataloader_utils.errors import nearest

__all__ = [
    "checked",
    "column_types",
    "convert_options",
    "encoding_of",
    "is_ascii_like",
    "parse_options",
    "quote_of",
    "read_options",
]


READ = (
    "block_size",
    "skip_rows",
    "skip_rows_after_names",
    "column_names",
    "autogenerate_column_names",
    "encoding",
)


PARSE = ("delimiter", "quote_char", "double_quote", "escape_char", "newlines_in_values", "ignore_empty_lines")


CONVERT = (
    "check_utf8",
    "column_types",
    "default_column_type",
    "null_values",
    "true_values",
    "false_values",
    "decimal_point",
    "strings_can_be_null",
    "quoted_strings_can_be_null",
    "auto_dict_encode",
    "auto_dict_max_cardinality",
    "timestamp_parsers",
)


OURS = {
    "use_threads": "it is set by how the dataset is read",
    "include_columns": "name them by `columns`",
    "include_missing_columns": "a column that a file lacks is null",
    "invalid_row_handler": "rows are never left out",
}


ISO8601 = "pyarrow.csv.ISO8601"
"""Stands for pyarrow's parser of timestamps, which cannot be sent to a process."""


def checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as they can be sent to a process.

    Raises:
        ValueError: If there is no such option, it is not the user's to set, or its value makes no sense.
    """
    known = (*READ, *PARSE, *CONVERT)
    for name in options:
        if name in OURS:
            msg = f"format_options[{name!r}] cannot be set: {OURS[name]}"
            raise ValueError(msg)
        if name not in known:
            msg = f"format_options has no {name!r} for csv{nearest(name, known)}"
            raise ValueError(msg)
    try:
        told = {name: _sendable(name, value) for name, value in options.items()}
        read_options(told).validate()
        parse_options(told).validate()
        convert_options(told).validate()
        encoding_of(told)
    except (TypeError, ValueError, LookupError, AttributeError, pa.ArrowException) as error:
        msg = f"format_options: {error}"
        raise ValueError(msg) from None
    return told


def _sendable(name: str, value: Any) -> Any:
    """Return an option as it can be sent to a process."""
    if name == "column_types" and value is not None:
        return dict(column_types({name: value}))
    if name == "timestamp_parsers" and value is not None:
        return [ISO8601 if one is csv.ISO8601 else one for one in value]
    return value


def column_types(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the types that users gave to columns."""
    types = options.get("column_types") or {}
    if isinstance(types, Mapping):
        return types
    return {column.name: column.type for column in pa.schema(types)}


def read_options(options: Mapping[str, Any], **own: Any) -> csv.ReadOptions:
    """Return pyarrow's options, those of this package above the user's."""
    return csv.ReadOptions(**{name: options[name] for name in READ if name in options} | own)


def parse_options(options: Mapping[str, Any]) -> csv.ParseOptions:
    """Return pyarrow's options."""
    return csv.ParseOptions(**{name: options[name] for name in PARSE if name in options})


def convert_options(options: Mapping[str, Any], **own: Any) -> csv.ConvertOptions:
    """Return pyarrow's options, those of this package above the user's."""
    told = {name: options[name] for name in CONVERT if name in options}
    if told.get("timestamp_parsers"):
        told["timestamp_parsers"] = [csv.ISO8601 if one == ISO8601 else one for one in told["timestamp_parsers"]]
    return csv.ConvertOptions(**told | own)


def quote_of(options: Mapping[str, Any]) -> bytes:
    """Return the character that quotes values; none where that is switched off."""
    return str(options.get("quote_char", '"') or "").encode()


def encoding_of(options: Mapping[str, Any]) -> str:
    """Return the encoding, by Python's name of it."""
    return codecs.lookup(str(options.get("encoding") or "utf8")).name


def is_ascii_like(options: Mapping[str, Any]) -> bool:
    """Whether a text's bytes are its characters, as far as it takes to find line ends and quotes."""
    return encoding_of(options) in ("utf-8", "ascii")
