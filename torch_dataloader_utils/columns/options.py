"""What users choose for columns: their form in a batch, and how nulls are delivered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args


@dataclass(frozen=True, slots=True)
class Padded:
    """Lists as one tensor or array in which every row is as long as the longest row of its batch.

    Attributes:
        value: The value that shorter rows are filled up with, after their own values.
        length: A fixed length for all rows, in place of the longest of a batch; a longer row is an error.
    """

    value: Any = 0
    length: int | None = None

    def __post_init__(self) -> None:
        if self.length is not None and (type(self.length) is not int or self.length < 0):
            msg = f"Padded(length={self.length!r}): expected a number of values, or None for the longest of a batch"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class Codes:
    """Values as int64 codes: the index of each value in a vocabulary.

    Attributes:
        vocabulary: The values, each once. A value that is not among them is an error when it is read.
    """

    vocabulary: Sequence[Any] = field(repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.vocabulary, (str, bytes)):  # a sequence too, but of characters
            raise TypeError(f"Codes({self.vocabulary!r}): expected a list of values")
        object.__setattr__(self, "vocabulary", tuple(self.vocabulary))
        if None in self.vocabulary:
            msg = "Codes([..., None]): a null has no code; choose with fill_nulls or mask_nulls how it is delivered"
            raise ValueError(msg)
        if len(set(self.vocabulary)) < len(self.vocabulary):
            twice = next(value for index, value in enumerate(self.vocabulary) if value in self.vocabulary[:index])
            raise ValueError(f"Codes([...]): {twice!r} appears in the vocabulary more than once")


PackingStrategy: TypeAlias = Literal["concat", "best_fit"]
PACKING_STRATEGIES: tuple[PackingStrategy, ...] = get_args(PackingStrategy)

PackedOutput: TypeAlias = Literal["document_ids", "position_ids", "cu_seqlens", "max_seqlen"]
PACKED_OUTPUTS: tuple[PackedOutput, ...] = get_args(PackedOutput)


@dataclass(frozen=True, slots=True)
class Packing:
    """Documents packed into sequences of one length.

    Attributes:
        column: The column of lists of tokens.
        length: Tokens of a sequence.
        split_documents: Whether documents may be cut. ``"concat"`` cuts them wherever a sequence ends, ``"best_fit"``
            only those that are longer than a sequence. If not, longer ones are dropped, and counted.
        separator: A token to append to each document, of which it is a part; None for none. Where other columns are
            packed alike, a dictionary may give each its own.
        pad_value: What fills a sequence up. It may be a dictionary, too.
        strategy: ``"concat"`` lays documents end to end; ``"best_fit"`` puts each where it leaves the least space.
        outputs: What is delivered in addition to the tokens.
    """

    column: str
    length: int
    split_documents: bool = True
    separator: int | Mapping[str, int] | None = None
    pad_value: int | Mapping[str, int] = 0
    strategy: PackingStrategy = "concat"
    outputs: Sequence[PackedOutput] = PACKED_OUTPUTS

    def __post_init__(self) -> None:
        if not isinstance(self.column, str):
            raise TypeError(f"Packing({self.column!r}): expected the name of a column")
        if type(self.length) is not int or self.length < 1:
            raise ValueError(f"Packing(length={self.length!r}): expected a number of tokens, at least 1")
        if self.strategy not in PACKING_STRATEGIES:
            raise ValueError(f"Packing(strategy={self.strategy!r}): expected one of {', '.join(PACKING_STRATEGIES)}")
        if isinstance(self.outputs, str) or not set(self.outputs) <= set(PACKED_OUTPUTS):
            msg = f"Packing(outputs={self.outputs!r}): expected a list of some of {', '.join(PACKED_OUTPUTS)}"
            raise ValueError(msg)
        object.__setattr__(self, "outputs", tuple(self.outputs))
        for name, value in (("separator", self.separator), ("pad_value", self.pad_value)):
            self._require_numbers(name, value)

    def _require_numbers(self, name: str, value: Any) -> None:
        if not isinstance(value, Mapping) and value is None and name == "separator":
            return
        for number in value.values() if isinstance(value, Mapping) else [value]:
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise TypeError(f"Packing({name}={value!r}): expected a number, or a dictionary of one for each column")

    def separator_of(self, name: str) -> int | None:
        """Return what is appended to each row of a column."""
        return self.separator[name] if isinstance(self.separator, Mapping) else self.separator

    def pad_value_of(self, name: str) -> int:
        """Return what fills up a column."""
        return self.pad_value[name] if isinstance(self.pad_value, Mapping) else self.pad_value


NamedFormat: TypeAlias = Literal["list", "padded", "packed", "float64", "int64"]

ColumnFormat: TypeAlias = NamedFormat | Padded | Codes
"""How a column is delivered, if not in the default form of its type."""


@dataclass(frozen=True, slots=True)
class ColumnOptions:
    """What the user chose for columns: their formats, the values that fill nulls, and which get a mask of nulls."""

    output_format: str
    formats: Mapping[str, ColumnFormat] = field(default_factory=dict)
    fills: Mapping[str, Any] = field(default_factory=dict)
    masks: tuple[str, ...] = ()


def parse_column_options(
    output_format: str, column_formats: object, fill_nulls: object, mask_nulls: object
) -> ColumnOptions:
    """Check everything that can be checked before the columns are known.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a format does not exist, a null is to be filled with null, or a mask is requested twice.
    """
    formats = _by_column(column_formats, "column_formats", "{'tokens': 'padded'}")
    for name, column_format in formats.items():
        _require_format(name, column_format)
    fills = _by_column(fill_nulls, "fill_nulls", "{'age': -1}")
    for name, value in fills.items():
        if value is None:
            raise ValueError(f"fill_nulls={{{name!r}: None}}: expected a value that replaces null")
    masks: Any = () if mask_nulls is None else mask_nulls
    is_list = isinstance(masks, Sequence) and not isinstance(masks, (str, bytes))
    if not is_list or any(type(name) is not str for name in masks):
        raise TypeError(f"mask_nulls={mask_nulls!r}: expected a list of column names")
    if len(set(masks)) < len(masks):
        raise ValueError(f"mask_nulls={mask_nulls!r} names a column twice")
    return ColumnOptions(output_format, formats, fills, tuple(masks))


def _by_column(value: object, name: str, example: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(type(key) is str for key in value):
        raise TypeError(f"{name}={value!r}: expected a dictionary by column name such as {example}")
    return dict(value)


def _require_format(name: str, column_format: object) -> None:
    if isinstance(column_format, (Padded, Codes)):
        return
    names = get_args(NamedFormat)
    msg = f"column_formats={{{name!r}: {column_format!r}}}: expected one of {', '.join(map(repr, names))}, "
    msg += "Padded or Codes"
    if not isinstance(column_format, str):
        raise TypeError(msg)
    if column_format not in names:
        raise ValueError(msg)
