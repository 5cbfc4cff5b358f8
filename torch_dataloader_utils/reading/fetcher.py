"""The bytes of row groups of files that are not mapped into memory, fetched ahead of need."""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_right
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from typing import TypeAlias

import pyarrow as pa

from torch_dataloader_utils.formats.base import Layout
from torch_dataloader_utils.formats.concurrency import OPEN_FILES
from torch_dataloader_utils.storage.byte_ranges import coalesced
from torch_dataloader_utils.storage.filesystem import RemoteFile, Storage, StoredFile
from torch_dataloader_utils.storage.local_file import RangedFile

FETCHES = 32
"""How many ranges are fetched from a storage at once: its latency is high, and so is the network's bandwidth."""

LARGEST_GAP = 64 * 1024
"""Bytes between two column chunks that are fetched with them, because a second request would take longer."""

Opened: TypeAlias = RangedFile | RemoteFile
Content: TypeAlias = bytes | pa.Buffer


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
        self._layout = layout
        self.fetches = cache(lambda path: not storage.maps(files[path]))
        """Whether a file, by path, is fetched: it is not mapped into memory."""
        self._threads = ThreadPoolExecutor(FETCHES, thread_name_prefix="fetch")
        self._requested: defaultdict[tuple[str, int], deque[list[tuple[int, Future[Content]]]]] = defaultdict(deque)
        self._opened: OrderedDict[str, Future[Opened]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def request_bytes(self) -> int:
        """How many bytes of consecutive row groups to ask for at once; 0 where each is asked for by itself."""
        return self._storage.request_bytes

    def request(self, path: str, *numbers: int) -> None:
        """Begin to fetch row groups, unless their file is mapped into memory. Ranges that touch are one request."""
        if not self.fetches(path):
            return
        layout = self._layout(path)
        wanted = {number: layout.ranges(number) for number in numbers}
        ranges = coalesced(itertools.chain.from_iterable(wanted.values()), LARGEST_GAP)
        name = partial(self._names, path, numbers)
        with self._lock:
            opened = self._open(path)
            fetches = [self._threads.submit(self._fetch, opened, start, stop, name) for start, stop in ranges]
            starts = [start for start, _ in ranges]
            for number, own in wanted.items():
                held = sorted({bisect_right(starts, start) - 1 for start, _ in own})
                fetched = [(starts[index], fetches[index]) for index in held]
                self._requested[path, number].append(fetched)  # it may be requested again before it is taken

    def take(self, path: str, number: int) -> Iterator[tuple[int, Content]]:
        """Wait for a row group and yield its ranges: the offset and the bytes of each."""
        if not self._requested[path, number]:  # another attempt
            self.request(path, number)
        for start, fetched in self._requested[path, number].popleft():
            yield start, fetched.result()

    def opened(self, path: str) -> Opened:
        """Return the open file that ranges are read of."""
        with self._lock:
            opened = self._open(path)
        return opened.result()

    def forget(self, path: str) -> None:
        """Open a file again when it is needed again, because an error occurred in it."""
        with self._lock:
            self._opened.pop(path, None)

    def close(self) -> None:
        """Request nothing more; wait for what is being fetched."""
        self._threads.shutdown(cancel_futures=True)

    def _names(self, path: str, numbers: Sequence[int]) -> str:
        """Return the name of the row groups that one request is for."""
        name = self._name(path, numbers[0])
        return name if len(numbers) == 1 else f"{name}, and those up to number {numbers[-1]}"

    def _open(self, path: str) -> Future[Opened]:
        """Begin to open a file, unless it is open; its ranges are fetched as soon as it is."""
        opened = self._opened.pop(path, None) or self._threads.submit(self._storage.open_ranged, self._files[path])
        self._opened[path] = opened
        if len(self._opened) > OPEN_FILES:
            self._opened.popitem(last=False)
        return opened

    def _fetch(self, opened: Future[Opened], start: int, stop: int, name: Callable[[], str]) -> Content:
        return self._storage.fetch(opened.result(), start, stop, name)
