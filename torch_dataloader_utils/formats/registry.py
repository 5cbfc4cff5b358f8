"""From what users call a format, and its options, to a `Format`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

from torch_dataloader_utils.errors import nearest
from torch_dataloader_utils.formats.base import Format
from torch_dataloader_utils.formats.orc import Orc
from torch_dataloader_utils.formats.parquet.format import Parquet
from torch_dataloader_utils.formats.text.csv import Csv
from torch_dataloader_utils.formats.text.footer import Cutting
from torch_dataloader_utils.formats.text.jsonl import JsonLines

FormatName: TypeAlias = Literal["parquet", "orc", "csv", "json", "jsonl"]
VERIFICATION = "page_checksum_verification"
FORMATS: tuple[str, ...] = get_args(FormatName)


def choose_format(name: str, options: object, *, count_rows: bool, cutting: Cutting, names_columns: bool) -> Format:
    """Return a format, by what users call it.

    `names_columns` says whether the user named the columns to deliver, so that rows may have others.

    Raises:
        ValueError: If an option does not exist, or makes no sense.
        TypeError: If the options are no dictionary.
    """
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"format_options={options!r} is {type(options).__name__}, expected a dictionary")
    given: dict[str, Any] = dict(options or {})
    if name == "csv":
        return Csv(given, cutting, count_rows)
    if name in ("json", "jsonl"):
        return JsonLines(given, cutting, count_rows, names_columns)
    if name == "parquet":
        return Parquet(**_parquet_options(given))
    if given:
        raise ValueError(f"format_options={given!r}: format='orc' has none")
    return Orc()


def _parquet_options(given: dict[str, Any]) -> dict[str, bool]:
    """Return the only option of Parquet, by pyarrow's name, if it is given."""
    for name, value in given.items():
        if name != VERIFICATION:
            raise ValueError(f"format_options has no {name!r} for format='parquet'{nearest(name, [VERIFICATION])}")
        if not isinstance(value, bool):
            raise TypeError(f"format_options: {name}={value!r} is {type(value).__name__}, expected True or False")
    return given


def require_known_rows(file_format: Format, wanted: Mapping[str, Any]) -> None:
    """Raise if an argument that is set (not None) needs the number of rows to be known, and it is not."""
    for name, value in wanted.items():
        if value is not None and file_format.unknown_rows is not None:
            raise ValueError(f"{name}={value!r} has to know how many rows there are: {file_format.unknown_rows}")
