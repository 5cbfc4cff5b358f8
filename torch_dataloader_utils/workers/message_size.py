"""How many batches a worker puts into its next message.

A message has a cost of its own, however many batches it holds. But finished batches wait for the rest of their message,
and a message takes memory. So a worker begins with one batch, and lets messages grow as long as they are small and
quick to make. Each worker decides for itself: the training process requests messages from the worker that it needs.
"""

from __future__ import annotations

GROWTH = 8
"""How many times as many batches as the message before it a message holds at most: the first ones say little."""

MAX_BATCHES = GROWTH**2

NUM_SINGLE = 4
"""So many messages hold one batch where there is a `collate_fn`, so that a new one can be tried out batch by batch."""

LONG_SEC = 0.05
"""Messages hold no more batches than are made in this time, or finished ones would wait too long for the rest."""

LARGE_BYTES = 8 << 20
"""Messages hold no more batches than have so many bytes, or a single one."""


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

    def record(self, batches: int, size: int, seconds: float) -> None:
        """Decide on the next message, from the batches of one, its bytes, and the time that it took to make."""
        self._made += 1
        if self._made < self._num_single or not batches:
            return
        by_size = LARGE_BYTES * batches // max(1, size)
        by_time = int(LONG_SEC * batches / max(seconds, LONG_SEC / MAX_BATCHES))
        self.batches = max(1, min(by_size, by_time, self.batches * GROWTH, MAX_BATCHES))
