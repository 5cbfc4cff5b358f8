"""The argument `packing`, checked: alone, beside other arguments, and against the columns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from torch_dataloader_utils.columns.arrow import leaf_type
from torch_dataloader_utils.columns.column_plan import Form, to_scalar
from torch_dataloader_utils.columns.decode import decoded_type
from torch_dataloader_utils.columns.options import Packing
from torch_dataloader_utils.errors import ColumnError
from torch_dataloader_utils.formats.opened_files import Opened
from torch_dataloader_utils.planning.plan import PlanOptions
from torch_dataloader_utils.planning.token_counts import SequenceCounts

UNKNOWN_SEQUENCES = "only reading tells how many sequences the rows are packed into; count_tokens counts them ahead"

SEQUENCES_OF_RANKS = "it needs the number of sequences of each rank, which count_tokens=True counts ahead"

REFUSED = {
    "uneven_ranks": (
        "allow",
        f"{SEQUENCES_OF_RANKS}; without it distributed.in_step lets ranks stop together",
    ),
    "virtual_ranks": (None, SEQUENCES_OF_RANKS),
    "row_id_column": (None, "a sequence has tokens of many rows"),
    "fingerprint": (False, "a sequence has tokens of many rows"),
    "mask_nulls": (None, "a sequence has tokens of many rows: leave rows with nulls out by a filter"),
    "column_formats": (None, "the packed columns have a form of their own"),
}
"""Arguments that have no meaning for sequences: their default values, and why."""

NEED_COUNTS = ("uneven_ranks", "virtual_ranks")
"""Those of them that are possible where tokens are counted. A mixture counts its sequences when it is made."""


def parse_packing(given: Mapping[str, Any], *, is_mixture: bool) -> Packing | None:
    """Return the argument, or raise a TypeError or ValueError if it does not fit the others."""
    packing = given["packing"]
    _require_counting(given, is_mixture=is_mixture)
    if packing is None:
        return None
    if not isinstance(packing, Packing):
        raise TypeError(f"packing={packing!r:.80}: expected a Packing, such as Packing('tokens', length=4096)")
    for name, (default, why) in REFUSED.items():
        if name == "row_id_column" and given["transform"] is not None:  # for the transform alone
            continue
        if name in NEED_COUNTS and (is_mixture or given["count_tokens"] is not False):
            continue
        if given[name] is not None and given[name] != default:
            raise ValueError(f"{name}={given[name]!r} beside packing: {why}")
    if given["output_format"] not in ("torch", "numpy"):
        raise ValueError(f"output_format={given['output_format']!r} beside packing: sequences are tensors or arrays")
    return packing


def _require_counting(given: Mapping[str, Any], *, is_mixture: bool) -> None:
    """Raise unless tokens can be counted as asked."""
    count_tokens = given["count_tokens"]
    if not isinstance(count_tokens, (bool, str)):
        raise TypeError(f"count_tokens={count_tokens!r:.80}: expected True, or the name of a column of lengths")
    if count_tokens == "":
        raise ValueError("count_tokens='': expected True, or the name of a column of lengths")
    if count_tokens is False:
        return
    if is_mixture:
        raise ValueError(f"count_tokens={count_tokens!r}: a mixture counts its sequences when it is made; leave it out")
    if given["packing"] is None:
        raise ValueError(f"count_tokens={count_tokens!r} counts the tokens of sequences: it needs `packing`")
    for name in ("filters", "transform"):
        if given[name] is not None:
            msg = f"count_tokens={count_tokens!r} beside {name}: only reading tells which documents are packed then; "
            raise ValueError(f"{msg}leave one of them out")


def packing_text(packing: Packing) -> str:
    """Return what states record: everything that decides which tokens a sequence has."""
    return json.dumps(
        {
            "column": packing.column,
            "length": packing.length,
            "split_documents": packing.split_documents,
            "separator": packing.separator,
            "strategy": packing.strategy,
        },
        default=dict,
    )


def sequence_counts(opened: Opened, options: PlanOptions) -> SequenceCounts | None:
    """Return what tells the sequences of shards, if tokens were counted."""
    tokens = opened.tokens
    if tokens is None or options.packing is None:
        return None
    packing = json.loads(options.packing)
    return SequenceCounts(
        tokens,
        length=packing["length"],
        strategy=packing["strategy"],
        split_documents=packing["split_documents"],
        has_separator=packing["separator"] is not None,
    )


def require_packable(packing: Packing, schema: pa.Schema, forms: Mapping[str, Form]) -> None:
    """Raise a ColumnError unless all columns are lists of numbers that hold the separator and the padding.

    One of them has to be that which is packed.
    """
    if packing.column not in forms:
        msg = f"Packing({packing.column!r}): there is no such column; there are {', '.join(map(repr, schema.names))}"
        raise ColumnError(msg)
    others = [name for name, form in forms.items() if form != "jagged" or not _has_numbers(schema.field(name).type)]
    if others:
        name = packing.column if packing.column in others else others[0]
        msg = f"packing: column {name!r} does not have lists of numbers, which alone can be packed, but is of type "
        msg += f"{schema.field(name).type}: "
        if name == packing.column:
            raise ColumnError(f"{msg}name another one, or make such lists of it by a transform")
        raise ColumnError(f"{msg}choose columns=[{packing.column!r}], or other lists as long as those")
    made = set(packing.outputs) & set(forms)
    if made:
        msg = f"packing: {min(made)!r} is a column of the files and an output of Packing: leave one of them out"
        raise ColumnError(msg)
    for option in (packing.separator, packing.pad_value):
        if isinstance(option, Mapping) and (missing := [name for name in forms if name not in option]):
            raise ColumnError(f"packing: {dict(option)!r} has no value for the column {missing[0]!r}")
    for name in forms:
        dtype = leaf_type(decoded_type(schema.field(name).type))
        options = {"separator": packing.separator_of(name), "pad_value": packing.pad_value_of(name)}
        for called, value in options.items():
            if value is not None and not (pa.types.is_boolean(dtype) and value in (0, 1)):
                to_scalar(value, dtype, f"packing: {called} of column {name!r}")


def _has_numbers(dtype: pa.DataType) -> bool:
    """Whether the values of a list are no lists themselves."""
    return not pa.types.is_nested(dtype.value_type)
