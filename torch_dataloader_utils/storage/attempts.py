"""Attempts at one operation of a storage: pauses between them, a warning, and one deadline for all of them.

This is the only place that tries again. tenacity would need the same deadline for a call that never returns, and its
jitter draws from Python's global generator, whose numbers belong to the user's `collate_fn`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import inspect
import itertools
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from fsspec.exceptions import FSTimeoutError

from torch_dataloader_utils.errors import StorageRetryWarning, UnreadableFileError, cut, warn_user
from torch_dataloader_utils.storage.causes import ChangedFileError, meaning

T = TypeVar("T")

DEFAULT_TIMEOUT_SEC = 120.0
"""How long an operation may take with all its attempts. A storage that is moved to another machine is back before."""

FIRST_PAUSE_SEC = 0.1
LONGEST_PAUSE_SEC = 10.0
"""Pauses double from the first to the longest; each is then shortened at random, by up to a half."""

WARN_AFTER_SEC = 10.0
"""How long an operation has failed when its next attempt comes with a warning."""

IDLE_SEC = 1.0
"""How long a thread waits for another call."""

_IDLE: list[SimpleQueue[Callable[[], None]]] = []
"""Threads that wait for a call: the queue of each."""

if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_IDLE.clear)  # a forked process has none of them

_RANDOM = random.SystemRandom()  # ranks that failed together try again at different moments


@dataclass(frozen=True, slots=True)
class Retry:
    """An attempt that failed and is followed by another.

    Attributes:
        name: What is read, as messages name it, without secrets.
        cause: The error, in one line, without secrets.
        number: The number of this attempt, from 1.
        seconds: Seconds since the first attempt began.
    """

    name: str
    cause: str
    number: int
    seconds: float


def attempt(  # noqa: D417 - `action` is in the summary
    action: Callable[[float], T],
    *,
    timeout_sec: float,
    most_attempts: Callable[[Exception], float],
    name: Callable[[], str],
    clean: Callable[[str], str],
    on_retry: Callable[[Retry], object],
) -> T:
    """Call an action until it succeeds, fails for good, or the time is over.

    The action gets the seconds after which it is to give up: half of the time for all, so that one request without an
    answer leaves time for another.

    Args:
        timeout_sec: Seconds for all attempts and the pauses between them.
        most_attempts: Returns how many attempts an error is worth: 1 where another does not help.
        name: Returns what is read, for messages. Called if there is an error.
        clean: Removes secrets from a message.
        on_retry: Called before the pause that another attempt follows.

    Raises:
        UnreadableFileError: If the time is over, or the file changed since it was listed.
        Exception: What the action raised, if another attempt does not help.
    """
    began = time.monotonic()
    warned = False
    for number in itertools.count(1):
        left = began + timeout_sec - time.monotonic()
        try:
            return action(min(left, timeout_sec / 2))
        except UnreadableFileError:
            raise
        except Exception as error:  # noqa: BLE001 - storages raise errors of any type
            cause = meaning(error)
        if number >= most_attempts(cause):
            break
        passed = time.monotonic() - began
        pause = min(LONGEST_PAUSE_SEC, FIRST_PAUSE_SEC * 2 ** min(number - 1, 10)) * _RANDOM.uniform(0.5, 1)
        if passed + pause >= timeout_sec:
            times = "1 attempt" if number == 1 else f"{number} attempts"
            text = f"{name()}: no success in {times} within storage_timeout={timeout_sec:g} s"
            cause = UnreadableFileError(f"{text}; the last failed with {clean(_shown(cause))}")
            break
        if passed >= WARN_AFTER_SEC and not warned:
            warned = True
            text = f"{name()}: no success for {passed:.0f} s: {clean(_shown(cause))}"
            warn_user(f"{text}; trying again for up to storage_timeout={timeout_sec:g} s", StorageRetryWarning)
        on_retry(Retry(name(), clean(_shown(cause)), number, passed))
        time.sleep(pause)
    if isinstance(cause, ChangedFileError):
        raise UnreadableFileError(f"{name()}: {cause}")
    raise cause


def _shown(cause: Exception) -> str:
    return cut(f"{type(cause).__name__}: {cause}")


def within(seconds: float, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function of fsspec; raise a TimeoutError if it takes longer.

    What fsspec runs in its event loop is cancelled, and the connection closed. Any other function goes on in its
    thread, which does not keep the process alive.
    """
    try:
        if inspect.iscoroutinefunction(getattr(function, "__wrapped__", None)):
            return function(*args, timeout=seconds, **kwargs)  # fsspec made it out of a coroutine
        return _in_thread(seconds, lambda: function(*args, **kwargs))
    except FSTimeoutError:
        raise TimeoutError(f"no answer within {seconds:.3g} s") from None


def _in_thread(seconds: float, function: Callable[[], T]) -> T:
    outcome = in_background(function)
    try:
        return outcome.result(seconds)
    except concurrent.futures.TimeoutError:
        if outcome.done():
            raise
        raise FSTimeoutError from None


def in_background(function: Callable[[], T]) -> concurrent.futures.Future[T]:
    """Call a function in a thread that does nothing else meanwhile, and does not keep the process alive.

    Threads that have ended a call wait a moment for another: of the footers of thousands of files, each is one call.
    """
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            outcome.set_exception(error)

    try:
        calls = _IDLE.pop()
    except IndexError:
        calls = SimpleQueue()
        threading.Thread(target=_make_calls, args=(calls,), name="storage", daemon=True).start()
    calls.put(run)
    return outcome


def _make_calls(calls: SimpleQueue[Callable[[], None]]) -> None:
    """Make the calls that come by a queue, until none has come for a while."""
    while True:
        try:
            run = calls.get(timeout=IDLE_SEC)
        except Empty:
            try:
                _IDLE.remove(calls)
            except ValueError:  # it was taken just now, for a call, which comes unless Ctrl-C came before it
                with contextlib.suppress(Empty):
                    calls.get(timeout=IDLE_SEC)()
            return
        run()
        del run  # what it refers to must not wait for the next call
        _IDLE.append(calls)
