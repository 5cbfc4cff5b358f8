"""The argument `batching`, checked: alone, beside other arguments, and against the columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from torch_dataloader_utils.columns.arrow import is_list, require_column
from torch_dataloader_utils.columns.options import Padded
from torch_dataloader_utils.errors import ColumnError
from torch_dataloader_utils.planning.token_budget import UNKNOWN_BATCHES, TokenBudget

WAYS_OUT = "distributed.in_step(loader) lets ranks stop together, and Packing makes rows of one length"

REFUSED = {
    "batch_size": (None, "the number of rows in a batch follows from its tokens: give one of them"),
    "global_batch_size": (None, "the number of rows in a batch follows from its tokens: give one of them"),
    "packing": (None, "sequences all have the same length: give batch_size, the number of sequences in a batch"),
    "drop_last": (False, "batches have unequal numbers of rows, so that none of them is a short one: leave it out"),
    "uneven_ranks": ("allow", f"it needs the number of batches of each rank, and {UNKNOWN_BATCHES}: {WAYS_OUT}"),
    "virtual_ranks": (None, f"it needs batches of equally many rows, and {UNKNOWN_BATCHES}: {WAYS_OUT}"),
    "virtual_workers": (None, f"it needs batches of equally many rows, and {UNKNOWN_BATCHES}: {WAYS_OUT}"),
}
"""Arguments that make no sense beside a token budget: their default values, and why."""


def parse_batching(given: Mapping[str, Any], *, is_mixture: bool) -> TokenBudget | None:
    """Return the argument, or raise a TypeError or ValueError if it does not fit the others."""
    batching = given["batching"]
    if batching is None:
        return None
    if not isinstance(batching, TokenBudget):
        raise TypeError(f"batching={batching!r:.80}: expected a TokenBudget, such as TokenBudget('tokens', 32_768)")
    if is_mixture:
        msg = "batching is not possible with a mixture of sources, whose shares are exact in batches of equally many "
        raise ValueError(f"{msg}rows: Packing makes rows of one length, whose tokens batch_size counts")
    for name, (default, why) in REFUSED.items():
        if given[name] is not None and given[name] != default:
            raise ValueError(f"{name}={given[name]!r} beside batching: {why}")
    formats = given["column_formats"]
    form = formats.get(batching.column) if isinstance(formats, Mapping) else None
    if batching.padded and isinstance(form, Padded) and form.length:
        rows = batching.tokens // form.length
        advice = f"give batch_size={rows} in place of batching" if rows else "none fits into the budget"
        raise ValueError(f"TokenBudget(padded=True) and Padded(length={form.length}): all rows take as much: {advice}")
    return batching


def require_countable(batching: TokenBudget, schema: pa.Schema) -> None:
    """Raise a ColumnError unless the column that is counted is delivered and has lists."""
    require_column(batching.column, schema, " for batching")
    dtype = schema.field(batching.column).type
    if not is_list(dtype) and not pa.types.is_fixed_size_list(dtype):
        msg = f"TokenBudget({batching.column!r}): this column has the type {dtype}, and only values of lists are "
        raise ColumnError(f"{msg}counted: name a column of lists")
