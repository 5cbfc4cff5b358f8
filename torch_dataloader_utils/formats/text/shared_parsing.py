"""How much text is parsed at a time, and how many of Arrow's threads help: threads that parse share what is known."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa

from torch_dataloader_utils.columns.arrow import stacked

BLOCKS = 4
"""How many blocks make a piece of text that is parsed at a time. A thread that has no more text to parse waits for the
pieces of the others no longer than for one."""

GROWTH = 4
"""Of the first texts, tables are made of this many times more pieces each time: to deliver a table takes time as well.
The first table comes soon, and the last texts become one table each."""


class SharedParsing:
    """What the threads of one reader share that parse texts, each one text at a time.

    Attributes:
        quotes_values: Whether a text had a quoted value.
        spells_nulls: Whether a text had a null that is spelled out, such as ``NA``.
    """

    def __init__(self) -> None:
        self.quotes_values = False
        self.spells_nulls = False
        self._lock = threading.Lock()
        self._texts = 0
        self._blocks = 1
        self._pieces = 1

    @property
    def uses_threads(self) -> bool:
        """Whether Arrow's threads parse the next piece. With a text for each processor that takes more time in all."""
        return bool(self._texts < pa.cpu_count())

    def next_blocks(self) -> int:
        """Return how many blocks the next piece of text has."""
        with self._lock:
            blocks, self._blocks = self._blocks, BLOCKS
        return blocks

    def tables(self, pieces: Iterable[pa.Table]) -> Iterator[tuple[pa.Table, bool]]:
        """Yield the rows of a text, which is parsed meanwhile, and whether there are no others after each table.

        The tables grow, and only the last one may be without rows.
        """
        together: list[pa.Table] = []
        with self._parsing():
            for piece in pieces:
                if not piece.num_rows and together:
                    continue
                if len(together) >= self._pieces:  # there are rows after them
                    yield self._next_table(together), False
                    together = []
                together.append(piece)
        yield stacked(together), True

    def _next_table(self, together: Sequence[pa.Table]) -> pa.Table:
        with self._lock:
            self._pieces *= GROWTH
        return stacked(together)

    @contextlib.contextmanager
    def _parsing(self) -> Iterator[None]:
        with self._lock:
            self._texts += 1
        try:
            yield
        finally:
            with self._lock:
                self._texts -= 1
