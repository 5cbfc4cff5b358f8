"""How many batches workers put into a message: all the same number, so that streams take turns without waiting."""

from __future__ import annotations

from multiprocessing import sharedctypes

__all__ = ["MessageSizer"]


FACTOR = 4


MOST_BATCHES = FACTOR**3
"""Parcels grow in steps: to 4, 16 and 64 batches."""


CHANGES = 64
"""How often the number changes in an iteration at most; the last change makes messages smaller."""


QUICK_SEC = 0.005
"""A message that takes longer to make does not grow: what is ready would wait for what is not."""


SINGLE = 16
"""At least so many messages hold one batch: whoever tries out a `collate_fn` gets each batch as it is made."""


LARGE_BYTES = 8 << 20
"""A message does not grow beyond this; messages of more than twice as much, for batches have grown, become smaller."""


class MessageSizer:
    """The number of batches in each message, in memory that the training process and its workers share.

    Only the training process writes it, and only of messages that no worker has begun yet. The first messages hold one
    batch each, so that it is there soon.

    Args:
        most_begun: Parcels that a worker may have begun beyond those that have arrived.
    """

    def __init__(self, most_begun: int) -> None:
        self._most_begun = most_begun
        self._changes = sharedctypes.RawArray("q", 2 * CHANGES)  # from which message on, how many batches

    def reset(self) -> None:
        """Begin anew, while no worker makes messages."""
        self._changes[:] = [0] * (2 * CHANGES)

    def batches(self, number: int) -> int:
        """Return, in a worker, how many batches to put into a message.

        Args:
            number: The message's number in its stream, from 0.
        """
        return next((count for first, count in reversed(self._made()) if first <= number), 1)

    def note(self, number: int, size: int, seconds: float) -> None:
        """Let later messages grow, in the training process, if this one was small and quickly made; or shrink again.

        Args:
            number: The message's number in its stream.
            size: Its bytes.
            seconds: How long it took to make.
        """
        made = self._made()
        first, count = made[-1] if made else (0, 1)
        if number < first or len(made) == CHANGES:
            return
        if size > 2 * LARGE_BYTES and count > 1:
            changed = max(1, count // FACTOR)
            while changed > 1 and size * changed > LARGE_BYTES * count:
                changed //= FACTOR
        elif seconds <= QUICK_SEC and size * FACTOR <= LARGE_BYTES and count < MOST_BATCHES and len(made) < CHANGES - 1:
            changed = count * FACTOR
        else:
            return
        place = 2 * len(made)
        self._changes[place + 1] = changed
        self._changes[place] = max(SINGLE, number + self._most_begun + 2)

    def _made(self) -> list[tuple[int, int]]:
        """Return the changes so far: from which message on, how many batches."""
        changes = self._changes[:]
        return [(first, count) for first, count in zip(changes[::2], changes[1::2], strict=True) if first]
