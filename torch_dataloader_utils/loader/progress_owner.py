"""Which iteration, or which loaded state, owns the progress of a dataset's epoch."""

from __future__ import annotations

from multiprocessing.context import get_spawning_popen
from typing import Any

from torch.utils.data import get_worker_info

from torch_dataloader_utils.checkpoint.progress import Progress
from torch_dataloader_utils.loader.iteration import Iteration
from torch_dataloader_utils.loader.plain_loader import Copies
from torch_dataloader_utils.planning.excluded import EpochExclusions
from torch_dataloader_utils.planning.quotas import Quotas


class ProgressOwner:
    """Holds the epoch and its progress: that of the newest iteration, else that of a loaded state, else none.

    The iteration is None if a later call took the progress over. What is loaded waits for its iteration. `copies` tells
    what is known of the dataset's copies in workers of plain loaders.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.iteration: Iteration | None = None
        self.loaded: Progress | None = None
        self.copies = Copies()
        self._iterations = 0

    @property
    def progress(self) -> Progress | None:
        """The progress, or None at the beginning of an epoch."""
        return self.loaded if self.iteration is None else self.iteration.progress

    @property
    def upcoming(self) -> Progress | None:
        """The progress from which batches are delivered next; None for the beginning of the epoch.

        That is where the newest iterator stands, or where the next one will begin if that one can go on no more.
        """
        if self.iteration is None:
            return self.loaded
        return self.iteration.progress if self.iteration.is_running else None

    @property
    def is_untouched(self) -> bool:
        """Whether no batch was delivered since the dataset changed last, so that a call need not begin the epoch again.

        A loaded state that waits for its iteration counts as untouched, and so does an iterator that has begun to
        continue from it. An iteration that has ended, or failed, does not: no iterator can continue it.
        """
        if self.iteration is None:
            return not self.copies.have_delivered
        is_over = self.iteration.failed or self.iteration.finished()
        return self.iteration.metrics.batches_delivered == 0 and not is_over

    def begin(
        self, progress: Progress, processes: int, excluded: EpochExclusions, quotas: Quotas | None = None
    ) -> Iteration:
        """Begin an iteration that is read by some processes. It begins at this progress, and owns it from now on."""
        self.take_over("iter", self.epoch)
        self._iterations += 1
        self.iteration = Iteration(self._iterations, self.epoch, progress, processes, excluded, quotas=quotas)
        return self.iteration

    def prepare(self) -> None:
        """Let the progress be that at which the next iteration begins, so that it is right if making that one fails."""
        self.take_over("iter", self.epoch, self.loaded)

    def take_over(self, by: str, epoch: int, loaded: Progress | None = None) -> None:
        """Let a call take the progress from the iteration that owned it, whose iterator's error names the call.

        The next iteration continues what is loaded, or begins the epoch.
        """
        if self.iteration is not None:
            self.iteration.replace(by)
        self.epoch, self.iteration, self.loaded = epoch, None, loaded
        if get_worker_info() is None:
            self.copies.publish(epoch, waiting=loaded is not None)

    def join_plain_loader(self, workers_of_state: int, num_workers: int, loader_seed: int) -> None:
        """Take over, in a worker of a plain loader, the epoch and the loaded state of the training process.

        A loaded state needs `workers_of_state` workers. The other arguments are the plain loader's: see `Copies.join`.
        """
        needed = None if self.loaded is None else workers_of_state
        self.epoch, continues = self.copies.join(self.epoch, needed, num_workers=num_workers, loader_seed=loader_seed)
        self.loaded = self.loaded if continues else None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process: the iteration, and shared memory unless a process is started."""
        state = {**self.__dict__, "iteration": None}
        if get_spawning_popen() is None:  # shared memory can be pickled only to start a process
            del state["copies"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "copies" not in state:
            self.copies = Copies(self.epoch, waiting=self.loaded is not None)
