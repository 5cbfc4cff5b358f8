"""How many batches workers put into a parcel: all the same number, so that streams take turns without waiting."""

from __future__ import annotations

from multiprocessing import sharedctypes

__all__ = ["Pace"]

FACTOR = 4
STEPS = 3
"""Parcels grow in steps: to 4, 16 and 64 batches."""

QUICK_SEC = 0.005
"""A parcel that takes longer to make does not grow: what is ready would wait for what is not."""

SINGLE = 16
"""At least so many parcels hold one batch: whoever tries out a `collate_fn` gets each batch as it is made."""

LARGE_BYTES = 8 << 20
"""A parcel does not grow beyond this."""


class Pace:
    """The number of batches in each parcel, in memory that the training process and its workers share.

    Only the training process writes it, and only of parcels that no worker has begun yet. The first parcels hold one
    batch each, so that it is there soon.

    Args:
        most_begun: Parcels that a worker may have begun beyond those that have arrived.
    """

    def __init__(self, most_begun: int) -> None:
        self._most_begun = most_begun
        self._steps = sharedctypes.RawArray("q", STEPS)

    def reset(self) -> None:
        """Begin anew, while no worker makes parcels."""
        self._steps[:] = [0] * STEPS

    def batches(self, number: int) -> int:
        """Return, in a worker, how many batches to put into a parcel.

        Args:
            number: The parcel's number in its stream, from 0.
        """
        steps: int = sum(0 < step <= number for step in self._steps)
        return int(FACTOR**steps)

    def note(self, number: int, size: int, seconds: float) -> None:
        """Let later parcels grow, in the training process, if this one was small and quickly made.

        Args:
            number: The parcel's number in its stream.
            size: Its bytes.
            seconds: How long it took to make.
        """
        taken = sum(step > 0 for step in self._steps)
        has_settled = not taken or number >= self._steps[taken - 1]
        if taken < STEPS and has_settled and seconds <= QUICK_SEC and size * FACTOR <= LARGE_BYTES:
            self._steps[taken] = max(SINGLE, number + self._most_begun + 2)
