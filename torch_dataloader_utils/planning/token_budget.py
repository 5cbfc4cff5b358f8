"""Batches by tokens: which rows make a batch, by their lengths alone. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

Lengths: TypeAlias = npt.NDArray[np.int64]

Oversized: TypeAlias = Literal["error", "alone"]
OVERSIZED: tuple[Oversized, ...] = get_args(Oversized)

UNKNOWN_BATCHES = "only reading tells how many rows fit into the token budget of each batch"

FIRST_WINDOW = 64
"""Rows that are looked at first for the end of a padded batch."""


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Batches of as many whole rows as fit into a number of tokens.

    A batch ends before the first row that does not fit. An empty list takes no tokens.

    Attributes:
        column: The column of lists whose values are counted.
        tokens: Values that a batch holds at most.
        padded: Whether padding counts: then a batch takes its number of rows times its longest row.
        oversized: What to do with a row that alone has more: ``"error"`` raises a `ColumnError` that names it,
            ``"alone"`` delivers it as a batch of its own.
    """

    column: str
    tokens: int
    padded: bool = False
    oversized: Oversized = "error"

    def __post_init__(self) -> None:
        if not isinstance(self.column, str):
            raise TypeError(f"TokenBudget({self.column!r}): expected the name of a column")
        if type(self.tokens) is not int or self.tokens < 1:
            raise ValueError(f"TokenBudget(tokens={self.tokens!r}): expected a number of tokens, at least 1")
        if type(self.padded) is not bool:
            raise TypeError(f"TokenBudget(padded={self.padded!r}): expected True or False")
        if self.oversized not in OVERSIZED:
            raise ValueError(f"TokenBudget(oversized={self.oversized!r}): expected one of {', '.join(OVERSIZED)}")

    def cuts_as(self, other: TokenBudget) -> bool:
        """Whether it makes the same batches, as far as neither ends in an error."""
        return (self.column, self.tokens, self.padded) == (other.column, other.tokens, other.padded)


def batch_stops(lengths: npt.NDArray[Any], budget: TokenBudget) -> list[int]:
    """Return where each complete batch of consecutive rows ends.

    A batch is complete if the row behind it does not fit, or if its only row has more tokens than the budget. So rows
    that follow change no batch, and the rows behind the last stop fit into one batch.
    """
    lengths = lengths.astype(np.int64, copy=False)
    return _padded_stops(lengths, budget.tokens) if budget.padded else _plain_stops(lengths, budget.tokens)


def _plain_stops(lengths: Lengths, tokens: int) -> list[int]:
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    stops: list[int] = []
    start = 0
    while start < len(lengths):
        stop = int(np.searchsorted(sums, sums[start] + tokens, side="right")) - 1
        if stop == len(lengths):
            break
        start = max(stop, start + 1)
        stops.append(start)
    return stops


def _padded_stops(lengths: Lengths, tokens: int) -> list[int]:
    stops: list[int] = []
    start, window = 0, FIRST_WINDOW
    while start < len(lengths):
        stop = start + _rows_that_fit(lengths[start:], tokens, window)
        if stop == len(lengths):
            break
        window = max(FIRST_WINDOW, 2 * (stop - start))
        start = max(stop, start + 1)
        stops.append(start)
    return stops


def _rows_that_fit(lengths: Lengths, tokens: int, window: int) -> int:
    """Return how many of the first rows fit, padded. A window that is too small is doubled."""
    while True:
        seen = lengths[:window]
        taken = np.maximum.accumulate(seen) * np.arange(1, len(seen) + 1)
        rows = int(np.searchsorted(taken, tokens, side="right"))
        if rows < len(seen) or len(seen) == len(lengths):
            return rows
        window *= 2
