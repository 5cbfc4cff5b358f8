"""How many batches workers put into a message.

Few large messages cost less than many small ones. But torch collects one message from each worker in turn, and the
loader delivers one batch from each in turn. So the n-th messages of all workers must hold the same number of batches,
or the batches of some workers would pile up while others are waited for.

The training process decides the numbers from the messages that arrive, and writes them into shared memory that
workers read. A change applies from a message on that no worker can have started yet. That way all workers agree
without waiting for one another.
"""

from __future__ import annotations

from multiprocessing import sharedctypes

GROWTH = 4

MAX_BATCHES = GROWTH**3
"""Messages grow in steps: from a single batch to 4, 16 and 64."""

MAX_CHANGES = 64
"""How often the number changes in one iteration at most. The last change is kept for making messages smaller."""

QUICK_SEC = 0.005
"""If a message took longer to make, later ones do not grow: finished batches would wait for the rest of theirs."""

NUM_SINGLE = 16
"""At least this many messages hold one batch, so that a new `collate_fn` can be tried out batch by batch."""

LARGE_BYTES = 8 << 20
"""Messages do not grow beyond this. If batches get larger, and a message twice as large as this, later ones shrink."""


class MessageSizer:
    """The number of batches in each message, in memory that the training process shares with all its workers.

    Only the training process writes. The first messages hold one batch each, so that training starts soon.

    Args:
        max_started: Number of messages that a worker may have started beyond those that have arrived.
    """

    def __init__(self, max_started: int) -> None:
        self._max_started = max_started
        # Pairs: from which message on, how many batches. A pair with message 0 is not in use.
        self._pairs = sharedctypes.RawArray("q", 2 * MAX_CHANGES)

    def reset(self) -> None:
        """Forget all changes, between two iterations, when no worker makes messages."""
        self._pairs[:] = [0] * (2 * MAX_CHANGES)

    def batches(self, number: int) -> int:
        """Return, in a worker, how many batches to put into the message of this number, counted from 0."""
        return next((count for first, count in reversed(self._changes()) if first <= number), 1)

    def record(self, number: int, size: int, seconds: float) -> None:
        """Decide, in the training process, from a message that arrived whether later ones grow or shrink.

        The message has a number in its stream, from 0, and a size in bytes, and took some seconds to make.
        """
        changes = self._changes()
        first, count = changes[-1] if changes else (0, 1)
        if number < first or len(changes) == MAX_CHANGES:  # this message was made before the last change applied
            return
        is_small = size * GROWTH <= LARGE_BYTES
        if size > 2 * LARGE_BYTES and count > 1:
            changed = max(1, count // GROWTH)
            while changed > 1 and size * changed > LARGE_BYTES * count:
                changed //= GROWTH
        elif is_small and seconds <= QUICK_SEC and count < MAX_BATCHES and len(changes) < MAX_CHANGES - 1:
            changed = count * GROWTH
        else:
            return
        index = 2 * len(changes)
        # The message's number last: a worker that reads in between takes the pair for one that is not in use.
        self._pairs[index + 1] = changed
        self._pairs[index] = max(NUM_SINGLE, number + self._max_started + 2)

    def _changes(self) -> list[tuple[int, int]]:
        """Return the changes so far: from which message on, how many batches."""
        pairs = self._pairs[:]
        return [(first, count) for first, count in zip(pairs[::2], pairs[1::2], strict=True) if first]
