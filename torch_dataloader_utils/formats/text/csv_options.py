"""Users' options for pyarrow.csv: checked, and made into its option objects only in use, as these cannot be pickled."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from pyarrow import csv

from torch_dataloader_utils.formats.text.format import require_known_options

READ = ("block_size", "skip_rows", "skip_rows_after_names", "column_names", "autogenerate_column_names", "encoding")
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

ERRORS_END_THREADS = tuple(map(int, pa.__version__.split(".")[:2])) >= (23, 0)
"""Whether pyarrow's threads end after an error. Before 23.0, each of them may wait for the others for ever:
https://github.com/apache/arrow/pull/48742."""

ISO8601 = "pyarrow.csv.ISO8601"
"""Stands for pyarrow's parser of timestamps, which cannot be pickled."""


def checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options that can be pickled.

    Raises:
        ValueError: If there is no such option, users cannot set it, or its value is not valid.
    """
    require_known_options(options, (*READ, *PARSE, *CONVERT), OURS, "csv")
    try:
        given = {name: _sendable(name, value) for name, value in options.items()}
        read_options(given).validate()
        parse_options(given).validate()
        convert_options(given).validate()
        encoding_of(given)
    except (TypeError, ValueError, LookupError, AttributeError, pa.ArrowException) as error:
        raise ValueError(f"format_options: {error}") from None
    return given


def _sendable(name: str, value: Any) -> Any:
    """Return an option's value that can be pickled."""
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


def read_options(options: Mapping[str, Any], *, use_threads: bool = True, **fixed: Any) -> csv.ReadOptions:
    """Return pyarrow's options; those that this package fixes override the user's."""
    fixed["use_threads"] = use_threads and ERRORS_END_THREADS
    return csv.ReadOptions(**{name: options[name] for name in READ if options.get(name) is not None} | fixed)


def parse_options(options: Mapping[str, Any]) -> csv.ParseOptions:
    """Return pyarrow's options."""
    return csv.ParseOptions(**{name: options[name] for name in PARSE if name in options})


def convert_options(options: Mapping[str, Any], **fixed: Any) -> csv.ConvertOptions:
    """Return pyarrow's options; those that this package fixes override the user's."""
    given = {name: options[name] for name in CONVERT if name in options}
    if given.get("timestamp_parsers"):
        given["timestamp_parsers"] = [csv.ISO8601 if one == ISO8601 else one for one in given["timestamp_parsers"]]
    return csv.ConvertOptions(**given | fixed)


def quote_of(options: Mapping[str, Any]) -> bytes:
    """Return the character that quotes values; empty if quoting is switched off. None stands for pyarrow's default."""
    quote = options.get("quote_char")
    return b'"' if quote is None else str(quote or "").encode()


def encoding_of(options: Mapping[str, Any]) -> str:
    """Return the encoding, by Python's name of it."""
    return codecs.lookup(str(options.get("encoding") or "utf8")).name


def is_ascii_like(options: Mapping[str, Any]) -> bool:
    """Whether line ends and quotes are single bytes that no other character has."""
    return encoding_of(options) in ("utf-8", "ascii")


def width_of(options: Mapping[str, Any]) -> int:
    """Return how many bytes a line end has."""
    encoding = encoding_of(options)
    return len("\n\n".encode(encoding)) - len("\n".encode(encoding))  # without a byte order mark


def end_of_lines(content: bytes, stop: int) -> int:
    """Return where the last line ends that does so before `stop`; 0 if none does. Line ends are single bytes."""
    line_feed = content.rfind(b"\n", 0, stop)
    return max(line_feed, content.rfind(b"\r", line_feed + 1, stop)) + 1


def without_cut_line(content: bytes, options: Mapping[str, Any]) -> bytes:
    """Return the beginning of a text up to its last line end; all of it if it has none or cannot be decoded."""
    encoding = encoding_of(options)
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(content)
    except UnicodeError:
        return content
    return text[: max(text.rfind("\n"), text.rfind("\r")) + 1].encode(encoding) or content
