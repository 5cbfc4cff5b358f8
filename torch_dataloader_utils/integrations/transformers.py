"""Hugging Face Transformers: a `Trainer` whose checkpoints hold the states of all ranks' loaders."""

from __future__ import annotations

import io
import math
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import has_length, sort_checkpoints

from torch_dataloader_utils.dataset.structured import StructuredDataset
from torch_dataloader_utils.distributed.gather import gather_states, load_gathered, on_all_ranks
from torch_dataloader_utils.distributed.steps import agreed_end
from torch_dataloader_utils.loader.data_loader import StructuredDataLoader
from torch_dataloader_utils.loader.device import require_loader
from torch_dataloader_utils.loader.iteration import BatchIterator
from torch_dataloader_utils.loader.user_warnings import warn_of_unrestored_steps
from torch_dataloader_utils.storage.atomic_write import write_atomically

STATES_NAME = "loader.pt"
"""The file of a checkpoint that holds the states of all ranks' loaders."""

if not hasattr(Trainer, "_run_epoch"):
    raise ImportError(f"the Trainer of transformers {transformers.__version__} is too old: install transformers>=5.23")


class ResumableTrainerMixin(Trainer):  # type: ignore[misc]
    """A `Trainer` that trains on this package's loader, and saves and loads it with its checkpoints.

    Put it before the trainer that you use: ``class MyTrainer(ResumableTrainerMixin, Trainer)``.

    A checkpoint holds the states of all ranks, in the file ``loader.pt``. ``train(resume_from_checkpoint=...)``
    continues exactly after the checkpoint's step, also on another number of ranks or workers: then each remaining row
    is delivered once, in another order. Nothing is read in order to be skipped. ``resume_from_checkpoint=True`` takes
    the newest checkpoint that was written completely.

    Epochs are the Trainer's, so `set_epoch` need not be called. The batch size is the loader's: it replaces
    ``per_device_train_batch_size`` of the training arguments. Their ``dataloader_*`` options do not apply.

    Args:
        *args: The Trainer's own arguments.
        train_dataloader: This rank's loader.
        **kwargs: The Trainer's own arguments, without ``train_dataset``.

    Raises:
        TypeError: If it is not this package's loader, or there is a ``train_dataset``, too.
        ValueError: If the loader is that of another rank or another number of ranks, or ``auto_find_batch_size`` is
            set, which cannot change the loader's batches.
    """

    def __init__(self, *args: Any, train_dataloader: StructuredDataLoader, **kwargs: Any) -> None:
        require_loader(train_dataloader, "train_dataloader")
        super().__init__(*args, **kwargs)
        if self.train_dataset is not None:
            raise TypeError("train_dataset and train_dataloader are both given: leave out train_dataset")
        if self.args.auto_find_batch_size:
            raise ValueError("auto_find_batch_size=True cannot change the batches of train_dataloader: leave it out")
        self.train_dataloader = train_dataloader
        self._require_own_rank()
        rows = self._rows.batch_size
        if rows is not None:
            self.args.per_device_train_batch_size = max(1, rows // max(1, self.args.n_gpu))
        self._train_batch_size = self.args.train_batch_size
        # Skipping passes over numbers of batches here, and reads nothing. Without it the Trainer's counts are wrong.
        self.args.ignore_data_skip = False
        self._batches = _Batches(train_dataloader)
        self._step_at_fetch = 0

    @property
    def _rows(self) -> StructuredDataset:
        """The dataset."""
        return self.train_dataloader.dataset  # type: ignore[return-value]

    @property
    def _accumulated(self) -> int:
        """Batches of a step of the optimizer."""
        return int(self.args.gradient_accumulation_steps)

    def _require_own_rank(self) -> None:
        if self.get_sp_size() > 1:
            msg = "sequence parallelism gathers the batches of its processes, and would train on each of this loader's "
            raise ValueError(msg + "several times: leave it out, or use a Trainer without this mixin")
        alike = self.get_tp_size() * self.get_cp_size()  # processes that share their batches
        process, dataset = self.args.process_index, self._rows
        num_ranks, rank = self.args.world_size // alike, process // alike
        if (dataset.num_ranks, dataset.rank) != (num_ranks, rank):
            msg = f"train_dataloader is that of rank {dataset.rank} of {dataset.num_ranks}, and this is process "
            msg += f"{process} of {self.args.world_size}, which is data-parallel rank {rank} of {num_ranks}: make the "
            options = "without num_ranks and rank" if alike == 1 else f"with num_ranks={num_ranks}, rank={rank}"
            raise ValueError(f"{msg}loader after the TrainingArguments, {options}")

    # What the Trainer calls, in this order ---------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train: see `Trainer.train`. With True, continue from the newest checkpoint that was written completely."""
        if resume_from_checkpoint is True:  # the Trainer would take one in whose midst it was killed
            found = [
                path for path in sort_checkpoints(self.args.output_dir) if Path(path, TRAINER_STATE_NAME).is_file()
            ]
            resume_from_checkpoint = found[-1] if found else True
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the batches of the loader, which the Trainer asks for by their number in the epoch."""
        return DataLoader(self._batches, batch_sampler=_Numbers(self._batches), collate_fn=_only)

    def set_initial_training_values(self, args: Any, dataloader: DataLoader[Any]) -> tuple[Any, ...]:
        """Compute the training's length. With `max_steps` no number of epochs ends it: their lengths may differ."""
        self.train_dataloader.set_epoch(0)  # whose length the Trainer plans its steps with
        num_train_epochs, *others = super().set_initial_training_values(args, dataloader)
        return (sys.maxsize if args.max_steps > 0 else num_train_epochs, *others)

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        """Return the epoch and how many batches of it were delivered: by the loader's state, where one is loaded."""
        start: tuple[int, int] = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        self._step_at_fetch = self.state.global_step
        if resume_from_checkpoint is None:
            return start
        saved_ranks = self._load_states(Path(resume_from_checkpoint))
        epoch, batches = self._rows.epoch, self._batches.delivered
        if on_all_ranks(self._batches.left == 0 if self._batches.has_length else self._rows.is_finished):
            epoch, batches = epoch + 1, 0
            self.train_dataloader.set_epoch(epoch)
        # Whole steps, also where the run that saved the state accumulated other numbers of batches.
        passed = math.ceil(batches / self._accumulated) * self._accumulated
        if saved_ranks != self._rows.num_ranks:
            self._set_max_steps(epoch, passed, num_update_steps_per_epoch)
        ends_within_an_epoch = self.args.max_steps > 0 or not float(self.args.num_train_epochs).is_integer()
        if ends_within_an_epoch and self.state.global_step >= self.state.max_steps:
            return sys.maxsize, 0  # no epoch is left: the Trainer would look for the end only after a step
        return epoch, passed

    def _prepare_for_training(self, max_steps: int, *args: Any, **kwargs: Any) -> Any:
        """Make the schedule of learning rates for the steps that `_init_training_state` found."""
        return super()._prepare_for_training(self.state.max_steps or max_steps, *args, **kwargs)

    def _run_epoch(self, *, epoch: int, num_update_steps_per_epoch: int, **kwargs: Any) -> None:
        """Train on an epoch, or on the rest of it. Its length may differ from that of the first."""
        self.train_dataloader.set_epoch(epoch)
        passed = kwargs["steps_trained_in_current_epoch"] if epoch == kwargs["epochs_trained"] else 0
        self._batches.begin(passed)
        if self._batches.has_length:
            kwargs["steps_in_epoch"] = passed + self._batches.left
            self._set_max_steps(epoch, passed, num_update_steps_per_epoch)
            num_update_steps_per_epoch = self._updates(kwargs["steps_in_epoch"])
        before = self.state.global_step
        super()._run_epoch(epoch=epoch, num_update_steps_per_epoch=num_update_steps_per_epoch, **kwargs)
        self._count_steps()
        if self.train_dataloader.leaves_restored:
            warn_of_unrestored_steps(epoch, "the Trainer")
        if 0 < self._batches.fetched < self._accumulated and self.state.global_step == before and passed == 0:
            msg = f"an epoch ended before the {self._accumulated} batches of a step (gradient_accumulation_steps) were "
            msg += "there, so the optimizer made no step in it; if all epochs are that short, the training never ends: "
            warnings.warn(f"{msg}use a smaller batch_size, fewer batches a step, or fewer ranks", stacklevel=2)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Fetch the batches of a step. Those of the step before count as delivered now, if it was made."""
        self._count_steps()
        samples = super().get_batch_samples(*args, **kwargs)
        self._step_at_fetch = self.state.global_step
        return samples

    def _save_rng_state(self, output_dir: str) -> None:
        """Save what the Trainer saves of each rank, and then the states of all ranks' loaders.

        The Trainer's own state, by which a checkpoint is complete, comes after it.
        """
        super()._save_rng_state(output_dir)
        self._count_steps()
        is_alike = self._rows.num_ranks == 1  # on all processes
        states = [self.train_dataloader.state_dict()] if is_alike else gather_states(self.train_dataloader)
        if self.args.should_save:
            content = io.BytesIO()
            torch.save(states, content)
            write_atomically(Path(output_dir, STATES_NAME), content.getvalue())

    # Within ----------------------------------------------------------------------------------------------------------

    def _count_steps(self) -> None:
        """Count the batches that were fetched as delivered if the optimizer has made a step since."""
        if self.state.global_step > self._step_at_fetch:
            self._batches.count()

    def _updates(self, batches: int) -> int:
        """Return the optimizer's steps for so many batches."""
        return max(1, math.ceil(batches / self._accumulated))

    def _set_max_steps(self, epoch: int, passed: int, updates_of_others: int) -> None:
        """Let the training end with its last epoch, however many steps each epoch has."""
        if self.args.max_steps > 0 or not self._batches.has_length:
            return
        before = passed // self._accumulated
        updates, epochs_left = self._updates(passed + self._batches.left), self.args.num_train_epochs - epoch
        if epochs_left > 1:
            updates += math.ceil((epochs_left - 1) * updates_of_others)
        else:
            updates = math.ceil(epochs_left * updates)
        self.state.max_steps = self.state.global_step - before + updates

    def _load_states(self, checkpoint: Path) -> int:
        """Load the states of all ranks from a checkpoint, and return their number."""
        path = checkpoint / STATES_NAME
        if not path.is_file():
            msg = f"there is no {path}: the checkpoint was saved by another Trainer, or with save_only_model, and does "
            msg += "not say which rows it was trained on; continue from a checkpoint of this Trainer, or load only the "
            raise FileNotFoundError(msg + "model's weights from it and call train() without resume_from_checkpoint")
        try:
            states = torch.load(path, weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"{path} does not hold the states of loaders: {error}") from None
        load_gathered(self.train_dataloader, states)
        return len(states)


class _Batches(Dataset[Any]):
    """The batches of an epoch. One that was fetched is delivered, and so counted, only with its optimizer's step."""

    def __init__(self, loader: StructuredDataLoader) -> None:
        self.loader = loader
        self.has_length: bool = has_length(loader)
        self._agreed: Callable[[bool], bool] = bool  # of a pass that has begun
        self.passed = 0
        self._batches: BatchIterator | None = None
        self.fetched = 0

    @property
    def delivered(self) -> int:
        """Batches of the epoch that were delivered before the next one. Skipped steps do not count."""
        return self.loader.progress()["initial"]

    @property
    def left(self) -> int:
        """Batches of the epoch that were not delivered."""
        return len(self.loader) - self.delivered

    def begin(self, passed: int) -> None:
        """Begin an epoch, or continue it after so many batches."""
        self.passed, self._batches, self.fetched = passed, None, 0

    def has_next(self) -> bool:
        """Whether there is a batch after those that were fetched: on all ranks, if their numbers may differ."""
        if self._batches is None:
            # torch draws a seed when it starts workers. The model's random numbers must not depend on that.
            with torch.random.fork_rng(devices=[]):
                self._batches = iter(self.loader)
            self._agreed = agreed_end(self.loader)
        return self._agreed(self._batches.has_next(self.fetched))

    def __getitem__(self, number: int) -> Any:
        """Return the batch of which `has_next` said that it is there: the one with this number."""
        assert self._batches is not None  # noqa: S101 - `_Numbers` asks has_next() before
        batch = self._batches.peek(self.fetched)
        self.fetched += 1
        return batch

    def __len__(self) -> int:
        """Return the rows of an epoch on all ranks, rounded up to whole batches: the Trainer reports it."""
        dataset: StructuredDataset = self.loader.dataset  # type: ignore[assignment]
        batches, rows = len(self.loader), dataset.batch_size
        assert rows is not None  # noqa: S101 - else there was no number of batches
        return batches * rows * dataset.num_ranks

    def count(self) -> None:
        """Deliver the batches that were fetched."""
        while self._batches is not None and self.fetched:
            next(self._batches)
            self.fetched -= 1


class _Numbers:
    """The numbers of an epoch's batches. To skip batches, Accelerate passes over numbers, and asks for no batch."""

    def __init__(self, batches: _Batches) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches.loader)

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([number] for number in range(self._batches.passed))
        number = self._batches.passed
        while self._batches.has_next():
            yield [number]
            number += 1


def _only(batches: list[Any]) -> Any:
    [batch] = batches
    return batch
