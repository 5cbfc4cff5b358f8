"""What a command has found: a plain value, and the same as blocks of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, TypeAlias

from torch_dataloader_utils.errors import printable

FINE, MISMATCH, UNUSABLE = 0, 1, 2
"""Exit codes: nothing wrong, a mismatch, wrong usage or input that cannot be read."""

Tone: TypeAlias = Literal["plain", "good", "warning", "bad", "dim"]
"""What a text is about; a terminal shows it as a colour."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A text with a tone, in a table or among facts."""

    text: str
    tone: Tone = "plain"


Text: TypeAlias = str | Cell


@dataclass(frozen=True, slots=True)
class Line:
    """A line of text, or a paragraph."""

    text: str
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values, one pair a line."""

    rows: Sequence[tuple[str, Text]]
    title: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under column names.

    Attributes:
        columns: The names.
        rows: The texts of each row.
        title: What stands above the table.
        left: Columns whose texts begin at the left edge; those of all others end at the right edge, as numbers do.
        note: What stands below the table, such as how many rows are not shown.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Text]]
    title: str = ""
    left: frozenset[str] = frozenset()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Raw:
    """Text for a program, printed as it is: a script for a shell."""

    text: str


Block: TypeAlias = Line | Facts | Table | Raw


@dataclass(frozen=True, slots=True)
class Report:
    """What a command has found.

    Attributes:
        value: For ``--json``: dataclasses, dictionaries, lists, NumPy's arrays and numbers, strings, None.
        blocks: The same as text.
        exit_code: `FINE` or `MISMATCH`.
    """

    value: Any
    blocks: Sequence[Block]
    exit_code: int = FINE


def plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # NumPy's
        return plain(value.tolist())
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def words(text: Text) -> str:
    """Return a text in one line, with control characters escaped."""
    return printable(text.text if isinstance(text, Cell) else text).replace("\n", "\\n").replace("\t", "\\t")


def count(number: int) -> str:
    """Return a number with separators: 1,234,567."""
    return f"{number:,}"


def size(number: float) -> str:
    """Return a number of bytes with a unit: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:  # noqa: PLR2004 - bytes in a KiB
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def rate(number: float) -> str:
    """Return a number of rows in a second in few characters: 1.25 M."""
    for unit, least in (("M", 1e6), ("k", 1e3)):
        if number >= least:
            return f"{number / least:.3g} {unit}"
    return f"{number:.0f}"


def plural(number: int, noun: str, nouns: str = "") -> str:
    """Return a number with its noun: 1 file, 2 files."""
    return f"{count(number)} {noun if number == 1 else nouns or noun + 's'}"
