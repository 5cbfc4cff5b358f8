"""How many batches a worker puts into its next message.

A message has a cost of its own, however many batches it holds. But finished batches wait for the rest of their message,
and a message takes memory. So a worker begins with one batch, and lets messages grow as long as they are small and
quick to make. Each worker decides for itself: the training process requests messages from the worker that it needs.
"""

from __future__ import annotations

GROWTH = 4

MAX_BATCHES = GROWTH**3
"""Messages grow in steps: from a single batch to 4, 16 and 64."""

NUM_SINGLE = 4
"""So many messages hold one batch where there is a `collate_fn`, so that a new one can be tried out batch by batch."""

QUICK_SEC = 0.01
"""If a message took longer to make, later ones do not grow: finished batches would wait too long for the rest."""

LARGE_BYTES = 8 << 20
"""Messages do not grow beyond this. If batches get larger, and a message twice as large as this, later ones shrink."""


class MessageSizer:
    """The number of batches in the next message of an iteration.

    Args:
        num_single: At least so many messages hold one batch.

    Attributes:
        batches: How many batches to put into the next message.
    """

    def __init__(self, num_single: int = 1) -> None:
        self._num_single = num_single
        self._made = 0
        self.batches = 1

    def record(self, size: int, seconds: float) -> None:
        """Decide, from the size in bytes of a message and the time that it took to make, on the next one."""
        self._made += 1
        is_small = size * GROWTH <= LARGE_BYTES
        if size > 2 * LARGE_BYTES:
            before = self.batches
            while self.batches > 1 and size * self.batches > LARGE_BYTES * before:
                self.batches //= GROWTH
        elif is_small and seconds <= QUICK_SEC and self.batches < MAX_BATCHES and self._made >= self._num_single:
            self.batches *= GROWTH
