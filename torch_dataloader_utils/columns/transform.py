"""From the columns that are read to those that are delivered: what they are is known before anything is read.

This is still Arrow. What the user chose is done here row group by row group: nulls filled and marked, values coded,
decimals made numbers; and nulls that nothing can stand for are an error. `convert` does the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torch_dataloader_utils.columns.arrow import require_column
from torch_dataloader_utils.columns.decode import is_bytes_view, plain, plain_type
from torch_dataloader_utils.columns.nulls import count_nulls, each_chunk, fill, innermost, is_list, mark, mask_type
from torch_dataloader_utils.columns.options import Codes, ColumnOptions, Padded
from torch_dataloader_utils.errors import ColumnError

__all__ = ["ColumnTransform", "Form", "fitting", "null_message", "refuses_announced_nulls"]


Form: TypeAlias = Literal["arrow", "list", "dense", "jagged", "packed"] | Padded
"""What a column is in a batch: left in Arrow, a Python list, one tensor or array, or lists of different lengths."""


EXACT_DIGITS = 15
"""Integers of so many digits, and the powers of ten up to them, are floats without loss."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column, from what is read to what is delivered.

    Attributes:
        name: Its name.
        kind: The Arrow type that it is delivered in.
        form: What it is in a batch.
        is_plain: Whether encodings are undone.
        format: The decimal's or the codes' format, or None.
        vocabulary: The values that have codes, or None.
        filling: What stands for null, as one value of the innermost type; none where lists alone are filled; or None.
        is_masked: Whether a mask follows it.
        has_times: Whether times are NumPy's, which know NaT, and not integers.
    """

    name: str
    kind: pa.DataType
    form: Form
    is_plain: bool = False
    format: Literal["float64", "int64", "codes"] | None = None
    vocabulary: pa.Array | None = None
    filling: pa.Array | None = None
    is_masked: bool = False
    has_times: bool = False

    @property
    def changes(self) -> bool:
        """Whether it is not delivered as it is read."""
        return self.is_plain or self.is_masked or self.format is not None or self.filling is not None

    @property
    def refuses_nulls(self) -> bool:
        """Whether its form has no value for null."""
        if self.form in ("arrow", "list"):
            return False
        return self.form != "dense" or not self.leaves_may_be_null

    @property
    def leaves_may_be_null(self) -> bool:
        """Whether null is NaN or NaT in its form."""
        leaf = innermost(self.kind)
        return bool(pa.types.is_floating(leaf) or (self.has_times and _has_nat(leaf)))

    def deliver(self, values: pa.ChunkedArray) -> Iterator[tuple[str, pa.ChunkedArray]]:
        """Yield the column as it is delivered, and its mask."""
        if self.is_plain:
            values = each_chunk(values, plain, plain_type(values.type))
        if self.format is not None:
            values = self._formatted(values)
        masked = values if self.is_masked else None
        if self.filling is not None and self._has_nulls(values):
            filling = self.filling[0] if len(self.filling) else None
            values = each_chunk(values, lambda chunk: fill(chunk, filling), values.type)
        self._require_values(values)
        if isinstance(self.form, Padded) and self.form.length is not None:
            self._require_short(values, self.form.length)
        yield self.name, values
        if masked is not None:
            decoded = each_chunk(masked, plain, plain_type(masked.type))
            yield _mask_name(self.name), each_chunk(decoded, mark, mask_type(decoded.type))

    def _has_nulls(self, values: pa.ChunkedArray) -> bool:
        return any(count_nulls(chunk, leaves_may_be_null=False) for chunk in values.chunks)

    def _require_values(self, values: pa.ChunkedArray) -> None:
        if self.refuses_nulls:
            may_be_null = self.leaves_may_be_null
            nulls = sum(count_nulls(chunk, leaves_may_be_null=may_be_null) for chunk in values.chunks)
            if nulls:
                raise ColumnError(null_message(self.name, nulls, is_masked=self.is_masked))

    def _require_short(self, values: pa.ChunkedArray, length: int) -> None:
        longest = pc.max(pc.list_value_length(values)).as_py() or 0
        if longest > length:
            msg = f"column {self.name!r} holds a list of {longest} values, and Padded(length={length}) has no room for"
            msg += f" more than {length}: choose a greater length, or None for the longest of each batch"
            raise ColumnError(msg)

    def _formatted(self, values: pa.ChunkedArray) -> pa.ChunkedArray:
        if self.format == "codes":
            return self._coded(values)
        try:
            if self.format == "int64":
                return each_chunk(values, _unscaled, pa.int64())
            return each_chunk(values, _floats, pa.float64())
        except pa.ArrowInvalid as error:
            msg = (
                f"column {self.name!r} of type {values.type} holds a value whose digits do not fit into int64: {error}"
            )
            msg += "; use 'float64', or the decimals as they are"
            raise ColumnError(msg) from None

    def _coded(self, values: pa.ChunkedArray) -> pa.ChunkedArray:
        codes = pc.index_in(values, value_set=self.vocabulary)
        if codes.null_count > values.null_count:
            unknown = values.filter(pc.and_(values.is_valid(), codes.is_null()))[0].as_py()
            raise ColumnError(f"column {self.name!r} holds {unknown!r}, which is not in the vocabulary of its Codes")
        return codes.cast(pa.int64())


@dataclass(frozen=True, slots=True)
class ColumnTransform:
    """What is delivered of a table.

    Attributes:
        output_format: What a batch is made of.
        columns: The columns that are read, in order, the row ids included.
        schema: The columns that are delivered, row ids not included.
    """

    output_format: str
    columns: tuple[Column, ...]
    schema: pa.Schema

    @classmethod
    def of(cls, schema: pa.Schema, choices: ColumnOptions, row_id_column: str | None = None) -> ColumnTransform:
        """Say what is delivered, or raise if the choices do not fit the columns.

        Args:
            schema: The columns that are read.
            choices: What was chosen for them.
            row_id_column: Name of an int64 column that is added, or None.

        Raises:
            ColumnError: If a column is not there, or its type does not have what was chosen.
        """
        for parameter, names in _named(choices).items():
            for name in names:
                require_column(name, schema, f" for {parameter}")
        columns = [_column(field, choices) for field in schema]
        for name in choices.masks:
            if _mask_name(name) in (*schema.names, row_id_column):
                msg = f"mask_nulls={[name]!r} adds the column {_mask_name(name)!r}, and there is one of that name"
                raise ColumnError(f"{msg} already: give it another name when you write the files, or leave it out")
        fields = []
        for column in columns:
            fields.append(pa.field(column.name, column.kind))
            if column.is_masked:
                fields.append(pa.field(_mask_name(column.name), mask_type(plain_type(column.kind))))
        if row_id_column is not None:
            columns.append(_column(pa.field(row_id_column, pa.int64()), ColumnOptions(choices.output_format)))
        return cls(choices.output_format, tuple(columns), pa.schema(fields))

    @property
    def forms(self) -> Mapping[str, Form]:
        """The form of each delivered column."""
        mask: Form = "dense" if self.output_format in ("torch", "numpy") else "list"
        masks = {_mask_name(column.name): mask for column in self.columns if column.is_masked}
        return {column.name: column.form for column in self.columns} | masks

    def deliver(self, table: pa.Table) -> pa.Table:
        """Turn rows as they are read into rows as they are delivered.

        Raises:
            ColumnError: If a value cannot be delivered as chosen. The message names the column alone: where it is, the
                caller knows.
        """
        delivered = dict(made for column in self.columns for made in column.deliver(table[column.name]))
        return pa.table(delivered) if any(column.changes for column in self.columns) else table


def refuses_announced_nulls(field: pa.Field, choices: ColumnOptions) -> bool:
    """Whether nulls that a footer announces in a column cannot be delivered.

    Footers count an empty list as they count a null one, so they tell nothing of lists that differ in length.
    """
    if field.name in choices.fills or field.name in choices.masks:
        return False
    try:
        column = _column(field, choices)
    except ColumnError:  # the choices do not fit, which is said elsewhere
        return False
    return column.refuses_nulls and not is_list(column.kind) and _has_places(column.kind)


def null_message(column: str, nulls: int, *, is_masked: bool = False) -> str:
    """Say what is wrong with nulls in a column and what to do."""
    message = f"column {column!r} holds {nulls} nulls, and what it is delivered as has no value for null: "
    if is_masked:  # which marks lists, not the values in them
        return f"{message}say with fill_nulls={{{column!r}: ...}} what stands for those inside lists"
    message += f"say with fill_nulls={{{column!r}: ...}} what stands for it, or have mask_nulls=[{column!r}] add a"
    return f"{message} column that tells where nulls are; or leave those rows out by a filter"


def _named(choices: ColumnOptions) -> dict[str, Any]:
    return {"column_formats": choices.formats, "fill_nulls": choices.fills, "mask_nulls": choices.masks}


def _mask_name(name: str) -> str:
    return f"{name}_is_null"


# What a column becomes -----------------------------------------------------------------------------------------------


def _column(field: pa.Field, choices: ColumnOptions) -> Column:
    """Return what becomes of a column, or raise if the choices do not fit it."""
    name, wanted, output = field.name, choices.formats.get(field.name), choices.output_format
    is_plain = output != "arrow" or wanted is not None or name in choices.fills or is_bytes_view(field.type)
    kind = plain_type(field.type) if is_plain else field.type
    made: Literal["float64", "int64", "codes"] | None = None
    vocabulary = None
    if isinstance(wanted, Codes):
        made, vocabulary, kind = "codes", _vocabulary(field, kind, wanted), pa.int64()
    elif wanted in ("float64", "int64"):
        if not pa.types.is_decimal(kind):
            raise _misfit(field, wanted, "is for decimals")
        made, kind = ("float64", pa.float64()) if wanted == "float64" else ("int64", pa.int64())
    form = _form(field, kind, None if made else wanted, output)
    column = Column(
        name=name,
        kind=kind,
        form=form,
        is_plain=is_plain and plain_type(field.type) != field.type,
        format=made,
        vocabulary=vocabulary,
        is_masked=name in choices.masks,
        has_times=output == "numpy",
    )
    return _with_filling(column, choices)


def _form(field: pa.Field, kind: pa.DataType, wanted: Any, output: str) -> Form:
    """Return what a column is in a batch."""
    if output in ("arrow", "dict"):
        form: Form = "arrow" if output == "arrow" else "list"
        if wanted not in (None, form):
            raise _misfit(field, wanted, f"needs output_format='torch' or 'numpy', not {output!r}")
        return form
    if wanted == "list":
        return "list"
    if wanted == "packed":
        if not _has_bytes(kind):
            raise _misfit(field, wanted, "is for strings and binary")
        return "packed"
    holds_lists = is_list(kind) and _is_dense(kind.value_type)
    if wanted is not None:
        if not holds_lists:
            raise _misfit(field, wanted, "is for lists of numbers or of fixed-size lists of them")
        padded = Padded() if wanted == "padded" else wanted
        fitting(padded.value, innermost(kind), f"Padded(value={padded.value!r}) of column {field.name!r}")
        return padded
    return "jagged" if holds_lists else "dense" if _is_dense(kind) else "list"


def _misfit(field: pa.Field, wanted: Any, why: str) -> ColumnError:
    return ColumnError(f"column_formats={{{field.name!r}: {wanted!r}}} {why}; the column is of type {field.type}")


def _vocabulary(field: pa.Field, kind: pa.DataType, codes: Codes) -> pa.Array:
    if not pa.types.is_integer(kind) and not _has_bytes(kind):
        raise _misfit(field, codes, "is for strings, integers and dictionaries of them")
    label = f"a value in the vocabulary of column {field.name!r}"
    values = [fitting(value, kind, label).as_py() for value in codes.vocabulary]
    return pa.array(values, kind)


def _with_filling(column: Column, choices: ColumnOptions) -> Column:
    """Add what stands for null: what was chosen, or beside a mask zero, where the form has no value for null."""
    kind = innermost(column.kind)
    if column.name in choices.fills:
        value = choices.fills[column.name]
        if not _can_be_filled(kind):
            msg = f"fill_nulls={{{column.name!r}: {value!r}}}: nulls of type {column.kind} cannot be filled"
            raise ColumnError(f"{msg}; column_formats={{{column.name!r}: 'list'}} delivers them as None")
        scalar = fitting(value, kind, f"fill_nulls={{{column.name!r}: {value!r}}}")
        filling = pa.repeat(scalar, 1)
    elif column.is_masked and column.refuses_nulls:
        filling = pa.array([], kind) if is_list(column.kind) else _zero(kind)
    else:
        return column
    return replace(column, filling=filling)


def _zero(kind: pa.DataType) -> pa.Array:
    if pa.types.is_fixed_size_binary(kind):
        return pa.array([bytes(kind.byte_width)], kind)
    if _has_bytes(kind):
        return pa.array([""], kind)
    return pa.array(
        [np.float16(0) if kind == pa.float16() else 0], pa.uint8() if pa.types.is_boolean(kind) else kind
    ).cast(kind)


def fitting(value: Any, kind: pa.DataType, label: str) -> pa.Scalar:
    """Return a value as one of an Arrow type, or raise a ColumnError that says what does not fit.

    Args:
        value: The value.
        kind: The type.
        label: What it is, for the message.
    """
    msg = f"{label}: {value!r} does not fit the type {kind}"
    try:
        scalar = pa.scalar(np.float16(value) if kind == pa.float16() else value, kind)
        found: Any = None if pa.types.is_temporal(kind) and isinstance(value, int) else scalar.as_py()
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ColumnError(f"{msg}: {error}") from None
    if pa.types.is_floating(kind):
        is_same = not isinstance(value, bool) and bool(np.isinf(found) == np.isinf(float(value)))
    else:
        is_same = found is None or bool(found == value)
    if not is_same:
        raise ColumnError(msg)
    return scalar


# Kinds of types ------------------------------------------------------------------------------------------------------


def _is_dense(kind: pa.DataType) -> bool:
    while pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return bool(is_number or (pa.types.is_temporal(kind) and not pa.types.is_interval(kind)))


def _has_nat(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_duration(kind))


def _has_bytes(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_fixed_size_binary(kind)
    )


def _can_be_filled(kind: pa.DataType) -> bool:
    return _is_dense(kind) or _has_bytes(kind) or bool(pa.types.is_decimal(kind))


def _has_places(kind: pa.DataType) -> bool:
    """Whether there is a value in every row: in fixed-size lists of no values footers count each row as a null."""
    while pa.types.is_fixed_size_list(kind):
        if not kind.list_size:
            return False
        kind = kind.value_type
    return True


# Decimals ------------------------------------------------------------------------------------------------------------


def _unscaled(values: pa.Array) -> pa.Array:
    """Return the digits of decimals as integers; an ArrowInvalid where they do not fit."""
    kind = values.type
    digits = pa.Array.from_buffers(_with_scale(kind, 0), len(values), values.buffers(), offset=values.offset)
    return digits.cast(pa.int64())


def _with_scale(kind: pa.DataType, scale: int) -> pa.DataType:
    make = getattr(pa, f"decimal{kind.bit_width}")
    return make(kind.precision, scale)


def _floats(values: pa.Array) -> pa.Array:
    """Return the floats nearest to decimals; pyarrow's own cast is off by the last bit in many."""
    kind = values.type
    if kind.precision <= EXACT_DIGITS and 0 <= kind.scale <= EXACT_DIGITS:
        return pc.divide(_unscaled(values).cast(pa.float64()), float(10**kind.scale))
    return values.cast(pa.string()).cast(pa.float64())
