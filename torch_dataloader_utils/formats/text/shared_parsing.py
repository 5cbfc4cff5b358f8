"""How much text is parsed at a time, and how many of Arrow's threads help: threads that parse share what is known."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator

import pyarrow as pa

from torch_dataloader_utils.columns.arrow import stacked
from torch_dataloader_utils.formats.text.lines import Text

BLOCKS = 4
"""How many blocks make a piece of text that is parsed at a time. A thread that has no more text to parse waits for the
pieces of the others no longer than for one."""

PIECES = 4
"""How many pieces make a table: to deliver one takes time as well. After the last ones nothing is parsed meanwhile."""


def piece_sizes(text: Text, block_bytes: int) -> Iterator[int]:
    """Yield how long each piece of a text is. The first ones of a long text are short: its first rows come soon."""
    is_short = text.compression is None and text.content.size <= 2 * BLOCKS * block_bytes
    blocks = BLOCKS if is_short else 1
    while True:
        yield blocks * block_bytes
        blocks = min(BLOCKS, 2 * blocks)


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

    @property
    def uses_threads(self) -> bool:
        """Whether Arrow's threads parse the next piece. With a text for each processor that takes more time in all."""
        return bool(self._texts < pa.cpu_count())

    def tables(self, pieces: Iterable[pa.Table]) -> Iterator[tuple[pa.Table, bool]]:
        """Yield the rows of a text, which is parsed meanwhile, and whether there are no others after each table.

        The first one has those of the first piece, and only the last one may be without rows.
        """
        together: list[pa.Table] = []
        most = 1
        with self._parsing():
            for piece in pieces:
                if not piece.num_rows and together:
                    continue
                if len(together) >= most:  # there are rows after them
                    yield stacked(together), False
                    together, most = [], PIECES
                together.append(piece)
        yield stacked(together), True

    @contextlib.contextmanager
    def _parsing(self) -> Iterator[None]:
        with self._lock:
            self._texts += 1
        try:
            yield
        finally:
            with self._lock:
                self._texts -= 1
