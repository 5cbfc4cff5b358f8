"""The bytes of row groups out of storages that are not local, fetched ahead of need."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from torch_dataloader_utils.formats.base import Layout
from torch_dataloader_utils.formats.concurrency import OPEN_FILES
from torch_dataloader_utils.storage.byte_ranges import coalesced
from torch_dataloader_utils.storage.filesystem import RemoteFile, Storage, StoredFile

__all__ = ["FETCHES", "LARGEST_GAP", "Fetcher"]


FETCHES = 32
"""How many ranges are fetched from a storage at once: its answers take long, and the network has budget for many."""


LARGEST_GAP = 64 * 1024
"""Bytes between two column chunks that are fetched along rather than left out at the price of another request."""


class Fetcher:
    """Fetches what is needed of row groups, many ranges at once.

    Args:
        storage: Where the files lie.
        files: The files, by path.
        layout: Tells where in a file, by path, the needed columns lie.
    """

    def __init__(self, storage: Storage, files: Mapping[str, StoredFile], layout: Callable[[str], Layout]) -> None:
        self._storage = storage
        self._files = files
        self._layout = layout
        self._threads = ThreadPoolExecutor(FETCHES, thread_name_prefix="fetch")
        self._requested: defaultdict[tuple[str, int], deque[list[tuple[int, Future[bytes]]]]] = defaultdict(deque)
        self._opened: OrderedDict[str, Future[RemoteFile]] = OrderedDict()
        self._lock = threading.Lock()

    def request(self, path: str, number: int) -> None:
        """Begin to fetch a row group."""
        ranges = coalesced(self._layout(path).ranges(number), LARGEST_GAP)
        with self._lock:
            opened = self._open(path)
            asked = [(start, self._threads.submit(self._fetch, opened, start, stop)) for start, stop in ranges]
            self._requested[path, number].append(asked)  # it may be asked for again before it is taken

    def take(self, path: str, number: int) -> Iterator[tuple[int, bytes]]:
        """Wait for a row group and yield its ranges: where each begins, and its bytes."""
        if not self._requested[path, number]:  # another attempt
            self.request(path, number)
        for start, fetched in self._requested[path, number].popleft():
            yield start, fetched.result()

    def forget(self, path: str) -> None:
        """Open a file anew when it is needed again: something went wrong with it."""
        with self._lock:
            self._opened.pop(path, None)

    def close(self) -> None:
        """Ask for nothing more; what is being fetched is waited for."""
        self._threads.shutdown(cancel_futures=True)

    def _open(self, path: str) -> Future[RemoteFile]:
        """Open a file; its ranges are fetched as soon as it is open."""
        opened = self._opened.pop(path, None)
        if opened is None:
            opened = self._threads.submit(self._storage.open_remote, self._files[path])
        self._opened[path] = opened
        if len(self._opened) > OPEN_FILES:
            self._opened.popitem(last=False)
        return opened

    def _fetch(self, opened: Future[RemoteFile], start: int, stop: int) -> bytes:
        file = opened.result()
        return self._storage.attempt(partial(file.read, start, stop))
