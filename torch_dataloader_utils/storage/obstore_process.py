"""obstore in a process of its own, for one that must not import it because it is going to fork others.

The process is a new interpreter, which inherits neither threads nor locks nor memory. So it does not matter what runs
in this one. It gets the credentials by its standard input, and ends with it.
"""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from multiprocessing import spawn
from typing import IO, Any

from torch_dataloader_utils.storage import obstore_calls

BEGUN = 0
"""The number of what the process answers first."""

MOST_START_SEC = 10.0
"""How long to wait for that. s3fs is imported in a part of it."""


class ObstoreProcess:
    """Calls `ObstoreCalls` in a process of its own. Threads may share it.

    Args:
        options: obstore's.
        timeout_sec: Seconds after which a request ends.

    Raises:
        OSError: If the process cannot be started, or cannot import obstore.

    Attributes:
        end: Ends the process. It is called when nothing refers to this object, too.
    """

    def __init__(self, options: Mapping[str, Any], timeout_sec: float) -> None:
        if getattr(sys, "frozen", False):
            raise OSError("this program is its own interpreter")
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter, and a file of this package
            [os.fsdecode(spawn.get_executable() or ""), "-I", "-S", obstore_calls.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process
        )
        self.end = weakref.finalize(self, _end, self._process, os.getpid())
        self._outcomes = _Outcomes()
        self._numbers = itertools.count(BEGUN + 1)
        self._lock = threading.Lock()
        begun = self._outcomes.expect(BEGUN)
        self._send((list(sys.path), dict(options), timeout_sec))
        receiving = (self._process.stdout, self._outcomes)
        threading.Thread(target=_receive, args=receiving, name="storage", daemon=True).start()
        try:
            begun.result(MOST_START_SEC)
        except FutureTimeoutError:
            self.end()
            raise OSError(f"{spawn.get_executable()!r} did not start within {MOST_START_SEC:g} s") from None

    @property
    def has_ended(self) -> bool:
        """Whether it answers no more."""
        return self._outcomes.has_ended

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of `ObstoreCalls`.

        Raises:
            FileNotFoundError: If obstore found nothing; with its words.
            RuntimeError: If it raised another error; with its words.
            OSError: If the process has ended.
        """
        number = next(self._numbers)
        outcome = self._outcomes.expect(number)
        self._send((number, method, arguments))
        state, returned = outcome.result()
        if state == "returned":
            return returned
        raise (FileNotFoundError if state == "not found" else RuntimeError)(returned)

    def _send(self, words: Any) -> None:
        content = pickle.dumps(words, pickle.HIGHEST_PROTOCOL)
        with self._lock:
            assert self._process.stdin is not None  # noqa: S101 - it is a pipe
            self._process.stdin.write(content)
            self._process.stdin.flush()


class _Outcomes:
    """What calls have returned, or will."""

    def __init__(self) -> None:
        self._expected: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self.has_ended = False

    def expect(self, number: int) -> Future[Any]:
        with self._lock:
            if self.has_ended:
                raise _ended()
            self._expected[number] = outcome = Future[Any]()
            return outcome

    def set(self, number: int, outcome: Any) -> None:
        self._expected.pop(number).set_result(outcome)

    def end(self) -> None:
        with self._lock:
            self.has_ended = True
        for outcome in self._expected.values():
            outcome.set_exception(_ended())


def _ended() -> OSError:
    return OSError("the process that lists and reads objects of S3 has ended")


def _receive(answers: IO[bytes], outcomes: _Outcomes) -> None:
    """Receive what calls return, until the process ends."""
    try:
        with answers:
            while True:
                number, *outcome = pickle.load(answers)  # noqa: S301 - of the process that this one started
                outcomes.set(number, outcome)
    except (EOFError, OSError, pickle.UnpicklingError):  # an answer may be cut short
        outcomes.end()


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:  # a forked copy
        return
    process.kill()  # there is nothing that it would still have to do
    process.wait()
    assert process.stdin is not None  # noqa: S101 - it is a pipe
    process.stdin.close()
