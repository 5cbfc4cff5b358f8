"""From what users call a format, and its options, to a `Format`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

from torch_dataloader_utils.formats.base import Format
from torch_dataloader_utils.formats.orc import Orc
from torch_dataloader_utils.formats.parquet.format import Parquet
from torch_dataloader_utils.formats.text.csv import Csv
from torch_dataloader_utils.formats.text.footer import Cutting
from torch_dataloader_utils.formats.text.jsonl import JsonLines

__all__ = ["FORMATS", "FormatName", "choose_format", "require_known_rows"]

FormatName: TypeAlias = Literal["parquet", "orc", "csv", "json", "jsonl"]

FORMATS: tuple[str, ...] = get_args(FormatName)


def choose_format(
    name: str,
    options: object,
    *,
    count_rows: bool,
    cutting: Cutting,
    names_columns: bool,
) -> Format:
    """Return a format.

    Args:
        name: What users call it.
        options: Options of its parser: a dictionary, or None.
        count_rows: Whether to count the rows of text files.
        cutting: How finely large text files are cut.
        names_columns: Whether the user named the columns to deliver, so that rows may have others.

    Raises:
        ValueError: If an option does not exist, or makes no sense.
        TypeError: If the options are no dictionary.
    """
    if options is not None and not isinstance(options, Mapping):
        msg = f"format_options={options!r} is {type(options).__name__}, expected a dictionary"
        raise TypeError(msg)
    given: dict[str, Any] = dict(options or {})
    if name == "csv":
        return Csv(given, cutting, count_rows)
    if name in ("json", "jsonl"):
        return JsonLines(given, cutting, count_rows, names_columns)
    if given:
        msg = f"format_options={given!r}: format={name!r} has none; they are for 'csv', 'json' and 'jsonl'"
        raise ValueError(msg)
    return Orc() if name == "orc" else Parquet()


def require_known_rows(file_format: Format, wanted: Mapping[str, Any]) -> None:
    """Raise if an argument requires that the number of rows is known, and it is not.

    Args:
        file_format: The files' format.
        wanted: The arguments, by parameter; None where unset.
    """
    if file_format.unknown_rows is None:
        return
    for name, value in wanted.items():
        if value is not None:
            msg = f"{name}={value!r} has to know how many rows there are: {file_format.unknown_rows}"
            raise ValueError(msg)
