"""The table that is read becomes the table that is delivered, one row group at a time.

Both are Arrow. Here encodings are undone, values coded, decimals converted, and nulls filled and marked. A null that
cannot be delivered is an error. `convert` then makes tensors and arrays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc

from torch_dataloader_utils.columns.arrow import fixed_shape, has_few_values, is_list, require_column
from torch_dataloader_utils.columns.column_plan import ColumnPlan, Form, plan_column
from torch_dataloader_utils.columns.decode import decode, decoded_type
from torch_dataloader_utils.columns.nulls import count_nulls, fill_nulls, mask_type, null_mask
from torch_dataloader_utils.columns.options import ColumnOptions, Padded
from torch_dataloader_utils.errors import ColumnError

INDICES = pa.int32()
"""The indices of the dictionaries that Arrow makes when it reads strings as such."""

EXACT_SCALE = 22
"""A float64 is exact for every power of ten up to this one."""


@dataclass(frozen=True, slots=True)
class ColumnTransform:
    """Turns tables as they are read into tables as they are delivered.

    `columns` are the plans of the columns that are read, in order, the added ones included. `schema` has the columns
    that are delivered, without the added ones.
    """

    output_format: str
    columns: tuple[ColumnPlan, ...]
    schema: pa.Schema

    @classmethod
    def of(cls, schema: pa.Schema, options: ColumnOptions, *added: str | None) -> ColumnTransform:
        """Plan the transform of the columns that are read, and of int64 columns that are added; None for no column.

        Raises:
            ColumnError: If a column is missing, or its type does not fit the options.
        """
        named = {"column_formats": options.formats, "fill_nulls": options.fills, "mask_nulls": options.masks}
        for parameter, names in named.items():
            for name in names:
                require_column(name, schema, f" for {parameter}")
        plans = [plan_column(field, options) for field in schema]
        for name in options.masks:
            if _mask_name(name) in (*schema.names, *added):
                msg = f"mask_nulls={[name]!r} adds the column {_mask_name(name)!r}, but there is a column of that name"
                raise ColumnError(f"{msg} already: rename that column in the files, or leave it out")
        fields = []
        for plan in plans:
            fields.append(pa.field(plan.name, plan.dtype))
            if plan.has_mask:
                fields.append(pa.field(_mask_name(plan.name), mask_type(decoded_type(plan.dtype))))
        numbers = (pa.field(name, pa.int64()) for name in added if name is not None)
        plans += [plan_column(field, ColumnOptions(options.output_format)) for field in numbers]
        return cls(options.output_format, tuple(plans), pa.schema(fields))

    def with_flags(self, name: str) -> ColumnTransform:
        """Return the transform of the same columns and of a boolean one behind them, for which it changes nothing."""
        plan = plan_column(pa.field(name, pa.bool_()), ColumnOptions(self.output_format))
        return replace(self, columns=(*self.columns, plan))

    @property
    def encodable(self) -> frozenset[str]:
        """The columns that may be dictionaries in some tables, and their values in others."""
        return frozenset(plan.name for plan in self.columns if plan.shares_values or plan.converts_to == "codes")

    @property
    def forms(self) -> Mapping[str, Form]:
        """The form of each delivered column."""
        mask: Form = "dense" if self.output_format in ("torch", "numpy") else "list"
        masks = {_mask_name(plan.name): mask for plan in self.columns if plan.has_mask}
        return {plan.name: plan.form for plan in self.columns} | masks

    def apply(self, table: pa.Table) -> pa.Table:
        """Return the rows of a table as they are delivered.

        Raises:
            ColumnError: If a value cannot be delivered. The message names the column; the caller adds file and row
                group, which only it knows.
        """
        table = _with_small_dictionaries(table, self.columns)
        changes_nothing = all(plan.is_identity for plan in self.columns)
        if changes_nothing and not any(column.null_count or column.type.num_fields for column in table.columns):
            return table  # most tables, in a part of the time
        delivered = dict(pair for plan in self.columns for pair in _transform(plan, table[plan.name]))
        # If nothing changes, the table itself: rebuilt without columns it would have no rows.
        return table if changes_nothing else pa.table(delivered)


def _with_small_dictionaries(table: pa.Table, plans: Sequence[ColumnPlan]) -> pa.Table:
    """Return a table with the values of dictionaries that are no help: those of many values, if lists are made."""
    for index, plan in enumerate(plans):
        if plan.shares_values and pa.types.is_dictionary(table.field(index).type):
            column = table.column(index)
            if not has_few_values(column):
                table = table.set_column(index, plan.name, _map_chunks(column, decode, plan.dtype))
    return table


def refuses_announced_nulls(field: pa.Field, options: ColumnOptions) -> bool:
    """Whether nulls that a footer announces in a column are certain to be an error."""
    if field.name in options.fills or field.name in options.masks:
        return False
    try:
        plan = plan_column(field, options)
    except ColumnError:  # the options do not fit: `ColumnTransform.of` raises the error
        return False
    # Footers count an empty list as a null, and each row of a fixed-size list of size 0.
    return plan.refuses_nulls and not is_list(plan.dtype) and 0 not in fixed_shape(plan.dtype)


def null_message(column: str, nulls: int, *, has_mask: bool = False) -> str:
    """Return an error message about nulls in a column, with the ways out."""
    message = f"column {column!r} holds {nulls} nulls, but the form that it is delivered in has no value for null: "
    if has_mask:  # null lists are marked by it, so these are inside lists
        return f"{message}replace nulls inside its lists with fill_nulls={{{column!r}: ...}}"
    message += f"replace them with fill_nulls={{{column!r}: ...}}, add a column that marks them with "
    return f"{message}mask_nulls=[{column!r}], or leave those rows out by a filter"


def _mask_name(name: str) -> str:
    return f"{name}_is_null"


# One column ----------------------------------------------------------------------------------------------------------


def _transform(plan: ColumnPlan, values: pa.ChunkedArray) -> Iterator[tuple[str, pa.ChunkedArray]]:
    """Yield the name and the values of a column as it is delivered, and of its mask."""
    if plan.is_identity and not values.type.num_fields and not values.null_count:
        yield plan.name, values  # for most columns, at once: small tables of many columns are frequent
        return
    values = _converted(plan, values)
    nullable = values if plan.has_mask else None  # nulls are marked where they were before they are filled
    if plan.filling is not None and _count_nulls(values, leaves_may_be_null=False):
        filling = plan.filling[0] if len(plan.filling) else None
        values = _map_chunks(values, lambda chunk: fill_nulls(chunk, filling), values.type)
    if plan.refuses_nulls and (nulls := _count_nulls(values, leaves_may_be_null=plan.leaves_may_be_null)):
        raise ColumnError(null_message(plan.name, nulls, has_mask=plan.has_mask))
    if isinstance(plan.form, Padded) and plan.form.length is not None:
        _require_length(plan.name, values, plan.form.length)
    yield plan.name, values
    if nullable is not None:
        decoded = _map_chunks(nullable, decode, decoded_type(nullable.type))
        yield _mask_name(plan.name), _map_chunks(decoded, null_mask, mask_type(decoded.type))


def _map_chunks(column: pa.ChunkedArray, make: Callable[[pa.Array], pa.Array], dtype: pa.DataType) -> pa.ChunkedArray:
    """Apply a function to each chunk; a column without chunks gets its new type all the same."""
    return pa.chunked_array([make(chunk) for chunk in column.chunks], dtype)


def _count_nulls(values: pa.ChunkedArray, *, leaves_may_be_null: bool) -> int:
    return sum(count_nulls(chunk, leaves_may_be_null=leaves_may_be_null) for chunk in values.chunks)


def _require_length(name: str, values: pa.ChunkedArray, length: int) -> None:
    longest = pc.max(pc.list_value_length(values)).as_py() or 0
    if longest > length:
        msg = f"column {name!r} holds a list of {longest} values, more than Padded(length={length}) allows: choose a"
        raise ColumnError(f"{msg} greater length, or None for the longest of each batch")


def _converted(plan: ColumnPlan, values: pa.ChunkedArray) -> pa.ChunkedArray:
    if plan.converts_to == "codes" and (codes := _codes_by_dictionary(plan, values)) is not None:
        return codes
    if plan.shares_values and has_few_values(values):
        return _with_wide_indices(values)
    if plan.decodes or pa.types.is_dictionary(values.type):
        values = _map_chunks(values, decode, decoded_type(values.type))
    if plan.converts_to is None:
        return values
    if plan.converts_to == "codes":
        return _codes(plan, values)
    try:
        if plan.converts_to == "int64":
            return _map_chunks(values, _unscaled, pa.int64())
        return _map_chunks(values, _floats, pa.float64())
    except pa.ArrowInvalid as error:
        msg = f"column {plan.name!r} of type {values.type} holds a value whose digits do not fit into int64: {error}; "
        raise ColumnError(f"{msg}use 'float64', or leave the format out to get decimals") from None


def _with_wide_indices(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return values in dictionaries that can be united with others: pandas' indices may have 8 bits."""
    if column.type.index_type == INDICES:
        return column

    def widened(values: pa.DictionaryArray) -> pa.DictionaryArray:
        return pa.DictionaryArray.from_arrays(values.indices.cast(INDICES), values.dictionary, safe=False)

    return _map_chunks(column, widened, pa.dictionary(INDICES, column.type.value_type))


def _codes_by_dictionary(plan: ColumnPlan, values: pa.ChunkedArray) -> pa.ChunkedArray | None:
    """Return the codes of values, looked up once for each value of a dictionary; None if that does not tell them all.

    A dictionary may have values that no row has, so a value that has no code is no error here.
    """
    if not pa.types.is_dictionary(values.type):
        return None
    chunks = []
    for chunk in values.chunks:
        if len(chunk.dictionary) > len(chunk):
            return None
        codes = pc.index_in(decode(chunk.dictionary), value_set=plan.vocabulary).take(chunk.indices)
        if codes.null_count > chunk.null_count:
            return None
        chunks.append(codes.cast(pa.int64()))
    return pa.chunked_array(chunks, pa.int64())


def _codes(plan: ColumnPlan, values: pa.ChunkedArray) -> pa.ChunkedArray:
    codes = pc.index_in(values, value_set=plan.vocabulary)
    if codes.null_count > values.null_count:  # index_in gives null for a value that is not in the set
        unknown = values.filter(pc.and_(values.is_valid(), codes.is_null()))[0].as_py()
        raise ColumnError(f"column {plan.name!r} holds {unknown!r}, which is not in the vocabulary of its Codes")
    return codes.cast(pa.int64())


def _unscaled(values: pa.Array) -> pa.Array:
    """Return the digits of decimals as integers: 1.50 as 150. An ArrowInvalid if they do not fit into int64."""
    # Read with scale 0, the same bytes are those integers; pyarrow's cast would drop the fraction or fail.
    dtype = getattr(pa, f"decimal{values.type.bit_width}")(values.type.precision, 0)
    return pa.Array.from_buffers(dtype, len(values), values.buffers(), offset=values.offset).cast(pa.int64())


def _floats(values: pa.Array) -> pa.Array:
    """Return the nearest floats to decimals; pyarrow's own cast is wrong in the last bit of many."""
    scale = values.type.scale
    if 0 <= scale <= EXACT_SCALE:
        # Division of two exact floats rounds once, to the nearest. The casts fail where an integer is no exact float.
        with contextlib.suppress(pa.ArrowInvalid):
            return pc.divide(_unscaled(values).cast(pa.float64()), float(10**scale))
    return values.cast(pa.string()).cast(pa.float64())
