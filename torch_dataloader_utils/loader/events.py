"""What hooks are told of an epoch: one frozen event at a time, in the training process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from torch_dataloader_utils.errors import HookWarning, cut, warn_user

EventKind: TypeAlias = Literal["epoch_begun", "shard_done", "stall", "retry", "epoch_done"]
"""What an event says."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in an epoch, for hooks.

    Attributes:
        kind: What happened. ``"epoch_begun"``: an iterator begins the epoch, or continues it. ``"shard_done"``: the
            last row of a shard is delivered. ``"stall"``: the training loop waited for a batch longer than a second.
            ``"retry"``: the storage failed and was asked again. ``"epoch_done"``: all batches are delivered.
        epoch: The epoch.
        rank: The rank.
        step: Number of the batch, from 0 in the epoch, that is delivered next, or with which the event came. Of
            ``"epoch_done"``, the number of all batches.
        worker: The worker that it was about; None for the training process.
        rows: Of ``"shard_done"``, the shard's rows that this iterator delivers, which are those that were left after a
            resume within it; None where only reading tells. Of ``"epoch_done"``, the rows that the iterator delivered.
        seconds: Of ``"stall"``, how long the loop waited. Of ``"retry"``, the time since the first attempt. Of
            ``"epoch_done"``, the time since the iterator was made.
        paths: Of ``"shard_done"``, the files of its rows. Of ``"retry"``, what was to be read, as messages name it.
        cause: Of ``"retry"``, the error, without secrets.
        metrics: Of ``"shard_done"`` and ``"epoch_done"``, the counters that `get_metrics` has, as they are now.
    """

    kind: EventKind
    epoch: int
    rank: int
    step: int
    worker: int | None = None
    rows: int | None = None
    seconds: float | None = None
    paths: tuple[str, ...] = ()
    cause: str | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict, repr=False)


class Hook(Protocol):
    """What is called with each event of an epoch: a function, or an object with `__call__`.

    It runs in the training process, in the thread that takes batches, before the batch that the event came with is
    handed over. So a state that it saves does not count that batch. If it raises, the error becomes a `HookWarning`,
    once for each hook, and nothing else changes.
    """

    def __call__(self, event: Event, /) -> object:
        """Receive an event."""


class Hooks:
    """The hooks of a rank's dataset. Copies of the dataset have none."""

    def __init__(self, hooks: Sequence[Hook] = (), rank: int = 0) -> None:
        self.rank = rank
        self._hooks = tuple(hooks)
        self._failed: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def call(self, event: Event) -> None:
        """Call all hooks. An error of one is a warning, the first time."""
        for number, hook in enumerate(self._hooks):
            error = _error_of(hook, event)
            if error is not None and number not in self._failed:
                self._failed.add(number)
                _warn(hook, event, error)


def _error_of(hook: Hook, event: Event) -> Exception | None:
    """Call a hook and return its error: a batch must not be lost for it."""
    try:
        hook(event)
    except Exception as error:  # noqa: BLE001 - it may be any
        return error
    return None


def _warn(hook: Hook, event: Event, error: Exception) -> None:
    name = getattr(hook, "__qualname__", None) or type(hook).__qualname__
    text = f"the hook {name} failed at the event {event.kind!r}: {cut(f'{type(error).__name__}: {error}')}"
    warn_user(f"{text}; the loader goes on, and later errors of this hook are not reported", HookWarning)


def parse_hooks(value: object) -> tuple[Hook, ...]:
    """Return hooks, or raise a TypeError."""
    hooks = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else None
    if hooks is None or not all(map(callable, hooks)):
        raise TypeError(f"hooks={value!r}: expected a list of functions that are called with each event")
    return hooks
