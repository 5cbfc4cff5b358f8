"""Permutes the rows of a table by threads, a few columns at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import pyarrow as pa

from torch_dataloader_utils.columns.arrow import stacked
from torch_dataloader_utils.columns.arrow_memory import memory_pool
from torch_dataloader_utils.columns.selection import take_rows
from torch_dataloader_utils.formats.cpus import decoding_threads
from torch_dataloader_utils.reading.arrow_threads import allocate_first

P = ParamSpec("P")
T = TypeVar("T")

COLUMNS_OF_A_THREAD = 8
"""A thread for each so many columns, the reading one included, permutes a few columns at a time, so that the copies
which are being made stay a small part of the shard."""

PERMUTED_BYTES = 4 << 20
"""Columns are permuted together up to so many bytes in all threads: after each call of Arrow a thread waits for
Python's lock."""

PERMUTED_SHARE = 32
"""They take no more than this part (a 32nd) of the budget, either."""

COPIES = 2
"""How often a column of numbers is there beside its shard while it is permuted: in one piece, and permuted."""


class Permuter:
    """Permutes rows, and lends its threads meanwhile to whoever draws their orders.

    Args:
        columns: How many columns the tables have.
        budget_bytes: Decoded bytes that the stream may hold.
    """

    def __init__(self, columns: int, budget_bytes: int) -> None:
        self._helpers: int = max(1, min(decoding_threads(), columns // COLUMNS_OF_A_THREAD)) - 1
        self._bytes = min(PERMUTED_BYTES, budget_bytes // PERMUTED_SHARE)
        threads = max(1, self._helpers)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="shuffle", initializer=allocate_first)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have one of the threads call a function."""
        return self._threads.submit(function, *args, **kwargs)

    def copied_bytes(self, widest: float) -> float:
        """Return the bytes of the copies while numbers are permuted, given those of the widest column."""
        return COPIES * max((self._helpers + 1) * widest, self._bytes)

    def permuted(
        self, parts: list[pa.Table], indices: pa.Array, meanwhile: Callable[[], object] = lambda: None
    ) -> pa.Table:
        """Permute rows, some columns at a time in each of several threads, and free what is permuted.

        The list of the parts is emptied, for nothing else may keep them in memory. `meanwhile` is called before each
        call of Arrow. Each index is a row's number.
        """
        whole = stacked(parts)
        parts.clear()
        meanwhile()
        if whole.get_total_buffer_size() <= PERMUTED_BYTES:  # a copy of all columns at once is small
            return take_rows(whole, indices, memory_pool(), boundscheck=False)
        names = whole.column_names
        starts = starts_of_groups(whole, self._bytes // (self._helpers + 1))
        groups = zip(starts, [*starts[1:], len(names)], strict=True)
        whole = pa.table(list(map(_divided, whole.columns)), names=names)
        left = deque((start, whole.select(range(start, stop))) for start, stop in groups)
        del whole
        permuted: dict[int, pa.Table] = {}

        def permute(before_each: Callable[[], object] = lambda: None) -> None:
            while taken := _first(left):
                before_each()
                permuted[taken[0]] = take_rows(taken[1], indices, memory_pool(), boundscheck=False)
                del taken

        helping = [self._threads.submit(permute) for _ in range(self._helpers)]
        permute(meanwhile)
        for helper in helping:
            if not helper.cancel():  # one that has not begun has no column, and may wait for an order that is drawn
                helper.result()
        return pa.table([column for start in starts for column in permuted[start].columns], names=names)


def _first(left: deque[T]) -> T | None:
    """Take the first of what is left, of which other threads take as well; None if nothing is."""
    try:
        return left.popleft()
    except IndexError:
        return None


def _divided(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column of numbers as at least two chunks.

    Arrow joins the chunks of a column right before it takes rows from it. So the processor has the column in its cache,
    read in order, when its values are taken in random order.
    """
    if column.num_chunks != 1 or not pa.types.is_primitive(column.type):
        return column
    chunk, half = column.chunk(0), len(column) // 2
    return pa.chunked_array([chunk.slice(0, half), chunk.slice(half)], column.type)


def starts_of_groups(table: pa.Table, most: int) -> list[int]:
    """Return where groups of neighbouring columns begin that take so many bytes at most, or have one column."""
    starts, taken = [0], 0
    for number, column in enumerate(table.columns):
        size = column.get_total_buffer_size()
        if number and taken + size > most:
            starts.append(number)
            taken = 0
        taken += size
    return starts
