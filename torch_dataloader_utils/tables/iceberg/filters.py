"""pyarrow's filters as pyiceberg's, so that its planning rules out partitions and files: weaker ones, never stronger.

Every row that a filter keeps has to pass what is made of it here. So whatever cannot be said in the same words, from
casts to comparisons of two columns, passes everything; and nothing is negated: what is weaker would become stronger.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.expressions import (
    AlwaysTrue,
    And,
    BooleanExpression,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNull,
    LessThan,
    LessThanOrEqual,
    NotEqualTo,
    NotNull,
    Or,
)
from pyiceberg.expressions.literals import (
    BooleanLiteral,
    DateLiteral,
    DoubleLiteral,
    Literal,
    LongLiteral,
    StringLiteral,
    TimestampLiteral,
)
from pyiceberg.schema import Schema
from pyiceberg.types import (
    BooleanType,
    DateType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    LongType,
    StringType,
    TimestampType,
    TimestamptzType,
)

__all__ = ["weaker_filter"]


METADATA = "\n-- schema metadata --\n"


LINE = re.compile(r"(call|end|field_ref|nested_field_ref|literal|options): '(.*)'")


COMPARISONS: dict[str, tuple[Callable[..., BooleanExpression], str]] = {
    "equal": (EqualTo, "equal"),
    "not_equal": (NotEqualTo, "not_equal"),
    "less": (LessThan, "greater"),
    "less_equal": (LessThanOrEqual, "greater_equal"),
    "greater": (GreaterThan, "less"),
    "greater_equal": (GreaterThanOrEqual, "less_equal"),
}
"""What pyarrow's comparisons are in pyiceberg, and what each is with its sides changed."""


LONG = 2**63


EXACT_DOUBLE = 2**53


def weaker_filter(
    filters: pc.Expression, schema: Schema, unordered: Collection[str | None] = frozenset()
) -> BooleanExpression:
    """Return a filter that every row passes which another keeps.

    Args:
        filters: The other.
        schema: The table's columns.
        unordered: Columns of which it must not ask whether they are less or greater than something.
    """
    names = {column.name: column.field_type for column in schema.fields}
    tree = None if any("\n" in name for name in schema.column_names) else _tree(filters)
    return AlwaysTrue() if tree is None else _Translation(names, unordered).of(tree)


@dataclass(frozen=True, slots=True)
class _Call:
    """A function of an expression, and what it is called with: other calls, names of columns, scalars."""

    function: str
    arguments: tuple[Any, ...]
    options: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class _Column:
    name: str


def _tree(filters: pc.Expression) -> Any:
    """Return an expression taken apart, or None where pyarrow writes it in a way that is not known.

    pyarrow has no way to look into an expression but for its serialised form: a record batch with the values that it
    holds, and the calls in the metadata of its schema, which has the same keys many times, so that only its text has
    them all.
    """
    batch = pa.ipc.open_file(filters.__reduce__()[1][0]).get_batch(0)
    show = {"truncate_metadata": False, "show_field_metadata": False}
    columns = batch.schema.remove_metadata().to_string(**show)
    text = batch.schema.to_string(**show)
    if not text.startswith(columns + METADATA):
        return None
    lines = [LINE.fullmatch(line) for line in text[len(columns + METADATA) :].splitlines()]
    if not all(lines):
        return None
    items = iter([(line[1], line[2]) for line in lines if line])
    try:
        return _node(*next(items), items, batch)
    except (StopIteration, ValueError, LookupError, AttributeError):
        return None


def _node(kind: str, text: str, items: Iterator[tuple[str, str]], batch: pa.RecordBatch) -> Any:
    """Return what an item begins, with all items that belong to it."""
    if kind == "field_ref":
        return _Column(text)
    if kind == "literal":
        return batch.column(int(text))[0]
    if kind == "nested_field_ref":
        for _ in range(int(text)):
            next(items)
        return None
    if kind != "call":
        raise ValueError(kind)
    arguments: list[Any] = []
    options = None
    for inner, value in items:
        if inner == "end":
            return _Call(text, tuple(arguments), options)
        if inner == "options":
            options = dict(batch.column(int(value))[0].items())
        else:
            arguments.append(_node(inner, value, items, batch))
    raise ValueError(text)


class _InexactError(Exception):
    """A value cannot be said in pyiceberg's words without becoming another."""


@dataclass(frozen=True, slots=True)
class _Translation:
    """Makes pyiceberg's filter of an expression that was taken apart.

    Attributes:
        types: The types of the table's columns.
        unordered: Columns of which it must not ask whether they are less or greater than something.
    """

    types: dict[str, IcebergType]
    unordered: Collection[str | None]

    def of(self, node: Any) -> BooleanExpression:
        """Return a filter that every row passes for which a node is true."""
        if not isinstance(node, _Call):
            return AlwaysTrue()
        if node.function in ("and_kleene", "and"):
            return And(*map(self.of, node.arguments))
        if node.function in ("or_kleene", "or"):
            return Or(*map(self.of, node.arguments))
        try:
            return self._test(node)
        except (_InexactError, LookupError):
            return AlwaysTrue()

    def _test(self, node: _Call) -> BooleanExpression:
        if node.function in COMPARISONS:
            return self._comparison(node)
        if node.function == "is_in":
            return self._is_in(node)
        negated = node.function == "invert"
        if negated and isinstance(node.arguments[0], _Call):
            node = node.arguments[0]
        if node.function not in ("is_null", "is_valid"):
            raise _InexactError
        if node.function == "is_null" and (node.options is None or node.options["nan_is_null"].as_py()):
            raise _InexactError  # NaN is taken, too, or it is not known whether it is
        name = self._name(node.arguments[0])
        return IsNull(name) if (node.function == "is_null") != negated else NotNull(name)

    def _name(self, node: Any) -> str:
        """Return a column's name, where it is one of the table's; a dot would lead pyiceberg into another."""
        if not isinstance(node, _Column) or node.name not in self.types or "." in node.name:
            raise _InexactError
        return node.name

    def _comparison(self, node: _Call) -> BooleanExpression:
        function = node.function
        column, value = node.arguments
        if isinstance(column, pa.Scalar):
            column, value = value, column
            function = COMPARISONS[function][1]
        name = self._name(column)
        literal = _literal(value, self.types[name])
        if function == "not_equal" and isinstance(self.types[name], (FloatType, DoubleType)):
            raise _InexactError  # NaN is not equal to anything, and statistics leave it out
        if name in self.unordered and function not in ("equal", "not_equal"):
            return NotNull(name)
        return COMPARISONS[function][0](name, literal)

    def _is_in(self, node: _Call) -> BooleanExpression:
        name = self._name(node.arguments[0])
        values = None if node.options is None else node.options.get("value_set")
        if values is None or not values.is_valid:
            raise _InexactError
        return In(name, {_literal(value, self.types[name]) for value in values.values})


def _literal(value: Any, kind: IcebergType) -> Literal[Any]:
    """Return a value as pyiceberg's, where a column of a type compares with both alike."""
    if not isinstance(value, pa.Scalar) or not value.is_valid:
        raise _InexactError
    own = value.type
    if isinstance(kind, BooleanType) and pa.types.is_boolean(own):
        return BooleanLiteral(value.as_py())
    if isinstance(kind, (IntegerType, LongType)) and pa.types.is_integer(own) and -LONG <= value.as_py() < LONG:
        return LongLiteral(value.as_py())
    if isinstance(kind, (FloatType, DoubleType)):
        return _double(value, kind)
    if isinstance(kind, StringType) and (pa.types.is_string(own) or pa.types.is_large_string(own)):
        return StringLiteral(value.as_py())
    if isinstance(kind, DateType) and pa.types.is_date32(own):
        return DateLiteral(value.value)
    zoned = isinstance(kind, TimestamptzType)
    if isinstance(kind, (TimestampType, TimestamptzType)) and pa.types.is_timestamp(own) and zoned == bool(own.tz):
        try:
            return TimestampLiteral(value.cast(pa.timestamp("us", own.tz)).value)
        except pa.ArrowInvalid:
            raise _InexactError from None
    raise _InexactError


def _double(value: pa.Scalar, kind: IcebergType) -> Literal[Any]:
    if not pa.types.is_integer(value.type) and not pa.types.is_floating(value.type):
        raise _InexactError
    number = value.as_py()
    is_exact = abs(number) <= EXACT_DOUBLE if isinstance(number, int) else number == number  # noqa: PLR0124 - not NaN
    if isinstance(kind, FloatType):
        with np.errstate(over="ignore"):
            is_exact = is_exact and float(np.float32(number)) == number
    if not is_exact:
        raise _InexactError
    return DoubleLiteral(float(number))
