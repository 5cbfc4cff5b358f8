"""The bytes of row groups of files that are not mapped into memory, fetched ahead of need."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from typing import Any, TypeAlias

import pyarrow as pa

from torch_dataloader_utils.formats.base import Layout
from torch_dataloader_utils.formats.concurrency import OPEN_FILES
from torch_dataloader_utils.reading.arrow_threads import allocate_first
from torch_dataloader_utils.storage.byte_ranges import coalesced
from torch_dataloader_utils.storage.filesystem import Storage
from torch_dataloader_utils.storage.local_file import RangedFile
from torch_dataloader_utils.storage.range_stream import RangeStream
from torch_dataloader_utils.storage.remote_file import RemoteFile
from torch_dataloader_utils.storage.request_size import RequestSize
from torch_dataloader_utils.storage.stored_file import StoredFile

FETCHES = 32
"""How many ranges are fetched from a storage at once: its latency is high, and so is the network's bandwidth."""

LARGEST_GAP = 64 * 1024
"""Bytes between two column chunks that are fetched with them, because a second request would take longer."""

MOST_RANGES = 128
"""Of how many row groups it is kept which ranges they have. Those of a run are asked for with each of them."""

Opened: TypeAlias = RangedFile | RemoteFile

Content: TypeAlias = bytes | pa.Buffer
"""The bytes of a range."""


@dataclass(eq=False)
class _Run:
    """Row groups of a file that are received one after another, by one request.

    Attributes:
        start: Where its first row group begins.
        stop: Where its last row group ends.
        position: Where the bytes end that are requested of it.
        stream: The request, once it was made.
        calls: What is done for it next, one after another.
    """

    start: int
    stop: int
    position: int = field(init=False)
    stream: RangeStream | None = None
    calls: deque[tuple[Future[Any], Callable[[], Any]]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.position = self.start

    def continues(self, start: int, stop: int) -> bool:
        """Whether a range is the next to be received."""
        return 0 <= start - self.position <= LARGEST_GAP and stop <= self.stop


class Fetcher:
    """Fetches the bytes of row groups that the layout of their file says are needed, many ranges at once.

    `name` returns a row group's name for messages.
    """

    def __init__(
        self,
        storage: Storage,
        files: Mapping[str, StoredFile],
        layout: Callable[[str], Layout],
        name: Callable[[str, int], str],
    ) -> None:
        self._storage = storage
        self._name = name
        self._files = files
        self._ranges = lru_cache(MOST_RANGES)(lambda path, number: coalesced(layout(path).ranges(number), LARGEST_GAP))
        self.fetches = cache(lambda path: not storage.maps(files[path]))
        """Whether a file, by path, is fetched: it is not mapped into memory."""
        self._threads = ThreadPoolExecutor(FETCHES, thread_name_prefix="fetch", initializer=allocate_first)
        self._requested: defaultdict[tuple[str, int], deque[list[tuple[int, Future[Content]]]]] = defaultdict(deque)
        self._opened: OrderedDict[str, Future[Opened]] = OrderedDict()
        # Of a file: the one that is received, and the one that was prepared.
        self._runs: defaultdict[str, deque[_Run]] = defaultdict(lambda: deque(maxlen=2))
        self._busy: set[_Run] = set()  # those that a thread makes calls for, or is about to
        self._lock = threading.Lock()  # held to change runs and which of them are busy

    @property
    def request_size(self) -> RequestSize | None:
        """How many bytes of consecutive row groups one request may be for; None where each has its own."""
        return self._storage.request_size

    def request(self, path: str, number: int, following: Sequence[int] = ()) -> None:
        """Begin to fetch a row group, unless its file is mapped into memory.

        Where the ranges of those that follow, which are requested next, touch its own, one request is for all of them:
        its answer is received range by range, as they are requested.
        """
        if not self.fetches(path):
            return
        ranges = self._ranges(path, number)
        runs = self._together(path, (number, *following)) if following else ranges
        name = partial(self._name, path, number)
        with self._lock:
            opened = self._open(path)
            fetched = [(wanted[0], self._begin(path, opened, wanted, runs, name)) for wanted in ranges]
            self._requested[path, number].append(fetched)  # it may be requested again before it is taken

    def prepare(self, path: str, numbers: Sequence[int]) -> None:
        """Make the request for row groups that follow one another, before they are requested one by one.

        Its answer begins meanwhile. Nothing is done where their ranges do not touch.
        """
        ranges = self._ranges(path, numbers[0]) if self.fetches(path) else []
        if not ranges:  # also where none of the columns that are needed is in this file
            return
        wanted = ranges[0]
        until = self._together(path, numbers)[0][1]
        if until == wanted[1]:
            return
        with self._lock:
            run = _Run(wanted[0], until)
            self._call(run, partial(self._prepare, run, self._open(path), wanted))
            self._runs[path].append(run)

    def _together(self, path: str, numbers: Iterable[int]) -> Sequence[tuple[int, int]]:
        """Return the ranges of several row groups, merged."""
        return coalesced(itertools.chain.from_iterable(self._ranges(path, number) for number in numbers), LARGEST_GAP)

    def _begin(
        self,
        path: str,
        opened: Future[Opened],
        wanted: tuple[int, int],
        runs: Sequence[tuple[int, int]],
        name: Callable[[], str],
    ) -> Future[Content]:
        """Begin to fetch a range: by the request that it continues, or by one for the run that it begins."""
        start, stop = wanted
        run = next((run for run in self._runs[path] if run.continues(start, stop)), None)
        if run is None:
            until = next(last for first, last in runs if first <= start < last)
            if until == stop:
                return self._threads.submit(self._fetch, opened, wanted, name)
            run = _Run(start, until)
            self._runs[path].append(run)
        received = self._call(run, partial(self._receive, run, opened, wanted, name))
        run.position = stop
        if stop == run.stop:
            self._runs[path].remove(run)
        return received

    def receives(self, path: str, number: int) -> bool:
        """Whether a request was made whose answer goes on with a row group."""
        with self._lock:
            return self._run_before(path, number) is not None

    def _run_before(self, path: str, number: int) -> _Run | None:
        """Return the run whose next row group this is; None if there is none."""
        ranges = self._ranges(path, number) if self.fetches(path) else []
        start = ranges[0][0] if ranges else -1
        return next((run for run in self._runs[path] if run.continues(start, start)), None)

    def cut(self, path: str, number: int) -> None:
        """Receive no more by the request that has a row group, but what is requested already: others are faster."""
        with self._lock:
            run = self._run_before(path, number)
            if run is not None:
                self._runs[path].remove(run)
                self._call(run, partial(self._end, run))

    def take(self, path: str, number: int) -> Iterator[tuple[int, Content]]:
        """Wait for a row group and yield its ranges: the offset and the bytes of each."""
        while (ranges := self._taken(path, number)) is None:
            self.request(path, number)  # another attempt
        for start, fetched in ranges:
            yield start, fetched.result()

    def _taken(self, path: str, number: int) -> list[tuple[int, Future[Content]]] | None:
        """Return the ranges of a row group that were requested first, and keep nothing of it if there are no others."""
        with self._lock:
            waiting = self._requested.get((path, number))
            if not waiting:
                return None
            ranges = waiting.popleft()
            if not waiting:
                del self._requested[path, number]
        return ranges

    def opened(self, path: str) -> Opened:
        """Return the open file that ranges are read of."""
        with self._lock:
            opened = self._open(path)
        return opened.result()

    def forget(self, path: str) -> None:
        """Open a file again when it is needed again, because an error occurred in it."""
        with self._lock:
            self._opened.pop(path, None)
            self._runs.pop(path, None)

    def close(self) -> None:
        """Request nothing more; wait for what is being fetched."""
        self._threads.shutdown(wait=False, cancel_futures=True)  # first: what is cancelled may be requested again
        with self._lock:
            for run in self._busy:
                while run.calls:
                    run.calls.popleft()[0].cancel()
        self._threads.shutdown()
        self._runs.clear()

    def _open(self, path: str) -> Future[Opened]:
        """Begin to open a file, unless it is open; its ranges are fetched as soon as it is."""
        opened = self._opened.pop(path, None) or self._begin_to_open(self._files[path])
        self._opened[path] = opened
        if len(self._opened) > OPEN_FILES:
            self._opened.popitem(last=False)
        return opened

    def _begin_to_open(self, file: StoredFile) -> Future[Opened]:
        """Have a thread open a file, if that takes a request."""
        at_once = self._storage.opened_at_once(file)
        if at_once is None:
            return self._threads.submit(self._storage.open_ranged, file)
        opened: Future[Opened] = Future()
        opened.set_result(at_once)
        return opened

    def _fetch(self, opened: Future[Opened], wanted: tuple[int, int], name: Callable[[], str]) -> Content:
        return self._storage.fetch(opened.result(), *wanted, name)

    def _prepare(self, run: _Run, opened: Future[Opened], wanted: tuple[int, int]) -> None:
        run.stream = self._storage.stream(opened.result(), run.start, run.stop)
        if run.stream is not None:
            self._storage.begin(run.stream, *wanted)

    def _call(self, run: _Run, call: Callable[[], Any]) -> Future[Any]:
        """Have a thread make a call once it has made those before it for the same run. The lock is held."""
        outcome: Future[Any] = Future()
        run.calls.append((outcome, call))
        if run not in self._busy:
            self._busy.add(run)
            self._threads.submit(self._make_calls_of, run)
        return outcome

    def _make_calls_of(self, run: _Run) -> None:
        while True:
            with self._lock:
                if not run.calls:
                    self._busy.remove(run)
                    return
                outcome, call = run.calls.popleft()
            if outcome.set_running_or_notify_cancel():
                try:
                    outcome.set_result(call())
                except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                    outcome.set_exception(error)
            del outcome, call  # what they refer to must not wait for the next call

    def _end(self, run: _Run) -> None:
        """Receive nothing more of a run, once what is requested of it was received."""
        if run.stream is not None:
            run.stream.close()

    def _receive(
        self,
        run: _Run,
        opened: Future[Opened],
        wanted: tuple[int, int],
        name: Callable[[], str],
    ) -> Content:
        """Receive the next range of a run."""
        run.stream = run.stream or self._storage.stream(opened.result(), run.start, run.stop)
        if run.stream is None:
            return self._fetch(opened, wanted, name)
        return self._storage.receive(run.stream, *wanted, name)
