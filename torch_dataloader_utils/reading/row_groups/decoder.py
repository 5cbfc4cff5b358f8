"""Row groups decoded by Arrow: of files that are mapped into memory, or of the ranges that were fetched of others."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from queue import SimpleQueue
from typing import Any
from weakref import ReferenceType

import pyarrow as pa

from torch_dataloader_utils.columns.arrow import sliced, stacked
from torch_dataloader_utils.errors import UnreadableFileError
from torch_dataloader_utils.formats.base import Codec, RowGroups
from torch_dataloader_utils.formats.concurrency import OPEN_FILES
from torch_dataloader_utils.formats.opened_files import OpenedFiles
from torch_dataloader_utils.formats.read_cache import CurrentReads
from torch_dataloader_utils.reading.arrow_threads import allocate_first
from torch_dataloader_utils.reading.row_groups.fetcher import Fetcher
from torch_dataloader_utils.storage.byte_ranges import SparseFile
from torch_dataloader_utils.storage.local_file import LocalFile, RangedFile


@dataclass(frozen=True, slots=True)
class Decoded:
    """Rows of a row group, and when their bytes had been fetched, as `time.perf_counter` tells it.

    `is_last` is whether it has no others, where they are not decoded in parts of a requested size.
    """

    table: pa.Table
    fetched: float
    is_last: bool = False


class DecodedTables(Iterator[Decoded]):
    """The tables of a row group, each as soon as it is decoded; only the last one may be without rows.

    One thread puts what another one takes.
    """

    def __init__(self) -> None:
        self._found: SimpleQueue[Decoded | BaseException] = SimpleQueue()
        self._has_ended = False

    def put(self, found: Decoded | BaseException) -> None:
        """Add the next table, or the error that its decoding ends in."""
        self._found.put(found)

    def __next__(self) -> Decoded:
        if self._has_ended:
            raise StopIteration
        found = self._found.get()
        if isinstance(found, BaseException):
            self._has_ended = True
            try:
                raise found
            finally:
                del found  # its traceback has this frame: a cycle would keep the tables that were taken before it
        self._has_ended = found.is_last
        return found


class Decoder:
    """A thread that decodes row groups in order, and the files that it has open for itself.

    The thread may be another decoder's. `reads` is told what the thread reads. To `held` is added what Arrow's threads
    may still refer to once it is closed.
    """

    def __init__(
        self,
        files: OpenedFiles,
        codec: Codec,
        fetcher: Fetcher,
        reads: CurrentReads | None,
        held: list[ReferenceType[Any]],
        *,
        thread: ThreadPoolExecutor | None = None,
    ) -> None:
        self._files = files
        self._storage = files.storage
        self._codec = codec
        self._fetcher = fetcher
        self._reads = reads
        self._held = held
        self._open: OrderedDict[str, _OpenFile] = OrderedDict()
        self._fetched = 0.0
        self._pending: deque[int] = deque()
        self._shares = thread is not None
        self.thread = thread or ThreadPoolExecutor(1, thread_name_prefix="decode", initializer=allocate_first)

    @property
    def pending_bytes(self) -> int:
        """The sizes of what `whole` is decoding and has yet to decode."""
        return sum(self._pending.copy())  # a copy: the thread takes from it, and must not while it is iterated

    def whole(self, path: str, numbers: range, size: int) -> DecodedTables:
        """Decode consecutive row groups, after those before, and without waiting for anyone to take their tables."""
        tables = DecodedTables()
        self._pending.append(size)
        self.thread.submit(self._decode_all, path, numbers, tables)
        return tables

    def of_files(self, groups: Sequence[tuple[str, Sequence[int]]], size: int) -> DecodedTables:
        """Decode some row groups of each of several files, as `whole` does: one table of each file."""
        tables = DecodedTables()
        self._pending.append(size)
        self.thread.submit(self._decode_each, groups, tables)
        return tables

    def _submit(self, path: str, number: int, decode: Callable[[], pa.Table]) -> Future[Decoded]:
        return self.thread.submit(self._attempt, path, range(number, number + 1), decode)

    def _attempt(self, path: str, numbers: Sequence[int], decode: Callable[[], pa.Table]) -> Decoded:
        first = min(numbers)
        name = self._files.row_group_name(path, first, max(numbers) + 1 - first)
        with nullcontext() if self._reads is None else self._reads.of(name):
            table = _once_more(decode)
            return Decoded(table, self._fetched)

    def in_parts(self, path: str, number: int, rows: Callable[[], int]) -> Iterator[Decoded]:
        """Yield a row group in tables, each of about as many rows as `rows` says when it is requested.

        Arrow decodes as many rows at a time as `rows` says at first.
        """
        tables: Generator[pa.Table, None, None] | None = None
        done, step = 0, rows()

        def next_table() -> pa.Table | None:
            nonlocal tables
            tables = tables or self._decode_from(path, number, step, done)
            found: list[pa.Table] = []
            left = rows()
            try:
                while left >= step or not found:
                    table = next(tables, None)
                    if table is None:
                        break
                    found.append(table)
                    left -= table.num_rows
            except BaseException:
                tables = None  # another attempt begins with the first row that was not yielded
                raise
            return stacked(found) if found else None

        try:
            while (decoded := self._submit(path, number, next_table).result()).table is not None:
                done += decoded.table.num_rows
                yield decoded
        finally:
            if tables is not None:
                tables.close()  # now, not when it is garbage: Arrow may still read ahead for it

    def parts(self, path: str, number: int, rows: int, first: int) -> Parts:
        """Return a row group that is decoded in parts of any size, from a first row on, so many rows at a time."""
        # Without Arrow's threads: others are decoded at the same time.
        decode_from = partial(self._decode_from, path, number, rows, use_threads=False)
        return Parts(partial(self._submit, path, number), decode_from, first)

    def close(self) -> None:
        """Close the files. End the thread, unless it is shared, and wait for what is being decoded."""
        if not self._shares:
            self.thread.shutdown(cancel_futures=True)
        while self._open:
            self._note_held(opened := self._open.popitem()[1])
            opened.row_groups.close()

    # In the thread ---------------------------------------------------------------------------------------------------

    def _decode_all(self, path: str, numbers: range, tables: DecodedTables) -> None:
        done = 0

        def rest() -> pa.Table:
            """Put all tables but the last one, and return that. Another attempt leaves out what was put."""
            nonlocal done
            first = done
            with self._at_hand(path, numbers) as opened:
                for table, is_last in opened.row_groups.decoded(numbers):
                    opened.require_unchanged()
                    left = sliced(table, min(first, table.num_rows)) if first else table
                    first -= table.num_rows - left.num_rows
                    if not is_last and left.num_rows:
                        tables.put(Decoded(left, self._fetched))
                        done += left.num_rows
            return left

        self._put_last(partial(self._attempt, path, numbers, rest), tables)

    def _decode_each(self, groups: Sequence[tuple[str, Sequence[int]]], tables: DecodedTables) -> None:
        def one(path: str, numbers: Sequence[int]) -> Decoded:
            return self._attempt(path, numbers, partial(self._decode_at_once, path, numbers))

        def all_of_them() -> Decoded:
            """Put all tables but the last one, and return that."""
            for group in groups[:-1]:
                tables.put(one(*group))
            return one(*groups[-1])

        self._put_last(all_of_them, tables)

    def _decode_at_once(self, path: str, numbers: Sequence[int]) -> pa.Table:
        with self._at_hand(path, numbers) as opened:
            table = stacked([table for table, _ in opened.row_groups.decoded(numbers)])
            opened.require_unchanged()
        return table

    def _put_last(self, decode: Callable[[], Decoded], tables: DecodedTables) -> None:
        """Put the last of some tables, or the error that their decoding ends in."""
        # Whoever takes it may look for the decoder that has least to decode.
        try:
            last = replace(decode(), is_last=True)
        except BaseException as error:  # noqa: BLE001 - raised again where the tables are taken
            self._pending.popleft()
            tables.put(error)
        else:
            self._pending.popleft()
            tables.put(last)

    def _decode_from(
        self, path: str, number: int, rows: int, first: int, *, use_threads: bool = True
    ) -> Generator[pa.Table, None, None]:
        with self._at_hand(path, range(number, number + 1)) as opened:
            batches = opened.row_groups.batches(number, rows, use_threads=use_threads)
            while (batch := next(batches, None)) is not None:
                opened.require_unchanged()
                if batch.num_rows > first:
                    yield pa.Table.from_batches([batch.slice(first)])
                first = max(0, first - batch.num_rows)
                opened.require_unchanged()  # a map of a file that was cut short meanwhile must not be read

    @contextmanager
    def _at_hand(self, path: str, numbers: Sequence[int]) -> Iterator[_OpenFile]:
        """Open a file that has the bytes of some row groups.

        It is dropped after an error, so that the next attempt opens it.
        """
        try:
            opened = self._opened(path)
            opened.require_unchanged()
            layout = self._codec.layout(path)
            extents = [layout.extent(run) for run in _runs(numbers)]
            for extent in extents:
                opened.prepare(extent)
            if self._fetcher.fetches(path):
                for start, content in chain.from_iterable(self._fetcher.take(path, number) for number in numbers):
                    opened.add(start, content)
            self._fetched = time.perf_counter()
            yield opened
            for extent in extents:
                opened.forget(extent)
        except GeneratorExit:  # the other rows are not needed: Arrow may still read ahead, so the file is dropped
            if path in self._open:
                self._note_held(self._open.pop(path))
            raise
        except BaseException:
            self._open.pop(path, None)
            self._fetcher.forget(path)
            raise

    def _opened(self, path: str) -> _OpenFile:
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        while len(self._open) >= OPEN_FILES:
            self._note_held(oldest := self._open.popitem(last=False)[1])
            oldest.row_groups.close()
        self._open[path] = opened = self._open_ranged(path) if self._fetcher.fetches(path) else self._open_mapped(path)
        return opened

    def _note_held(self, opened: _OpenFile) -> None:
        """Note what Arrow's threads may still refer to of a file that is closed."""
        self._held[:] = [*(held for held in self._held if held() is not None), *opened.held_by_arrow()]

    def _open_mapped(self, path: str) -> _OpenFile:
        mapped = self._storage.open_mapped(self._files.files[path])
        return _OpenFile(self._codec.open(path, mapped.file, mapped), local=mapped)

    def _open_ranged(self, path: str) -> _OpenFile:
        file = self._files.files[path]
        opened = self._fetcher.opened(path) if self._storage.is_local else None
        local = opened if isinstance(opened, RangedFile) else None
        sparse = SparseFile(file.size)
        tail = self._codec.tail(path)
        sparse.add(file.size - len(tail), tail)
        return _OpenFile(self._codec.open(path, pa.PythonFile(sparse, mode="r"), local), local=local, sparse=sparse)


class Parts:
    """A row group that is decoded part by part in a decoder's thread.

    `submit` calls a function there, and once more if the bytes are damaged. `decode_from` yields the tables that
    follow a number of rows. The parts begin with row `first`.
    """

    def __init__(
        self,
        submit: Callable[[Callable[[], pa.Table]], Future[Decoded]],
        decode_from: Callable[[int], Generator[pa.Table, None, None]],
        first: int,
    ) -> None:
        self._submit = submit
        self._decode_from = decode_from
        self._done = first
        self._tables: Generator[pa.Table, None, None] | None = None
        self._rest: list[pa.Table] = []
        self._empty = pa.table({})

    def next(self, rows: int) -> Future[Decoded]:
        """Decode the next rows, after those before them; fewer if there are no more."""
        return self._submit(partial(self._next, rows))

    def close(self) -> None:
        """Decode nothing more, once what is being decoded is done."""
        if self._tables is not None:
            self._tables.close()

    def _next(self, rows: int) -> pa.Table:
        try:
            if self._tables is None:
                self._tables, self._rest = self._decode_from(self._done), []
            parts: list[pa.Table] = []
            wanted = rows
            while wanted or not parts:
                table = self._rest.pop() if self._rest else next(self._tables, None)
                if table is None:
                    parts.append(self._empty)
                    break
                self._empty = sliced(table, 0, 0)
                parts.append(sliced(table, 0, wanted))
                if len(table) > wanted:
                    self._rest.append(sliced(table, wanted))
                wanted -= len(parts[-1])
        except BaseException:
            self._tables = None  # another attempt begins with the first row that was not returned
            raise
        self._done += rows - wanted
        return stacked(parts)


def _runs(numbers: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield ascending numbers in runs of consecutive ones."""
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            yield numbers[start:end]
            start = end


def _once_more(decode: Callable[[], pa.Table]) -> pa.Table:
    """Decode. If that fails, read the bytes again and decode those: they may have been damaged on their way.

    A storage that fails is not tried again here: its operations have made their own attempts.
    """
    final = (FileNotFoundError, PermissionError, UnreadableFileError)
    try:
        return decode()
    except Exception as error:  # what Arrow raises of damaged bytes is of many types
        if isinstance(error, final):
            raise
    return decode()


@dataclass(frozen=True, slots=True)
class _OpenFile:
    """A file that is open for reading row groups: mapped into memory, or the ranges that were fetched of it."""

    row_groups: RowGroups
    local: LocalFile | None = None
    sparse: SparseFile | None = None

    def require_unchanged(self) -> None:
        if self.local is not None:
            self.local.require_unchanged()

    def held_by_arrow(self) -> list[ReferenceType[Any]]:
        """Return the objects that Arrow's threads may still refer to once it is closed."""
        return [held for file in (self.local, self.sparse) if file is not None for held in file.held_by_arrow()]

    def prepare(self, extent: tuple[int, int]) -> None:
        if self.local is not None:
            self.local.will_need(*extent)

    def add(self, start: int, content: bytes | pa.Buffer) -> None:
        if self.sparse is not None:
            self.sparse.add(start, content)

    def forget(self, extent: tuple[int, int]) -> None:
        if self.local is not None:
            self.local.forget(*extent)
        if self.sparse is not None:
            self.row_groups.forget()
            self.sparse.clear()
