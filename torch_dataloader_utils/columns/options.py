"""How columns are wanted, as the user says it: their form in a batch, and what becomes of nulls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

__all__ = ["Codes", "ColumnFormat", "ColumnOptions", "Padded", "parse_column_options"]


@dataclass(frozen=True, slots=True)
class Padded:
    """Lists as a tensor or an array in which each row is as long as the longest of its batch.

    Attributes:
        value: What follows the values of a shorter row.
        length: The length of all rows, in place of the longest of a batch; a longer row is an error.
    """

    value: Any = 0
    length: int | None = None

    def __post_init__(self) -> None:
        if self.length is not None and (type(self.length) is not int or self.length < 0):
            msg = f"Padded(length={self.length!r}): expected a number of values, or None for the longest of a batch"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class Codes:
    """Values as int64 codes: each value's place in a vocabulary.

    Attributes:
        vocabulary: The values, each once. A value outside it is an error when it is read.
    """

    vocabulary: Sequence[Any] = field(repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.vocabulary, (str, bytes)):
            msg = f"Codes({self.vocabulary!r}): expected a list of values"
            raise TypeError(msg)
        object.__setattr__(self, "vocabulary", tuple(self.vocabulary))
        if None in self.vocabulary:
            msg = "Codes([..., None]): a null has no code; fill_nulls or mask_nulls say what becomes of it"
            raise ValueError(msg)
        if len(set(self.vocabulary)) < len(self.vocabulary):
            twice = next(value for place, value in enumerate(self.vocabulary) if value in self.vocabulary[:place])
            msg = f"Codes([...]): {twice!r} stands in the vocabulary more than once"
            raise ValueError(msg)


NamedFormat: TypeAlias = Literal["list", "padded", "packed", "float64", "int64"]


ColumnFormat: TypeAlias = NamedFormat | Padded | Codes
"""How a column is delivered, where it is not in the way of its type."""


@dataclass(frozen=True, slots=True)
class ColumnOptions:
    """What was chosen for columns, by name.

    Attributes:
        output_format: What a batch is made of.
        formats: The form of columns.
        fills: What stands for null.
        masks: The columns beside which a mask of their nulls is delivered.
    """

    output_format: str
    formats: Mapping[str, ColumnFormat] = field(default_factory=dict)
    fills: Mapping[str, Any] = field(default_factory=dict)
    masks: tuple[str, ...] = ()


def parse_column_options(
    output_format: str, column_formats: object, fill_nulls: object, mask_nulls: object
) -> ColumnOptions:
    """Check what does not depend on the columns.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If there is no such format, or a name stands there twice.
    """
    formats = _mapping(column_formats, "column_formats", "{'tokens': 'padded'}")
    for name, wanted in formats.items():
        _require_format(name, wanted)
    fills = _mapping(fill_nulls, "fill_nulls", "{'age': -1}")
    for name, value in fills.items():
        if value is None:
            msg = f"fill_nulls={{{name!r}: None}}: expected a value to stand for null"
            raise ValueError(msg)
    masks = () if mask_nulls is None else mask_nulls
    if isinstance(masks, (str, bytes)) or not isinstance(masks, Sequence) or not all(type(one) is str for one in masks):
        msg = f"mask_nulls={mask_nulls!r}: expected a list of column names"
        raise TypeError(msg)
    if len(set(masks)) < len(masks):
        msg = f"mask_nulls={mask_nulls!r} names a column twice"
        raise ValueError(msg)
    return ColumnOptions(output_format, formats, fills, tuple(masks))


def _mapping(value: object, name: str, example: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(type(key) is str for key in value):
        msg = f"{name}={value!r}: expected a dictionary by column name such as {example}"
        raise TypeError(msg)
    return dict(value)


def _require_format(name: str, wanted: object) -> None:
    if isinstance(wanted, (Padded, Codes)):
        return
    named = get_args(NamedFormat)
    msg = f"column_formats={{{name!r}: {wanted!r}}}: expected one of {', '.join(map(repr, named))}, Padded or Codes"
    if not isinstance(wanted, str):
        raise TypeError(msg)
    if wanted not in named:
        raise ValueError(msg)
