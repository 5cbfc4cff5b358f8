"""Checkpoints of model, optimizer and loader in one directory, over torch.distributed.checkpoint and fsspec."""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, TypeVar, overload

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from torch_dataloader_utils.distributed.dcp_storage import WholeParts, reader_of, sizes_of, writer_of
from torch_dataloader_utils.distributed.gather import Stateful
from torch_dataloader_utils.distributed.parts import Optimizers, Part, parts_of
from torch_dataloader_utils.distributed.store_files import Best, StoredCheckpoint, StoreFiles, expired
from torch_dataloader_utils.distributed.together import Together
from torch_dataloader_utils.errors import CheckpointStoreError, RankMismatchError, nearest, shown

LOG = logging.getLogger("torch_dataloader_utils")

T = TypeVar("T", bound=tuple[Any, ...])

_IN_USE: set[str] = set()
"""The names of the directories that this process has restored, or is saving: they are deleted by none of its stores."""


class CheckpointStore:
    """Checkpoints of a training in one directory, of which the last and the best are kept.

    ``torch.distributed.checkpoint`` writes and reads them: each rank its part, of models under DDP and FSDP2 too, and
    a run with another number of ranks loads them. A checkpoint is visible once it is complete. A crash at any moment
    leaves those before it.

    `save`, `restore` and `wait` are called by all processes of the job together, also where it has one process and no
    process group. `latest` and `best` only read, and any process may call them. One job at a time saves into a store.

    Args:
        url: The directory, as a path or as a URL of any storage that fsspec opens. All ranks see the same one.
        keep_last: How many checkpoints are kept of those that were saved last; None for all.
        keep_best: Which checkpoints are kept besides: a metric, ``"min"`` or ``"max"``, and how many.
        storage_options: fsspec's options for the storage, such as credentials.

    Attributes:
        files: The files in the directory.

    Raises:
        TypeError: If `keep_last` is no number.
        ValueError: If `keep_last` or `keep_best` is none of these.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        keep_last: int | None = 3,
        keep_best: tuple[str, Literal["min", "max"], int] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if keep_last is not None and operator.index(keep_last) < 1:
            raise ValueError(f"keep_last is {shown(keep_last)}, expected a number from 1 on, or None to keep all")
        self._keep_last = keep_last
        self._keep_best = None if keep_best is None else _best(keep_best)
        self.files = StoreFiles(url, storage_options)
        self._together = Together()
        self._pending: Future[StoredCheckpoint] | None = None

    @overload
    def save(
        self,
        step: int,
        *,
        model: torch.nn.Module | None = ...,
        optimizer: Optimizers | None = ...,
        loader: Stateful | None = ...,
        metrics: Mapping[str, Any] | None = ...,
        async_: Literal[False] = ...,
        **others: Any,
    ) -> StoredCheckpoint: ...

    @overload
    def save(
        self,
        step: int,
        *,
        model: torch.nn.Module | None = ...,
        optimizer: Optimizers | None = ...,
        loader: Stateful | None = ...,
        metrics: Mapping[str, Any] | None = ...,
        async_: Literal[True],
        **others: Any,
    ) -> Future[StoredCheckpoint]: ...

    def save(
        self,
        step: int,
        *,
        model: torch.nn.Module | None = None,
        optimizer: Optimizers | None = None,
        loader: Stateful | None = None,
        metrics: Mapping[str, Any] | None = None,
        async_: bool = False,
        **others: Any,
    ) -> StoredCheckpoint | Future[StoredCheckpoint]:
        """Save a checkpoint, then delete those that are no longer kept. All processes call it together.

        The state is that of the moment of the call, the loader's too. A save waits for the one before it.

        Args:
            step: The step, from 0 on. A later save of the same step replaces an earlier one.
            model: The model, as the training uses it.
            optimizer: Its optimizer, or several of them. It needs `model`, whose names its state gets.
            loader: This rank's loader. The checkpoint holds the states of all ranks.
            metrics: Numbers by name; those of rank 0 count. Without them the checkpoint is never among the best, nor is
                it where the number is NaN.
            async_: Whether to return once the state is copied into this process's memory, and to write in a thread.
            **others: More objects with ``state_dict`` and ``load_state_dict``, such as ``scheduler=scheduler``.
                `torch.distributed.checkpoint` keeps one value for each name, whichever rank it is of.

        Returns:
            The checkpoint; with `async_` a future of it, which also has the error if it fails. `wait` and the next
            save raise that error.

        Raises:
            TypeError: If an argument has no state, or a metric is no number.
            ValueError: If `step` is negative, or `metrics` lack the one of `keep_best`.
            RankMismatchError: If ranks save different steps or parts, or their loaders do not fit together.
            CheckpointStoreError: If it could not be saved. The checkpoints before it are as they were.
        """
        self.wait()
        parts: dict[str, Part] = {}

        def check() -> tuple[int, list[str], dict[str, float]]:
            parts.update(parts_of(model, optimizer, loader, others))
            return _step(step), list(parts), self._measured(metrics)

        number, names, measured = _same(self._together.all(check), "save")
        name = self._together.first(lambda: self._new_name(number))
        state = self._state(parts)

        def finish(write: Callable[[], Metadata]) -> StoredCheckpoint:
            try:
                with self._errors(name):
                    sizes = sizes_of(write())
                saved = self._together.first(lambda: self.files.commit(name, measured, names, sizes))
            finally:
                _IN_USE.discard(name)
            if self._together.rank == 0:
                self._delete_expired(saved)
            return saved

        _IN_USE.add(name)
        writer = writer_of(self.files.writing_fs, self.files.location(name))
        group = self._together.group
        if async_:
            # DCP warns in a thread of its own, when this one may do anything: only a filter that stays is sure to hold.
            # Where warnings are errors, nothing would be saved.
            _ignore_single_process()
            try:
                with self._errors(name):
                    written: Any = async_save(state, storage_writer=writer, process_group=group)
            except BaseException:  # then nothing is written, and `finish` is not called
                _IN_USE.discard(name)
                raise
            self._pending = _in_thread(partial(finish, written.result))
            return self._pending
        with _without_warning():
            return finish(lambda: save(state, storage_writer=writer, process_group=group))

    def restore(
        self,
        *,
        model: torch.nn.Module | None = None,
        optimizer: Optimizers | None = None,
        loader: Stateful | None = None,
        step: int | None = None,
        **others: Any,
    ) -> StoredCheckpoint | None:
        """Load a checkpoint, also one of another number of ranks. All processes call it together.

        The loader continues exactly where the run is the one that was saved. Under another number of ranks or workers
        each remaining row is delivered once, in another order. No store of this process deletes the checkpoint.

        Args:
            model: The model, sharded or wrapped as the training uses it.
            optimizer: Its optimizer, or several of them. It needs `model`.
            loader: This rank's loader.
            step: The step of the checkpoint; None for the one that was saved last.
            **others: More objects that were saved, by the same names.

        Returns:
            The checkpoint; None if `step` is None and there is none, so that a training begins. Then nothing is loaded.

        Raises:
            FileNotFoundError: If there is no checkpoint of this step.
            CheckpointStoreError: If the checkpoint is incomplete, truncated, damaged or foreign, lacks something that
                is asked for, or holds more of it than there is to load into, such as layers.
            CheckpointMismatchError: If the loader reads other files, or with options that change its plan.

        After an error do not train: the model may be loaded in part.
        """
        self.wait()
        parts: dict[str, Part] = {}

        def check() -> tuple[int | None, list[str]]:
            parts.update(parts_of(model, optimizer, loader, others))
            return None if step is None else _step(step), list(parts)

        number, names = _same(self._together.all(check), "restore")
        found = self._together.first(lambda: self._whole(number, names))
        if found is None:
            return None
        _IN_USE.add(found.name)
        state = self._state(parts)
        reader = reader_of(self.files.writing_fs, self.files.location(found.name))
        with self._errors(found.name), _without_warning():
            load(state, storage_reader=reader, planner=WholeParts(parts), process_group=self._together.group)
        for name, part in parts.items():
            self._together.own(partial(part.load_state_dict, state[name]))
        return found

    def latest(self) -> StoredCheckpoint | None:
        """Return the complete checkpoint that was saved last, or None if there is none.

        Raises:
            CheckpointStoreError: If its marker was changed, or it is of another release's format.
        """
        return self.files.latest()

    def best(self) -> StoredCheckpoint | None:
        """Return the complete checkpoint with the best metric, by `keep_best`, or None if none has that metric.

        Raises:
            ValueError: If the store has no `keep_best`.
        """
        if self._keep_best is None:
            raise ValueError('the store has no keep_best, such as keep_best=("loss", "min", 2)')
        return self.files.best(self._keep_best)

    def wait(self) -> StoredCheckpoint | None:
        """Wait until an asynchronous save has ended; call it before the process group is destroyed.

        Returns:
            What was saved; None if nothing was pending.

        Raises:
            CheckpointStoreError: If it failed.
        """
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def _state(self, parts: Mapping[str, Part]) -> dict[str, Any]:
        """Return the states. Each part may communicate, so an error of a rank ends all ranks before the next."""
        return {name: self._together.own(part.state_dict) for name, part in parts.items()}

    def _whole(self, step: int | None, names: Sequence[str]) -> StoredCheckpoint | None:
        """Return the checkpoint to load, after a look at its files."""
        found = self.files.latest() if step is None else self.files.at_step(step)
        if found is None:
            return None
        for name in names:
            if name not in found.parts:
                raise CheckpointStoreError(f"{found.url} holds no {name!r}{nearest(name, found.parts)}")
        self.files.require_whole(found)
        return found

    def _measured(self, metrics: Mapping[str, Any] | None) -> dict[str, float]:
        """Return the metrics as numbers."""
        measured = {str(name): _number(name, value) for name, value in (metrics or {}).items()}
        best = self._keep_best
        if measured and best is not None and best.metric not in measured:
            raise ValueError(f"metrics lack {best.metric!r}, which keep_best needs{nearest(best.metric, measured)}")
        return measured

    def _new_name(self, step: int) -> str:
        """Return the name of a new checkpoint, once what saves left that did not end is deleted: it may fill a disk."""
        name = self.files.new_name(step)
        try:
            for left in self.files.incomplete():
                if left not in _IN_USE:
                    self.files.delete(left)
        except OSError as error:
            LOG.warning("%s: what a save left that did not end could not be deleted: %s", self.files.url, error)
        return name

    def _delete_expired(self, saved: StoredCheckpoint) -> None:
        """Delete what is no longer kept."""
        try:
            for old in expired(self.files.complete(), self._keep_last, self._keep_best, _IN_USE):
                self.files.delete(old.name)
        except OSError as error:
            LOG.warning("%s is saved, but what is no longer kept could not be deleted: %s", saved.url, error)

    @contextlib.contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """Turn an error of torch.distributed.checkpoint into one that names the checkpoint and holds no secret."""
        with self.files.errors(name):
            try:
                yield
            except CheckpointException as error:  # a BaseException
                failures = [(f"rank {rank}: ", cause) for rank, (cause, _) in error.failures.items()]
            except Exception as error:  # noqa: BLE001 - it may be of any type
                failures = [("", error)]
            else:
                return
            causes = "; ".join(f"{rank}{type(cause).__name__}: {cause}" for rank, cause in failures)
            raise CheckpointStoreError(f"{self.files.url_of(name)}: {causes}") from None


def _best(keep_best: tuple[str, str, int]) -> Best:
    try:
        metric, mode, count = keep_best
        best = Best(str(metric), str(mode), operator.index(count))
    except (TypeError, ValueError):
        best = Best("", "", 0)
    if not best.metric or best.mode not in {"min", "max"} or best.count < 1:
        msg = f'keep_best is {shown(keep_best)}, expected a metric, "min" or "max", and a number from 1 on'
        raise ValueError(f'{msg}, such as ("loss", "min", 2)')
    return best


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"metrics[{name!r}] is {shown(value)}, expected a number") from None


def _step(step: int) -> int:
    number = operator.index(step)
    if number < 0:
        raise ValueError(f"step is {number}, expected a number from 0 on")
    return number


def _same(requests: Sequence[T], call: str) -> T:
    """Return rank 0's request, or raise where another rank's step or parts differ."""
    for rank, request in enumerate(requests):
        if request[:2] != requests[0][:2]:
            msg = f"rank 0 called {call} with step={requests[0][0]} and {shown(requests[0][1])}, rank {rank} with "
            raise RankMismatchError(f"{msg}step={request[0]} and {shown(request[1])}")
    return requests[0]


@contextlib.contextmanager
def _without_warning() -> Iterator[None]:
    """Leave out the warning that there is one process only."""
    with warnings.catch_warnings():
        _ignore_single_process()
        yield


def _ignore_single_process() -> None:
    """Leave out, from now on, the warning that there is one process only."""
    warnings.filterwarnings("ignore", r"torch\.distributed is (disabled|unavailable)")  # the latter in torch 2.4


def _in_thread(action: Callable[[], StoredCheckpoint]) -> Future[StoredCheckpoint]:
    """Call an action in a thread. Python waits for it before it exits."""
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-store")
    try:
        return executor.submit(action)
    finally:
        executor.shutdown(wait=False)
