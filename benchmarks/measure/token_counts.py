"""What became of the tokens of packed sequences, each of which is the number of its place in all documents, from 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["Sequences", "changes", "left_out", "sequences_changed"]

Sequences = list[np.ndarray[Any, Any]]
"""For each rank, the sequences that it delivered, in order; 0 is padding."""


def changes(whole: Sequences, delivered: Sequences, tokens: int) -> dict[str, int]:
    """Compare the tokens that came with those of an epoch without an interruption.

    Args:
        whole: What the ranks deliver without an interruption.
        delivered: What was delivered before and after a stop, by any number of ranks.
        tokens: How many tokens the documents have.

    Returns:
        Tokens ``lost``, that never came, and ``repeated``: each time that one came more often than without a stop.
    """
    wanted, came = _times(whole, tokens), _times(delivered, tokens)
    return {
        "lost": int(np.count_nonzero((wanted > 0) & (came == 0))),
        "repeated": int(np.maximum(came - np.maximum(wanted, 1), 0).sum()),
    }


def left_out(whole: Sequences, tokens: int) -> int:
    """Return how many tokens of the documents an epoch without an interruption does not deliver."""
    return tokens - int(np.count_nonzero(_times(whole, tokens)))


def sequences_changed(whole: Sequences, delivered: Sequences) -> int:
    """Return how many sequences of the ranks are not the same, at the same place, as without an interruption."""
    changed = 0
    for wanted, came in zip(whole, delivered, strict=True):
        both = min(len(wanted), len(came))
        changed += int((wanted[:both] != came[:both]).any(axis=1).sum()) + max(len(wanted), len(came)) - both
    return changed


def _times(sequences: Sequence[np.ndarray[Any, Any]], tokens: int) -> np.ndarray[Any, Any]:
    """Return how often each token came."""
    times = np.zeros(tokens + 1, np.int64)
    for own in sequences:
        times += np.bincount(own.ravel(), minlength=tokens + 1)
    return times[1:]
