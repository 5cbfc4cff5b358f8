"""Translates pyarrow's filters to pyiceberg's, whose planning then rules out partitions and files.

The translation may be weaker than the filter, never stronger: every row that the filter keeps has to match it. So what
has no exact translation, such as a cast or a comparison of two columns, matches every row. Nothing is negated: the
negation of a weaker filter is a stronger one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import date
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg import expressions, types
from pyiceberg.expressions import literals
from pyiceberg.schema import Schema

METADATA = "\n-- schema metadata --\n"
LINE = re.compile(r"(call|end|field_ref|nested_field_ref|literal|options): '(.*)'")
COMPARISONS: dict[str, tuple[Callable[..., expressions.BooleanExpression], str]] = {
    "equal": (expressions.EqualTo, "equal"),
    "not_equal": (expressions.NotEqualTo, "not_equal"),
    "less": (expressions.LessThan, "greater"),
    "less_equal": (expressions.LessThanOrEqual, "greater_equal"),
    "greater": (expressions.GreaterThan, "less"),
    "greater_equal": (expressions.GreaterThanOrEqual, "less_equal"),
}
"""pyarrow's comparisons: pyiceberg's class, and the comparison with exchanged sides."""

LONG = 2**63
EXACT_DOUBLE = 2**53
DAY = 86_400_000_000
"""Microseconds of a day."""

EPOCH = date(1970, 1, 1).toordinal()


def weaker_filter(
    filters: pc.Expression, schema: Schema, *, left_out: Collection[str], unordered: Collection[str | None] = ()
) -> expressions.BooleanExpression:
    """Return a filter that matches every row that another filter keeps, and compares no unordered column by order.

    It does not use the columns that are left out.
    """
    names = {column.name: column.field_type for column in schema.fields if column.name not in left_out}
    tree = None if any("\n" in name for name in schema.column_names) else _tree(filters)
    return expressions.AlwaysTrue() if tree is None else _Translation(names, unordered).of(tree)


@dataclass(frozen=True, slots=True)
class _Call:
    """A function call in an expression. The arguments are other calls, columns and scalars."""

    function: str
    arguments: tuple[Any, ...]
    options: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class _Column:
    name: str


def _tree(filters: pc.Expression) -> Any:
    """Return an expression as a tree, or None where pyarrow serialises it in an unknown way.

    pyarrow shows the inside of an expression only in its serialised form: a record batch of its values, with its calls
    in the metadata of the batch's schema. The same keys occur there many times. So only the schema as a string has all
    of them.
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


def _node(key: str, name: str, items: Iterator[tuple[str, str]], batch: pa.RecordBatch) -> Any:
    """Return the node that starts with an item, and consume the items that belong to it."""
    if key == "field_ref":
        return _Column(name)
    if key == "literal":
        return batch.column(int(name))[0]
    if key == "nested_field_ref":
        for _ in range(int(name)):
            next(items)
        return None
    if key != "call":
        raise ValueError(key)
    arguments: list[Any] = []
    options = None
    for inner, value in items:
        if inner == "end":
            return _Call(name, tuple(arguments), options)
        if inner == "options":
            options = dict(batch.column(int(value))[0].items())
        else:
            arguments.append(_node(inner, value, items, batch))
    raise ValueError(name)


class _InexactError(Exception):
    """A part of a filter has no exact translation."""


@dataclass(frozen=True, slots=True)
class _Translation:
    """Translates the tree of an expression, by the types of columns; no unordered column is compared by order."""

    dtypes: dict[str, types.IcebergType]
    unordered: Collection[str | None]

    def of(self, node: Any) -> expressions.BooleanExpression:
        """Return a filter that matches every row for which a node is true."""
        if not isinstance(node, _Call):
            return expressions.AlwaysTrue()
        if node.function in ("and_kleene", "and"):
            return expressions.And(*map(self.of, node.arguments))
        if node.function in ("or_kleene", "or"):
            return expressions.Or(*map(self.of, node.arguments))
        try:
            return self._test(node)
        except (_InexactError, LookupError):
            return expressions.AlwaysTrue()

    def _test(self, node: _Call) -> expressions.BooleanExpression:
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
            raise _InexactError  # it also keeps NaN, or may do so
        name = self._name(node.arguments[0])
        return expressions.IsNull(name) if (node.function == "is_null") != negated else expressions.NotNull(name)

    def _name(self, node: Any) -> str:
        """Return the name of a column of the table. pyiceberg would read a dot as a path to a nested field."""
        if not isinstance(node, _Column) or node.name not in self.dtypes or "." in node.name:
            raise _InexactError
        return node.name

    def _comparison(self, node: _Call) -> expressions.BooleanExpression:
        function = node.function
        column, value = node.arguments
        if isinstance(column, pa.Scalar):
            column, value = value, column
            function = COMPARISONS[function][1]
        name = self._name(column)
        literal = _literal(value, self.dtypes[name])
        if function == "not_equal" and isinstance(self.dtypes[name], (types.FloatType, types.DoubleType)):
            raise _InexactError  # NaN is not equal to anything, and statistics leave it out
        if name in self.unordered and function not in ("equal", "not_equal"):
            return expressions.NotNull(name)
        return COMPARISONS[function][0](name, literal)

    def _is_in(self, node: _Call) -> expressions.BooleanExpression:
        name = self._name(node.arguments[0])
        values = None if node.options is None else node.options.get("value_set")
        if values is None or not values.is_valid:
            raise _InexactError
        return expressions.In(name, {_literal(value, self.dtypes[name]) for value in values.values})


def _literal(value: Any, dtype: types.IcebergType) -> literals.Literal[Any]:
    """Return a value as pyiceberg's, if a column of a type compares with both in the same way."""
    if not isinstance(value, pa.Scalar) or not value.is_valid:
        raise _InexactError
    value_type = value.type
    if isinstance(dtype, types.BooleanType) and pa.types.is_boolean(value_type):
        return literals.BooleanLiteral(value.as_py())
    is_long = isinstance(dtype, (types.IntegerType, types.LongType)) and pa.types.is_integer(value_type)
    if is_long and -LONG <= value.as_py() < LONG:
        return literals.LongLiteral(value.as_py())
    if isinstance(dtype, (types.FloatType, types.DoubleType)):
        return _double(value, dtype)
    if isinstance(dtype, types.StringType) and (pa.types.is_string(value_type) or pa.types.is_large_string(value_type)):
        return literals.StringLiteral(value.as_py())
    if isinstance(dtype, types.DateType) and pa.types.is_date32(value_type):
        return literals.DateLiteral(_within_calendar(value.value))
    is_timestamp = isinstance(dtype, (types.TimestampType, types.TimestamptzType)) and pa.types.is_timestamp(value_type)
    if is_timestamp and isinstance(dtype, types.TimestamptzType) == bool(value_type.tz):
        try:
            microseconds = value.cast(pa.timestamp("us", value_type.tz)).value
        except pa.ArrowInvalid:
            raise _InexactError from None
        _within_calendar(microseconds // DAY)
        return literals.TimestampLiteral(microseconds)
    raise _InexactError


def _within_calendar(days: int) -> int:
    """Return days since 1970 if Python has the days before and after: pyiceberg computes with both."""
    if not date.min.toordinal() < days + EPOCH < date.max.toordinal():
        raise _InexactError
    return days


def _double(value: pa.Scalar, dtype: types.IcebergType) -> literals.Literal[Any]:
    if not pa.types.is_integer(value.type) and not pa.types.is_floating(value.type):
        raise _InexactError
    number = value.as_py()
    is_exact = abs(number) <= EXACT_DOUBLE if isinstance(number, int) else number == number  # noqa: PLR0124 - not NaN
    if isinstance(dtype, types.FloatType):
        with np.errstate(over="ignore"):
            is_exact = is_exact and float(np.float32(number)) == number
        is_exact = is_exact and not math.isinf(number)  # pyiceberg takes it for a number that no float is
    if not is_exact:
        raise _InexactError
    return literals.DoubleLiteral(float(number))
