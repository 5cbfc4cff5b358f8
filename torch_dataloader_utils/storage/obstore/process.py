"""obstore in a process of its own, for one that must not import it because it is going to fork others.

The process is a new interpreter, which inherits neither threads nor locks nor memory. So it does not matter what runs
in this one. It gets the credentials by its standard input, and ends when that is closed: with this process, unless one
that was forked from it meanwhile lives on.
"""

from __future__ import annotations

import builtins
import io
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
from contextlib import suppress
from multiprocessing import spawn
from typing import Any

from torch_dataloader_utils.storage.obstore import calls as obstore_calls

BEGUN = 0
"""The number of what the process answers first."""

MOST_START_SEC = 10.0
"""How long to wait for that at most. s3fs is imported in a part of it."""

JOIN_SEC = 5.0
"""How long to wait for the end of the process, and of the thread that receives. Both end at once, mostly."""


class ObstoreProcess:
    """Calls `ObstoreCalls` in a process of its own. Threads may share it.

    Args:
        options: obstore's.
        timeout_sec: Seconds after which a request ends.

    Raises:
        OSError: If the process cannot be started, or cannot import obstore.

    Attributes:
        end: Ends the process, and waits for that. It is called when nothing refers to this object, too.
    """

    def __init__(self, options: Mapping[str, Any], timeout_sec: float) -> None:
        if getattr(sys, "frozen", False):
            raise OSError("this program is its own interpreter")
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter, and a file of this package
            [os.fsdecode(spawn.get_executable() or ""), "-I", "-S", "-B", obstore_calls.__file__],
            bufsize=0,  # a process that is forked must not inherit what was not sent
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process
        )
        self._outcomes = _Outcomes(self._process)
        stdout: Any = self._process.stdout
        answers = io.BufferedReader(stdout)
        receiver = threading.Thread(target=_receive, args=(answers, self._outcomes), name="storage", daemon=True)
        self.end = weakref.finalize(self, _end, self._process, self._outcomes, receiver, os.getpid())
        self._numbers = itertools.count(BEGUN + 1)
        self._lock = threading.Lock()
        begun = self._outcomes.expect(BEGUN)
        try:
            receiver.start()
            self._send((list(sys.path), dict(options), timeout_sec))
            begun.result(min(MOST_START_SEC, timeout_sec))
        except BaseException as error:
            self.end()
            if isinstance(error, FutureTimeoutError):
                raise OSError("the process that reads S3 did not start in time") from None
            raise

    @property
    def has_ended(self) -> bool:
        """Whether it answers no more."""
        return self._outcomes.has_ended or self._process.poll() is not None

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of `ObstoreCalls`.

        Raises:
            Exception: What the method raised, or a built-in exception that it is one of, with its message.
            OSError: If the process has ended.
        """
        number = next(self._numbers)
        outcome = self._outcomes.expect(number)
        self._send((number, method, arguments))
        error_name, returned = outcome.result()
        if error_name is None:
            return returned
        try:
            error = getattr(builtins, error_name)(returned)
        except TypeError:  # it is made of more than a message
            error = RuntimeError(f"{error_name}: {returned}")
        raise error

    def _send(self, request: Any) -> None:
        content = memoryview(pickle.dumps(request, pickle.HIGHEST_PROTOCOL))
        with self._lock:
            assert self._process.stdin is not None  # noqa: S101 - it is a pipe
            try:
                while content:
                    content = content[self._process.stdin.write(content) :]
            except (BrokenPipeError, ValueError):  # it has ended, or is being ended and the pipe is closed
                raise self._outcomes.error() from None


class _Outcomes:
    """What calls have returned, or will."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.has_ended = False
        self._process = process
        self._expected: dict[int, Future[Any]] = {}
        self._lock = threading.RLock()  # a garbage collection may end the process in a thread that holds it

    def expect(self, number: int) -> Future[Any]:
        with self._lock:
            if self.has_ended:
                raise self.error()
            self._expected[number] = outcome = Future[Any]()
            return outcome

    def set(self, number: int, outcome: Any) -> None:
        with self._lock:
            expected = self._expected.pop(number, None)
        if expected is not None:
            expected.set_result(outcome)

    def end(self) -> None:
        with self._lock:
            self.has_ended = True
            left, self._expected = self._expected, {}
        for outcome in left.values():
            outcome.set_exception(self.error())

    def error(self) -> OSError:
        status = self._process.poll()
        return OSError(f"the process that reads S3 has ended{'' if status is None else f' with status {status}'}")


def _receive(answers: io.BufferedReader, outcomes: _Outcomes) -> None:
    """Receive what calls return, until the process ends."""
    try:
        while True:
            number, *outcome = pickle.load(answers)  # noqa: S301 - of the process that this one started
            outcomes.set(number, outcome)
    except (EOFError, OSError, ValueError, pickle.UnpicklingError):  # an answer may be cut short
        pass
    finally:
        outcomes.end()
        answers.close()


def _end(process: subprocess.Popen[bytes], outcomes: _Outcomes, receiver: threading.Thread, owner: int) -> None:
    if os.getpid() != owner:  # a forked copy
        return
    process.kill()  # there is nothing that it would still have to do
    with suppress(subprocess.TimeoutExpired):
        process.wait(JOIN_SEC)
    outcomes.end()
    if receiver.is_alive() and receiver is not threading.current_thread():
        receiver.join(JOIN_SEC)
    assert process.stdin is not None  # noqa: S101 - it is a pipe
    process.stdin.close()
