"""What a dataset shares with its copies in the workers of a plain ``torch.utils.data.DataLoader``.

Such a loader copies the dataset into its workers and tells nobody: batches are delivered where the training process
cannot count them, and a later `set_epoch` reaches no copy. A few integers in memory that all copies see make both
visible: workers mark that they deliver, the training process publishes its epoch.
"""

from __future__ import annotations

import os
from multiprocessing import sharedctypes
from multiprocessing.context import get_spawning_popen

from torch_dataloader_utils.errors import ProgressUnknownError

__all__ = ["Copies", "is_being_sent_to_a_process"]


_GENERATION, _EPOCH, _WAITING, _DELIVERED, _CONSUMER = range(5)


class Marks:
    """Integers that the training process and the workers of plain loaders see alike.

    `generation` counts what the training process did to the dataset (an iteration, an epoch set, a state loaded);
    only that process writes it, the epoch and whether a loaded state waits.
    """

    def __init__(self) -> None:
        self._values = sharedctypes.RawArray("q", 5)
        self._owner = os.getpid()

    @property
    def is_own(self) -> bool:
        """Whether this process made them, and so may publish."""
        return self._owner == os.getpid()

    def publish(self, epoch: int, *, waiting: bool) -> int:
        """Note that the dataset changed in the training process; return the new generation."""
        self._values[_EPOCH] = epoch
        self._values[_WAITING] = int(waiting)
        self._values[_CONSUMER] = 0
        self._values[_GENERATION] += 1
        return self.generation

    @property
    def generation(self) -> int:
        """How often the dataset changed in the training process."""
        return int(self._values[_GENERATION])

    @property
    def epoch(self) -> int:
        """The epoch in the training process."""
        return int(self._values[_EPOCH])

    @property
    def waiting(self) -> bool:
        """Whether a loaded state waits in the training process for its iteration."""
        return bool(self._values[_WAITING])

    def mark_delivered(self) -> None:
        """Note, in a worker, that batches of this generation are delivered where nobody counts them."""
        self._values[_DELIVERED] = self.generation

    @property
    def delivered(self) -> bool:
        """Whether workers have delivered batches of this generation."""
        return self.generation > 0 and self._values[_DELIVERED] == self.generation

    def consume(self, loader_seed: int) -> bool:
        """Say, in a worker, whether its iteration is the one that continues from the loaded state.

        Args:
            loader_seed: The baseline seed of the plain loader's iterator: the same in all of its workers.
        """
        if self._values[_CONSUMER] == 0:
            self._values[_CONSUMER] = loader_seed
        return bool(self._values[_CONSUMER] == loader_seed)


class Copies:
    """What a dataset knows of its copies in workers of plain loaders, and such a copy of the dataset it was made of."""

    def __init__(self, epoch: int = 0, *, waiting: bool = False) -> None:
        self._marks = Marks()
        self._seen = self._marks.publish(epoch, waiting=waiting)

    def publish(self, epoch: int, *, waiting: bool) -> None:
        """Note that the dataset changed in the training process."""
        if not self._marks.is_own:
            self._marks = Marks()
        self._seen = self._marks.publish(epoch, waiting=waiting)

    @property
    def have_delivered(self) -> bool:
        """Whether copies have delivered batches since the dataset changed last, where nobody counts them."""
        return self._marks.delivered

    def join(self, epoch: int, workers_of_state: int | None, *, num_workers: int, loader_seed: int) -> tuple[int, bool]:
        """Bring a copy, as a worker begins an iteration, to where the training process stands.

        Args:
            epoch: The copy's epoch.
            workers_of_state: The number of workers of the state that it was loaded with, or None.
            num_workers: The plain loader's.
            loader_seed: The baseline seed of its iterator.

        Returns:
            The epoch, and whether this iteration continues from the loaded state.

        Raises:
            ProgressUnknownError: If the copy cannot know where it stands, or the state has another number of workers.
        """
        continues = workers_of_state is not None
        if self._seen != self._marks.generation:
            if self._marks.waiting:
                msg = (
                    "a state was loaded after this plain DataLoader started its persistent workers, and cannot reach "
                    "them: make the DataLoader anew, or use the loader that create_dataloader returns"
                )
                raise ProgressUnknownError(msg)
            epoch, continues = self._marks.epoch, False
            self._seen = self._marks.generation
        if continues and self._marks.waiting and not self._marks.consume(loader_seed):
            continues = False
        self._marks.mark_delivered()
        if continues and workers_of_state != num_workers:
            msg = (
                f"the loaded state was saved under {workers_of_state} workers, this plain DataLoader has "
                f"{num_workers}: give it num_workers={workers_of_state}"
            )
            raise ProgressUnknownError(msg)
        return epoch, continues


def is_being_sent_to_a_process() -> bool:
    """Whether pickling happens to start a process: only then can shared memory travel along."""
    return get_spawning_popen() is not None
