"""Calls of obstore, in the process that wants the answers, or in one that runs this file as a script for it.

A process that is going to fork others must not import obstore, so it has another one list and read for it while it
opens a dataset (`process`). This module imports nothing of the package: with obstore it starts in some 20 ms,
where s3fs takes 0.3 s.
"""

from __future__ import annotations

import copyreg
import os
import pickle
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from importlib import import_module
from itertools import chain, count, islice
from queue import SimpleQueue
from threading import Lock, RLock, Thread
from typing import Any
from weakref import WeakSet

PART = 1000
"""How many objects S3 lists in one answer."""

THREADS = 32
"""How many calls a script makes at once: as many as there are threads that read footers."""

SIGNED_FOR = timedelta(minutes=20)
"""How long a URL is valid: longer than the 15 minutes by which clocks may differ from that of S3."""

UNLISTED = "invalid path"
"""What obstore says of a key with an empty segment, or one of dots, which it neither lists nor reads."""


_living: WeakSet[ObstoreCalls] = WeakSet()
_inherited: list[ObstoreCalls] = []


class ObstoreCalls:
    """obstore, with some options for all buckets.

    Every method raises obstore's errors. A forked process must call none, and keeps them: to end one would ask
    obstore's runtime, which has no thread there, and wait for a lock that a thread may have had.

    Args:
        options: obstore's.
        timeout_sec: Seconds after which a request ends.
    """

    def __init__(self, options: Mapping[str, Any], timeout_sec: float) -> None:
        self._obstore = import_module("obstore")
        self._new_store = import_module("obstore.store").S3Store
        self._options = options
        self._timeout = timedelta(seconds=timeout_sec)
        self._buckets: dict[str, Any] = {}
        self._lock = RLock()  # a garbage collection may come while a client is made
        _living.add(self)

    def head(self, bucket: str, path: str) -> dict[str, Any]:
        """Return what is known of an object."""
        return dict(self._obstore.head(self._bucket(bucket), path))

    def listed(self, bucket: str, prefix: str, most: int | None) -> list[dict[str, Any]] | None:
        """Return what is known of the objects below a prefix, `most` of them at most; None if it cannot be listed."""
        parts = self._obstore.list(self._bucket(bucket), prefix or None, chunk_size=most or PART)
        try:
            return [dict(found) for found in islice(chain.from_iterable(parts), most)]
        except self._obstore.exceptions.BaseError as error:
            if UNLISTED not in str(error):
                raise
            return None

    def get(
        self, bucket: str, path: str, wanted: Mapping[str, Any]
    ) -> tuple[bytes, str | None, tuple[int, int], float, float]:
        """Return a range of an object, its etag, which range it is, and how long it took to begin, and from then on."""
        began = time.perf_counter()
        response = self.begin(bucket, path, wanted)
        answered = time.perf_counter()
        content = response.bytes()
        received = time.perf_counter() - answered
        return content, response.meta["e_tag"], response.range, answered - began, received

    def begin(self, bucket: str, path: str, wanted: Mapping[str, Any]) -> Any:
        """Request a range of an object, and return what answers."""
        return self._obstore.get(self._bucket(bucket), path, options=wanted)

    def signed(self, bucket: str, path: str) -> str:
        """Return a URL to read an object by, which is its own permission."""
        return str(self._obstore.sign(self._bucket(bucket), "GET", path, SIGNED_FOR))

    def _bucket(self, name: str) -> Any:
        """Return the client of a bucket. Threads that want it at once make one: that takes some 15 ms."""
        with self._lock:
            if name not in self._buckets:
                self._buckets[name] = self._new_store(
                    name,
                    **self._options,
                    client_options={"allow_http": True, "timeout": self._timeout},
                    retry_config={"max_retries": 0, "retry_timeout": self._timeout},
                )
            return self._buckets[name]


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=lambda: _inherited.extend(_living))


def builtin_name(error: type[BaseException]) -> str:
    """Return the name of the nearest exception of Python that an error is one of; a panic is a wrong value."""
    names = (each.__name__ for each in error.__mro__ if each.__module__ == "builtins")
    return next(names) if issubclass(error, Exception) else "ValueError"


def main() -> None:
    """Make the calls that come by the standard input, until it ends, and write what they return to the output.

    Both are pickles. The input has where to import from, obstore's options and the timeout; then the number, the method
    and the arguments of each call. The output has for each call the number, None and what was returned; or the name of
    a built-in exception, and the error's message. Number 0 says that obstore is imported.
    """
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.path[:], options, timeout_sec = pickle.load(requests)  # noqa: S301 - of the process that started this one
    obstore = ObstoreCalls(options, timeout_sec)
    # obstore's bytes become Python's: the other process must not import obstore.
    copyreg.pickle(import_module("obstore").Bytes, lambda content: (bytes, (bytes(content),)))
    waiting: SimpleQueue[tuple[int, str, tuple[Any, ...]]] = SimpleQueue()
    lock = Lock()

    def answer(*words: Any) -> None:
        content = pickle.dumps(words, pickle.HIGHEST_PROTOCOL)
        with lock:
            answers.write(content)
            answers.flush()

    def make_calls() -> None:
        while True:
            number, method, arguments = waiting.get()
            try:
                answer(number, None, getattr(obstore, method)(*arguments))
            except BaseException as error:  # noqa: BLE001 - a panic of Rust is none of Exception
                answer(number, builtin_name(type(error)), str(error))

    answer(0, None, None)
    for started in count():
        try:
            waiting.put(pickle.load(requests))  # noqa: S301
        except (EOFError, pickle.UnpicklingError):
            os._exit(0)  # nobody waits for what is being asked
        if started < THREADS:
            Thread(target=make_calls, daemon=True).start()


if __name__ == "__main__":
    main()
