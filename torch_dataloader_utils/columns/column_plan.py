"""What each column is delivered as: decided from its type and the user's options, before any row is read.

`transform` carries the plans out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from torch_dataloader_utils.columns.arrow import is_bytes, is_list, is_view, leaf_type
from torch_dataloader_utils.columns.decode import decoded_type
from torch_dataloader_utils.columns.options import Codes, ColumnOptions, Padded
from torch_dataloader_utils.errors import ColumnError

Form: TypeAlias = Literal["arrow", "list", "dense", "jagged", "packed"] | Padded
"""What a column is in a batch: left in Arrow, a Python list, one tensor or array, or rows of different lengths."""


@dataclass(frozen=True, slots=True)
class ColumnPlan:
    """How one column is transformed, and what it is in a batch.

    Attributes:
        dtype: Its Arrow type after the transform.
        decodes: Whether Arrow's encodings are undone.
        converts_to: What decimals or coded values become, or None.
        filling: The value that replaces null, as an array of one value of the leaf type. An empty array fills null
            lists alone; None fills nothing.
        has_mask: Whether a mask of its nulls is delivered, too.
        numpy_times: Whether times become NumPy's, which have NaT for null, and not integers.
    """

    name: str
    dtype: pa.DataType
    form: Form
    decodes: bool = False
    converts_to: Literal["float64", "int64", "codes"] | None = None
    vocabulary: pa.Array | None = None
    filling: pa.Array | None = None  # plans are pickled for workers, and pyarrow cannot pickle every scalar
    has_mask: bool = False
    numpy_times: bool = False

    @property
    def is_identity(self) -> bool:
        """Whether the column is delivered as it is read."""
        return not (self.decodes or self.has_mask) and self.converts_to is None and self.filling is None

    @property
    def shares_values(self) -> bool:
        """Whether lists are made of the column, whose rows may share the objects that a dictionary's values become."""
        return self.form == "list" and self.converts_to is None and self.filling is None and not self.has_mask

    @property
    def refuses_nulls(self) -> bool:
        """Whether the column's form has no value for null."""
        if self.form in ("arrow", "list"):
            return False
        return self.form != "dense" or not self.leaves_may_be_null

    @property
    def leaves_may_be_null(self) -> bool:
        """Whether null becomes NaN or NaT."""
        leaf = leaf_type(self.dtype)
        has_nat = pa.types.is_timestamp(leaf) or pa.types.is_date(leaf) or pa.types.is_duration(leaf)
        return bool(pa.types.is_floating(leaf) or (self.numpy_times and has_nat))


def plan_column(field: pa.Field, options: ColumnOptions) -> ColumnPlan:
    """Decide what a column is delivered as.

    Raises:
        ColumnError: If the options do not fit the column's type.
    """
    column_format, output_format = options.formats.get(field.name), options.output_format
    # Arrow output keeps encodings, but formats and fillings are defined on the values behind them.
    is_changed = column_format is not None or field.name in options.fills
    dtype = field.type
    if output_format != "arrow" or is_changed or is_view(dtype):  # see there: rows could not be shuffled
        dtype = decoded_type(dtype)
    plan = ColumnPlan(
        name=field.name,
        dtype=dtype,
        form="arrow",
        decodes=dtype != field.type,
        has_mask=field.name in options.masks,
        numpy_times=output_format == "numpy",
    )
    if isinstance(column_format, Codes):
        vocabulary = _vocabulary(field, dtype, column_format)
        plan = replace(plan, converts_to="codes", vocabulary=vocabulary, dtype=pa.int64())
    elif column_format in ("float64", "int64"):
        if not pa.types.is_decimal(dtype):
            raise _misfit(field, column_format, "is for decimals")
        plan = replace(plan, converts_to=column_format, dtype=pa.type_for_alias(column_format))
    form = _form(field, plan.dtype, None if plan.converts_to else column_format, output_format)
    return _with_filling(replace(plan, form=form), options)


def _form(field: pa.Field, dtype: pa.DataType, column_format: Any, output_format: str) -> Form:
    if output_format in ("arrow", "dict"):
        form: Form = "arrow" if output_format == "arrow" else "list"
        if column_format not in (None, form):
            raise _misfit(field, column_format, f"needs output_format='torch' or 'numpy', not {output_format!r}")
        return form
    if column_format == "list":
        return "list"
    if column_format == "packed":
        if not is_bytes(dtype):
            raise _misfit(field, column_format, "is for strings and binary")
        return "packed"
    holds_lists = is_list(dtype) and _is_dense(dtype.value_type)
    if column_format is None:
        return "jagged" if holds_lists else "dense" if _is_dense(dtype) else "list"
    if not holds_lists:
        raise _misfit(field, column_format, "is for lists of numbers or of fixed-size lists of them")
    padded = Padded() if column_format == "padded" else column_format
    to_scalar(padded.value, leaf_type(dtype), f"Padded(value={padded.value!r}) of column {field.name!r}")
    return padded


def _misfit(field: pa.Field, column_format: Any, why: str) -> ColumnError:
    msg = f"column_formats={{{field.name!r}: {column_format!r}}} {why}; the column is of type {field.type}"
    return ColumnError(msg)


def _vocabulary(field: pa.Field, dtype: pa.DataType, codes: Codes) -> pa.Array:
    if not pa.types.is_integer(dtype) and not is_bytes(dtype):
        raise _misfit(field, codes, "is for strings, integers and dictionaries of them")
    label = f"a value in the vocabulary of column {field.name!r}"
    return pa.array([to_scalar(value, dtype, label).as_py() for value in codes.vocabulary], dtype)


def _with_filling(plan: ColumnPlan, options: ColumnOptions) -> ColumnPlan:
    """Add the value that replaces null: the user's, or zero where a mask marks nulls that the form has no value for."""
    leaf = leaf_type(plan.dtype)
    if plan.name in options.fills:
        label = f"fill_nulls={{{plan.name!r}: {options.fills[plan.name]!r}}}"
        if not (_is_dense(leaf) or is_bytes(leaf) or pa.types.is_decimal(leaf)):
            msg = f"{label}: nulls of type {plan.dtype} cannot be filled"
            raise ColumnError(f"{msg}; column_formats={{{plan.name!r}: 'list'}} delivers them as None")
        return replace(plan, filling=pa.repeat(to_scalar(options.fills[plan.name], leaf, label), 1))
    if plan.has_mask and plan.refuses_nulls:
        # The mask marks null lists, not null values inside them: those stay an error, so only lists are filled.
        return replace(plan, filling=pa.array([], leaf) if is_list(plan.dtype) else _zero(leaf))
    return plan


def _zero(dtype: pa.DataType) -> pa.Array:
    if pa.types.is_fixed_size_binary(dtype):
        return pa.array([bytes(dtype.byte_width)], dtype)
    if is_bytes(dtype):
        return pa.array([""], dtype)
    if pa.types.is_boolean(dtype):
        return pa.array([False])
    return pa.array([np.float16(0) if dtype == pa.float16() else 0], dtype)


def to_scalar(value: Any, dtype: pa.DataType, label: str) -> pa.Scalar:
    """Convert a value to an Arrow type without loss; the label names the value in the error message.

    Raises:
        ColumnError: If the type does not hold exactly this value. Floats may be rounded, but not to infinity.
    """
    msg = f"{label}: {value!r} does not fit the type {dtype}"
    try:
        scalar = pa.scalar(np.float16(value) if dtype == pa.float16() else value, dtype)
        # An integer is a count of a time's units, which as_py would turn into a datetime.
        found: Any = None if pa.types.is_temporal(dtype) and isinstance(value, int) else scalar.as_py()
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ColumnError(f"{msg}: {error}") from None
    if pa.types.is_floating(dtype):
        is_same = not isinstance(value, bool) and bool(np.isinf(found) == np.isinf(float(value)))
    else:
        is_same = found is None or bool(found == value)
    if not is_same:
        raise ColumnError(msg)
    return scalar


def _is_dense(dtype: pa.DataType) -> bool:
    """Whether values of a type, without nulls, are one tensor: numbers, times, and fixed-size lists of them."""
    while pa.types.is_fixed_size_list(dtype):
        dtype = dtype.value_type
    is_number = pa.types.is_integer(dtype) or pa.types.is_floating(dtype) or pa.types.is_boolean(dtype)
    return bool(is_number or (pa.types.is_temporal(dtype) and not pa.types.is_interval(dtype)))
