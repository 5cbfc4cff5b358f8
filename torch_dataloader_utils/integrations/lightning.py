"""Lightning: a training loader whose states of all ranks are in Lightning's own checkpoints."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any, TypeVar

from lightning import Trainer
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fetchers import _DataFetcher, _PrefetchDataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.loop import _Loop
from torch.utils._pytree import tree_map_only

from torch_dataloader_utils.dataset.structured import StructuredDataset
from torch_dataloader_utils.distributed.gather import gather_states, load_gathered
from torch_dataloader_utils.distributed.steps import agreed_end
from torch_dataloader_utils.errors import CheckpointMismatchError, RankMismatchError
from torch_dataloader_utils.loader.data_loader import StructuredDataLoader
from torch_dataloader_utils.loader.device import require_loader
from torch_dataloader_utils.loader.iteration import BatchIterator
from torch_dataloader_utils.loader.skip_requests import SkipRequests
from torch_dataloader_utils.loader.user_warnings import warn_of_unrestored_steps

T = TypeVar("T")


class ResumableLoader:
    """A training loader that Lightning saves and loads with its checkpoints.

    Pass it to the trainer: ``trainer.fit(model, ResumableLoader(loader))``, or return it from `train_dataloader`.

    Lightning's checkpoint holds the states of all ranks. ``fit(..., ckpt_path=...)`` continues exactly after the last
    step of the checkpoint, also under another number of ranks or workers: then each remaining row is delivered once, in
    another order. Epochs are Lightning's, so `set_epoch` need not be called.

    Lightning fetches a batch ahead where it does not know the length of an epoch. Such a batch counts as delivered only
    when the training loop takes it.

    Args:
        loader: This rank's loader.

    Raises:
        TypeError: If it is not this package's loader.
    """

    def __init__(self, loader: StructuredDataLoader) -> None:
        require_loader(loader)
        self.loader = loader
        self._batches: _Batches | None = None
        self._pass_length: int | None = None  # if steps were skipped or restored since the pass began
        self._requests = loader.skip_requests  # when Lightning was told the length of the epoch
        self._finished: int | None = None
        self._was_loaded = False
        self._refused: str | None = None  # why the training could not be resumed

    @property
    def dataset(self) -> StructuredDataset:
        """The dataset."""
        return self.loader.dataset  # type: ignore[return-value]

    @property
    def sampler(self) -> ResumableLoader:
        """This object: Lightning calls `set_epoch` of a loader's sampler, and of nothing else."""
        return self

    def __len__(self) -> int:
        """Return the number of batches of the whole epoch, also if it continues from a state.

        Raises:
            TypeError: If it is not known before the rows are read.
        """
        return len(self.loader) if self._pass_length is None else self._pass_length

    def __iter__(self) -> Iterator[Any]:
        """Begin the epoch, or continue from a loaded state.

        Raises:
            TypeError: If a Trainer of the package ``pytorch_lightning`` calls.
        """
        _refuse_other_lightning()
        self._batches = _Batches(self.loader, _caller(_DataFetcher), _calling_fit_loop(), self._requests)
        return self._batches

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. Lightning calls it at the beginning of each, after it has begun to iterate.

        Raises:
            ValueError: If Lightning goes on within the epoch, and its checkpoint holds no state of the loader.
        """
        fit_loop, self._pass_length = _calling_fit_loop(), None
        was_late = fit_loop is not None and _load_late(fit_loop)
        resumed = fit_loop if fit_loop is not None and fit_loop.is_resuming and _is_lightnings_call() else None
        if resumed is not None:
            _load_ended(resumed)
            self._require_state(resumed)
        begins = epoch not in (self.dataset.epoch, self._finished)
        if begins and self.loader.leaves_restored:
            warn_of_unrestored_steps(self.dataset.epoch, "Lightning")
        if epoch != self._finished:  # the loaded state had ended that epoch, which would begin again
            self._finished = None
            self.loader.set_epoch(epoch)
        if fit_loop is None:
            return
        if resumed is not None:
            _mark_saved(resumed.trainer)
            _leave_ended_epoch(resumed)
        if resumed is not None or not fit_loop.is_resuming:
            self._was_loaded, self._refused = False, None
        if was_late or (begins and (fit_loop.is_resuming or epoch == 0)):
            iter(fit_loop._data_fetcher)  # noqa: SLF001 - Lightning does so only in later epochs
        self._requests = self.loader.skip_requests
        if fit_loop.max_batches != float("inf"):
            _correct_length(self.loader, fit_loop, _known_length(self), begins=True)
            if _must_look_ahead(self.loader, fit_loop):
                _look_ahead(fit_loop._data_fetcher)  # noqa: SLF001

    def _require_state(self, fit_loop: _FitLoop) -> None:
        """Raise if Lightning goes on within an epoch, and this loader, which got no state, would begin it anew."""
        batches = fit_loop.epoch_loop.batch_progress
        done = batches.current.processed
        if self._was_loaded or not fit_loop.restarted_mid_epoch or not done or batches.is_last_batch:
            return
        msg = f"the checkpoint was saved within an epoch, after batch {done} of it, and does not say which rows its "
        msg += "batches had: it was saved without ResumableLoader, or by a training that failed before its loader was "
        msg += "made; continue from another checkpoint, or load only the model's weights and call fit() without "
        self._refused = f"{msg}ckpt_path"
        raise ValueError(self._refused)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks. All ranks call it together, as Lightning does for each checkpoint."""
        if self._refused is not None:
            return {"refused": self._refused}
        with nullcontext() if self._batches is None else self._batches.trained():
            return {"ranks": gather_states(self.loader)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states of all ranks. All ranks call it together, as Lightning does.

        Raises:
            CheckpointMismatchError: If they belong to another plan.
            RankMismatchError: If they do not fit together.
            ValueError: If it was saved without this class, or by a training that could not be resumed: that has
                Lightning's counts, and none of this loader's.
        """
        try:
            self._load(state_dict)
        except ValueError as error:
            self._refused = str(error)  # a checkpoint of this failure may follow
            raise

    def _load(self, state_dict: dict[str, Any]) -> None:
        if "refused" in state_dict:
            raise ValueError(f"the checkpoint is of a training that could not be resumed: {state_dict['refused']}")
        if "ranks" not in state_dict:
            msg = "the checkpoint holds the state of rank 0's loader alone, which counts batches that were fetched "
            raise ValueError(msg + "ahead as delivered: it was saved without ResumableLoader, and cannot be continued")
        load_gathered(self.loader, state_dict["ranks"])
        self._batches = self._pass_length = self._refused = None
        self._was_loaded = True
        self._finished = self.dataset.epoch if self.dataset.is_finished else None


class ResumableDataModuleMixin:
    """Has each loader of this package that `train_dataloader` returns wrapped in a `ResumableLoader`.

    ``class Rows(ResumableDataModuleMixin, LightningDataModule)``, or in front of a data module that exists. Its
    `train_dataloader` returns the loader that `create_dataloader` made, also in a list or a dictionary.

    Raises:
        TypeError: Where the class is defined, if it is no data module.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        make = getattr(cls, "train_dataloader", None)  # this class's own, or a data module's that it inherits from
        if make is None:
            raise TypeError(f"{cls.__name__} has no train_dataloader: it is no LightningDataModule")

        @functools.wraps(make)  # by which Lightning sees whether a method is the user's
        def train_dataloader(self: Any) -> Any:
            return tree_map_only(StructuredDataLoader, ResumableLoader, make(self))

        cls.train_dataloader = train_dataloader  # type: ignore[attr-defined] # in LightningDataModule


class _Batches(Iterator[Any]):
    """The batches of a pass. What Lightning has fetched ahead is delivered, and so counted, only when it is taken."""

    def __init__(
        self,
        loader: StructuredDataLoader,
        fetcher: _DataFetcher | None,
        fit_loop: _FitLoop | None,
        requests: SkipRequests,
    ) -> None:
        self._loader = loader
        self._fetcher = fetcher
        self._fit_loop = fit_loop
        self._progress = None if fit_loop is None else fit_loop.epoch_loop.batch_progress.total
        self._requests = requests
        self._batches: BatchIterator | None = None
        self._agreed: Callable[[bool], bool] = bool
        self._fetched = 0
        self._trained = -1  # Lightning's count when the last batch was delivered

    def __next__(self) -> Any:
        begins = self._batches is None
        if self._batches is None:  # only now: Lightning also calls iter() to see whether it can
            self._batches = iter(self._loader)
            if self._fit_loop is not None:  # now it is known whether rows are excluded, perhaps by a hook
                self._agreed = agreed_end(self._loader)
        self._count(self._batches)
        if self._requests is not self._loader.skip_requests and self._fit_loop is not None:
            self._requests = self._loader.skip_requests
            _correct_length(self._loader, self._fit_loop, self._loader.progress()["total"], begins=begins)
        if not self._agreed(self._batches.has_next(self._fetched)):
            raise StopIteration
        if not self._is_ahead:
            return self._deliver(self._batches)
        batch = self._batches.peek(self._fetched)
        self._fetched += 1
        return batch

    @property
    def _is_ahead(self) -> bool:
        return isinstance(self._fetcher, _PrefetchDataFetcher) and self._fetcher.length is None

    def trained(self) -> AbstractContextManager[None]:
        """Return a context in which the state is without the last batch if its step was not made."""
        if self._batches is None or self._progress is None or self._progress.processed != self._trained:
            return nullcontext()
        return self._batches.without_last()

    def _count(self, batches: BatchIterator) -> None:
        """Deliver the batches that the training loop has taken."""
        waiting = len(self._fetcher.batches) if isinstance(self._fetcher, _PrefetchDataFetcher) else 0
        while self._fetched > waiting:
            self._deliver(batches)
            self._fetched -= 1

    def _deliver(self, batches: BatchIterator) -> Any:
        batch = next(batches)
        self._trained = -1 if self._progress is None else self._progress.processed
        return batch


def _known_length(loader: ResumableLoader) -> int | None:
    """Return the number of batches; None if only reading tells it, and Lightning knows that of a loader beside it."""
    try:
        return len(loader)
    except TypeError:
        return None


def _correct_length(loader: StructuredDataLoader, fit_loop: _FitLoop, batches: int | None, *, begins: bool) -> None:
    """Tell Lightning an epoch's length: it keeps that of an epoch without a loaded state and without skipped steps.

    `begins` says that no batch of the epoch was fetched. Else only a validation at its end is moved.
    """
    trainer, before = fit_loop.trainer, fit_loop.max_batches
    combined, fetcher = fit_loop._combined_loader, fit_loop._data_fetcher  # noqa: SLF001
    if before == float("inf") or batches is None:
        return
    limits = list(combined.limits)
    for number, each in enumerate(combined.flattened):
        if isinstance(each, ResumableLoader) and each.loader is loader:
            each._pass_length = None if begins else batches  # noqa: SLF001 - of this module
            limits[number] = _limited(batches, trainer.limit_train_batches)
    combined.limits = limits
    combined._iterator.limits = combined.limits  # noqa: SLF001 - it began with those before
    fit_loop.max_batches = len(combined)
    if fetcher.length is not None:  # else it looks ahead
        fetcher.length = fit_loop.max_batches
    is_of_epoch = not isinstance(trainer.val_check_interval, int) and trainer.check_val_every_n_epoch is not None
    if not is_of_epoch or trainer.val_check_batch is None:  # None where it is a matter of time
        return
    if begins:
        trainer.val_check_batch = max(1, int(fit_loop.max_batches * trainer.val_check_interval))
        if trainer.val_check_batch == fit_loop.max_batches and _must_look_ahead(loader, fit_loop):
            trainer.val_check_batch = float("inf")  # after the last batch, whichever it is
    elif trainer.val_check_batch == before:
        trainer.val_check_batch = fit_loop.max_batches


def _must_look_ahead(loader: StructuredDataLoader, fit_loop: _FitLoop) -> bool:
    """Whether only a look ahead finds the last batch, since a step may have no rows left."""
    return loader.loses_rows and isinstance(fit_loop._data_fetcher, _PrefetchDataFetcher)  # noqa: SLF001


def _limited(batches: int, limit: int | float) -> int:  # noqa: PYI041 - 1 is a batch, and 1.0 all of them
    """Return how many batches Lightning takes of an epoch, by `limit_train_batches`: a number of them, or a part."""
    return max(1, int(batches * limit)) if isinstance(limit, float) else min(batches, limit)


def _look_ahead(fetcher: _PrefetchDataFetcher) -> None:
    """Have Lightning find the last batch as it does without a length: a step that lost all rows has no batch."""
    fetcher.length = None
    with contextlib.suppress(StopIteration):
        fetcher.batches.append(_DataFetcher.__next__(fetcher))


def _load_late(fit_loop: _FitLoop) -> bool:
    """Load the states if Lightning has not: it made the loader too early where estimated_stepping_batches was read."""
    is_late = bool(fit_loop.restarting and fit_loop._combined_loader_states_to_load)  # noqa: SLF001
    if is_late:
        fit_loop._load_combined_loader_states()  # noqa: SLF001
    return is_late


def _load_ended(fit_loop: _FitLoop) -> None:
    """Load the states of an ended epoch, of which Lightning loads none: they hold the rows that are excluded.

    The next epoch begins whole in any case. So a state of other data is left out, with a warning.
    """
    states, combined = fit_loop._combined_loader_states_to_load, fit_loop._combined_loader  # noqa: SLF001
    if fit_loop.restarting or not fit_loop.trainer.ckpt_path or combined is None:
        return
    fit_loop._combined_loader_states_to_load = []  # noqa: SLF001
    stateful = [loader for loader in combined.flattened if isinstance(loader, _Stateful)]
    for loader, state in zip(stateful, states, strict=False) if len(stateful) == len(states) else ():
        if isinstance(loader, ResumableLoader) and "ranks" in state:
            try:
                loader._load(state)  # noqa: SLF001 - of this module
            except (CheckpointMismatchError, RankMismatchError) as error:
                why = str(error).partition("What to do")[0].strip()
                msg = "an epoch that had ended was not of this data, so the next one begins whole, also with the rows "
                warnings.warn(f"{msg}that were excluded from it: {why}", stacklevel=2)


def _leave_ended_epoch(fit_loop: _FitLoop) -> None:
    """Let the next epoch begin whole after a checkpoint of an epoch's end, where Lightning would not.

    With `max_steps` it takes an epoch that had ended for one in whose midst the checkpoint was saved, and passes over
    the next one. After a checkpoint of an epoch's last step it does not count the next epoch as begun, so that a
    checkpoint of that one begins it anew. Where an epoch has another length, or it does not know it, it goes on to
    count the batches of the one before. So it does after a checkpoint of an epoch's start.
    """
    if not fit_loop.restarting:
        return
    epoch_loop = fit_loop.epoch_loop
    if fit_loop.restarted_on_epoch_start:
        _Loop.restarting.fset(fit_loop, False)  # noqa: FBT003 - and those of the loops within it
        fit_loop.epoch_progress.current.ready += 1  # it takes it back, and counts the epoch as ready in total alone
    elif fit_loop.restarted_on_epoch_end and fit_loop._iteration_based_training():  # noqa: SLF001
        _Loop.restarting.fset(fit_loop, False)  # noqa: FBT003 - the loop's own says True
        fit_loop.reset()
    elif epoch_loop.restarted_on_train_batch_end and epoch_loop.batch_progress.is_last_batch:
        # As Lightning does where it knows the length, and that is the same as the next epoch's.
        epoch_loop.batch_progress.increment_completed()
        epoch_loop.reset_restart_stage()
        epoch_loop.batch_progress.reset_on_run()
        epoch_loop.scheduler_progress.reset_on_run()
        epoch_loop.automatic_optimization.optim_progress.reset_on_run()
        epoch_loop.val_loop.batch_progress.total.reset()
        if fit_loop.restarted_mid_epoch:  # else it does not count the epoch as begun, nor do the checkpoints of it
            fit_loop.reset_restart_stage()


def _calling_fit_loop() -> _FitLoop | None:
    """Return the loop that trains with the loader; None where a loop within it validates."""
    return None if _caller(_EvaluationLoop) else _caller(_FitLoop)


def _is_lightnings_call() -> bool:
    """Whether Lightning sets the epoch of a sampler, and not a hook of the user's."""
    return any(frame.f_code is _set_sampler_epoch.__code__ for frame in _frames())


def _mark_saved(trainer: Trainer) -> None:
    """Tell Lightning that it has saved the loaded step. It forgets that, and would save after the first batch, too.

    Where gradients are accumulated, such a checkpoint counts the batch without the step that it belongs to.
    """
    for callback in trainer.checkpoint_callbacks:
        every = callback._every_n_train_steps if isinstance(callback, ModelCheckpoint) else 0  # noqa: SLF001
        if every >= 1 and trainer.global_step % every == 0:
            callback._last_global_step_saved = trainer.global_step  # noqa: SLF001


def _refuse_other_lightning() -> None:
    """Refuse the same Trainer from the other package, whose classes are others: its look ahead would go unnoticed."""
    if any(frame.f_globals.get("__name__", "").startswith("pytorch_lightning.") for frame in _frames()):
        msg = "ResumableLoader works with the package lightning: import lightning.pytorch as pl, "
        raise TypeError(f"{msg}instead of pytorch_lightning, whose classes are others")


def _caller(kind: type[T]) -> T | None:
    """Return the nearest object of a class that is calling, if one is: Lightning passes neither to a loader."""
    for frame in _frames():
        if isinstance(found := frame.f_locals.get("self"), kind):
            return found
    return None


def _frames() -> Iterator[FrameType]:
    """Yield the frames that are calling, the nearest first."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        yield frame
        frame = frame.f_back
