"""The state that a dataset shares with its copies in the workers of a plain ``torch.utils.data.DataLoader``.

Such a loader copies the dataset into its workers without telling the dataset: batches are delivered where the training
process cannot count them, and a later `set_epoch` reaches no copy. A few integers in shared memory make both visible:
workers mark that they deliver, and the training process publishes its epoch.
"""

from __future__ import annotations

import os
from multiprocessing import sharedctypes
from typing import Any

from torch_dataloader_utils.errors import ProgressUnknownError, WorkerError
from torch_dataloader_utils.reading.arrow_threads import allocate_in_new_thread
from torch_dataloader_utils.workers.shared_memory import SharedPage

_GENERATION, _EPOCH, _WAITING, _DELIVERED, _CONSUMER, _EXCLUDED = range(6)
"""Indices of the shared integers.

The generation counts the changes of the dataset in the training process: iterations, epochs set, states loaded. Only
that process writes it, the epoch, and whether a loaded state waits. Workers write the generation of which they have
delivered batches, and the seed of the plain loader's iterator that continues from the loaded state. The last counts how
often rows were excluded.
"""

ALLOCATE_SEC = 20.0
"""How long a new thread in a forked worker may take to allocate. It takes milliseconds, unless it hangs for ever."""


def require_allocator() -> None:
    """Raise, in a worker of a plain loader, if its new threads hang in Arrow's allocator: see `arrow_threads`.

    Raises:
        WorkerError: If they do.
    """
    if not allocate_in_new_thread(ALLOCATE_SEC):
        msg = "this worker hangs: it was forked while another thread of the training process held the lock of Arrow's "
        msg += "allocator; start workers with multiprocessing_context='forkserver', or use the loader that "
        raise WorkerError(f"{msg}create_dataloader returns, which starts such a worker again")


class Copies:
    """What a dataset knows of its copies in workers of plain loaders; in such a copy, what it knows of the dataset."""

    def __init__(self, epoch: int = 0, *, waiting: bool = False) -> None:
        self._owner = -1
        self._excluded = 0
        self.publish(epoch, waiting=waiting)

    def publish(self, epoch: int, *, waiting: bool) -> None:
        """Note that the dataset changed in the training process."""
        if self._owner != os.getpid():  # a forked copy must not write where its parent does
            self._page, self._owner = SharedPage.if_possible() or sharedctypes.RawArray("q", 6), os.getpid()
        marks = self._marks
        marks[_EPOCH], marks[_WAITING], marks[_CONSUMER] = epoch, int(waiting), 0
        marks[_GENERATION] += 1
        marks[_EXCLUDED] = self._excluded
        self._seen = marks[_GENERATION]

    def publish_exclusion(self) -> None:
        """Note that more rows are excluded in the training process."""
        self._excluded += 1
        self._marks[_EXCLUDED] = self._excluded

    @property
    def _marks(self) -> Any:
        """The shared integers."""
        return self._page.integers if isinstance(self._page, SharedPage) else self._page

    @property
    def have_delivered(self) -> bool:
        """Whether copies have delivered batches since the dataset changed last. The training process counts none."""
        marks = self._marks
        return bool(marks[_DELIVERED] == marks[_GENERATION])

    def join(self, epoch: int, workers_of_state: int | None, *, num_workers: int, loader_seed: int) -> tuple[int, bool]:
        """Return, when a worker begins an iteration, the epoch, and whether to continue from the loaded state.

        `epoch` is the copy's, and `workers_of_state` the number of workers of the state that it was loaded with, or
        None. `loader_seed` is the base seed of the plain loader's iterator: the same in all of its workers.

        Raises:
            ProgressUnknownError: If the copy cannot know the state, or the state has another number of workers.
        """
        marks, continues = self._marks, workers_of_state is not None
        if marks[_EXCLUDED] != self._excluded:
            msg = "rows were excluded after this plain DataLoader started its persistent workers, and are not known "
            msg += "there: create the DataLoader again, or use the loader that create_dataloader returns"
            raise ProgressUnknownError(msg)
        if self._seen != marks[_GENERATION]:
            if marks[_WAITING]:
                msg = "a state was loaded after this plain DataLoader started its persistent workers, and cannot reach "
                msg += "them: create the DataLoader again, or use the loader that create_dataloader returns"
                raise ProgressUnknownError(msg)
            epoch, continues = marks[_EPOCH], False
            self._seen = marks[_GENERATION]
        if continues and marks[_WAITING]:  # the first iterator continues from the state; later ones begin the epoch
            marks[_CONSUMER] = marks[_CONSUMER] or loader_seed
            continues = bool(marks[_CONSUMER] == loader_seed)
        marks[_DELIVERED] = marks[_GENERATION]
        if continues and workers_of_state != num_workers:
            msg = f"the loaded state was saved under {workers_of_state} workers, this plain DataLoader has "
            raise ProgressUnknownError(f"{msg}{num_workers}: give it num_workers={workers_of_state}")
        return epoch, continues
