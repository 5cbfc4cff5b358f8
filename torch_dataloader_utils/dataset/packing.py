"""The argument `packing`, checked: alone, beside other arguments, and against the columns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from torch_dataloader_utils.columns.column_plan import Form
from torch_dataloader_utils.columns.options import Packing
from torch_dataloader_utils.errors import ColumnError

UNKNOWN_SEQUENCES = "only reading tells how many sequences the rows are packed into"

REFUSED = {
    "uneven_ranks": (
        "allow",
        "it needs the number of sequences of each rank; distributed.in_step lets ranks stop together",
    ),
    "virtual_ranks": (None, "it needs the number of sequences of each rank"),
    "row_id_column": (None, "a sequence has tokens of many rows"),
    "fingerprint": (False, "a sequence has tokens of many rows"),
    "mask_nulls": (None, "a sequence has tokens of many rows: leave rows with nulls out by a filter"),
    "column_formats": (None, "the packed columns have a form of their own"),
}
"""Arguments that have no meaning for sequences: their default values, and why."""


COUNTED = ("uneven_ranks", "virtual_ranks")
"""Those that a mixture may have: its sequences are counted when it is made."""


def parse_packing(given: Mapping[str, Any], *, is_mixture: bool) -> Packing | None:
    """Return the argument, or raise a TypeError or ValueError if it does not fit the others."""
    packing = given["packing"]
    if packing is None:
        return None
    if not isinstance(packing, Packing):
        raise TypeError(f"packing={packing!r:.80}: expected a Packing, such as Packing('tokens', length=4096)")
    for name, (default, why) in REFUSED.items():
        if name == "row_id_column" and given["transform"] is not None:  # for the transform alone
            continue
        if name in COUNTED and is_mixture:
            continue
        if given[name] is not None and given[name] != default:
            raise ValueError(f"{name}={given[name]!r} beside packing: {why}")
    if given["output_format"] not in ("torch", "numpy"):
        raise ValueError(f"output_format={given['output_format']!r} beside packing: sequences are tensors or arrays")
    return packing


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


def require_packable(packing: Packing, columns: Iterable[str], forms: Mapping[str, Form]) -> None:
    """Raise a ColumnError unless all columns are lists of numbers, and one of them that which is packed."""
    if packing.column not in forms:
        msg = f"Packing({packing.column!r}): there is no such column; there are {', '.join(map(repr, columns))}"
        raise ColumnError(msg)
    others = [name for name, form in forms.items() if form != "jagged"]
    if others:
        msg = f"packing: column {others[0]!r} does not have lists of numbers, which alone can be packed: "
        raise ColumnError(f"{msg}choose columns=[{packing.column!r}], or other lists as long as those")
    made = set(packing.outputs) & set(forms)
    if made:
        msg = f"packing: {min(made)!r} is a column of the files and an output of Packing: leave one of them out"
        raise ColumnError(msg)
    for option in (packing.separator, packing.pad_value):
        if isinstance(option, Mapping) and (missing := [name for name in forms if name not in option]):
            raise ColumnError(f"packing: {dict(option)!r} has no value for the column {missing[0]!r}")
