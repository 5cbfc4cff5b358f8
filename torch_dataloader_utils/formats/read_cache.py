"""What readers of the same files learn and keep from epoch to epoch: footers, and how large rows are in memory.

Threads may share both. Each operation is one of a dict, so nothing is locked, and nothing stays locked after a fork.
`CurrentReads` has a lock; a worker makes it for itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from torch_dataloader_utils.columns.arrow import is_encoded_bytes, row_bytes, width

PARSED_BYTES = 4 << 20
"""Footers of so many bytes are kept parsed, from epoch to epoch. Those of Parquet take eight to nine times as much
then. The first ones stay: of the last ones, an epoch that needs more files one after another finds none."""

GROWTH = 2
"""How many times what row groups were expected to take they may take, and are about as large as those before. Values
that grow by more when they are decoded are in a dictionary."""


class ParsedFooters:
    """The first footers that were parsed, as a format keeps them, by whatever it looks them up by.

    A process that is forked has them, too. Pickled, there are none: another process parses its own.
    """

    def __init__(self) -> None:
        self._parsed: dict[Hashable, Any] = {}
        self._bytes = 0

    def get(self, key: Hashable) -> Any:
        """Return what was kept; None if nothing was."""
        return self._parsed.get(key)

    def keep(self, key: Hashable, parsed: Any, size: int) -> None:
        """Keep a parsed footer of so many bytes, if there is room. Two threads at once may keep a little more."""
        if self._bytes + size <= PARSED_BYTES:
            self._bytes += size
            self._parsed[key] = parsed

    def __reduce__(self) -> tuple[type[ParsedFooters], tuple[()]]:
        """Return what makes an empty one."""
        return ParsedFooters, ()


class FooterStore:
    """Footers as bytes, by path: those read when the files were opened, and those that were added since.

    `parsed` has the first ones as they were parsed for the columns that are read, by path and columns. `encoded` has
    what the first of them decided: whether a column is read as a dictionary, by name.
    """

    def __init__(self, opened: Mapping[str, bytes]) -> None:
        self.parsed = ParsedFooters()
        self.encoded: dict[str, bool] = {}
        self._opened = opened
        self._added: dict[str, bytes] = {}

    def __contains__(self, path: str) -> bool:
        return path in self._opened or path in self._added

    def __getitem__(self, path: str) -> bytes:
        content = self._opened.get(path)
        return self._added[path] if content is None else content

    def add(self, footers: Mapping[str, bytes]) -> None:
        """Add footers that were read, or that came with an assignment."""
        self._added.update(footers)


class SizeEstimates:
    """The most that a row has taken in memory, for each column of no fixed width that was decoded.

    And the most that a row group has taken of a column in its file: of all, and of those that grew when decoded.
    """

    def __init__(self) -> None:
        self._row_bytes: dict[str, float] = {}
        self._stored: dict[str, int] = {}
        self._repeating: dict[str, int] = {}
        # The columns of the last table, which most tables have, and which of them have no fixed width.
        self._variable: tuple[pa.Schema, list[str]] = (pa.schema([]), [])

    def knows(self, columns: Iterable[str]) -> bool:
        """Whether some rows of all these columns were decoded."""
        return all(name in self._row_bytes for name in columns)

    def expected(self, column: str) -> float:
        """Return the bytes to expect of a row in a column; 0 where none was decoded."""
        return self._row_bytes.get(column, 0)

    def learn(self, table: pa.Table) -> None:
        """Learn from decoded rows. Of two threads at once one may be ignored, which the next rows make up for."""
        schema, names = self._variable
        if not table.schema.equals(schema):
            names = [column.name for column in table.schema if not width(column.type) or is_encoded_bytes(column.type)]
            self._variable = table.schema, names
        for name in names if len(table) else ():
            self._row_bytes[name] = max(self._row_bytes.get(name, 0), row_bytes(table[name]))

    def learn_stored(self, column: str, stored: int, decoded: float) -> None:
        """Learn what a row group that was decoded takes of a column in its file, and took in memory, in bytes."""
        self._stored[column] = max(self._stored.get(column, 0), stored)
        if GROWTH * stored < decoded:
            self._repeating[column] = max(self._repeating.get(column, 0), stored)

    def are_as_before(self, column: str, rows: int, stored: int) -> bool:
        """Whether so many rows, which take so many bytes of a file, will be about as large as those that were decoded.

        Only their size in the file is known. If that is far less than they were expected to take in memory, rows repeat
        the few values of a dictionary, and larger values would make all rows larger. Then it is compared with that of
        such row groups alone.
        """
        expected = rows * self.expected(column)
        seen = self._repeating if GROWTH * stored < expected else self._stored
        return stored <= GROWTH * min(expected, seen.get(column, 0))


class CurrentReads:
    """Which row groups the threads of a process read at this moment, or read last, for messages about the process.

    Args:
        publish: Called with what messages say of it, each time that it changes.
    """

    def __init__(self, publish: Callable[[str], None]) -> None:
        self._publish = publish
        self._names: list[str] = []
        self._lock = threading.Lock()

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Say that a row group is read."""
        with self._lock:
            self._names.append(name)
            self._publish(f"reading: {', '.join(self._names)}")
        try:
            yield
        finally:
            with self._lock:
                self._names.remove(name)
                self._publish(f"reading: {', '.join(self._names)}" if self._names else f"last read: {name}")


@dataclass(frozen=True, slots=True)
class ReadCache:
    """What the readers of one dataset share in a process. A worker has current reads, for the training process.

    The sources of a mixture have caches of their own.
    """

    footers: FooterStore
    sizes: SizeEstimates
    reads: CurrentReads | None = None
    of_sources: Mapping[str, ReadCache] = field(default_factory=dict)

    def of_source(self, source: str | None) -> ReadCache:
        """Return the cache of a source of a mixture; this one for a single dataset."""
        return self if source is None else replace(self.of_sources[source], reads=self.reads)

    @classmethod
    def of_opened(cls, footers: Mapping[str, bytes]) -> ReadCache:
        """Return the cache of a dataset of which nothing was read but these footers, by path."""
        return cls(FooterStore(footers), SizeEstimates())

    def without_footers(self) -> ReadCache:
        """Return the cache for a process that gets footers with its assignments."""
        if self.of_sources:  # footers of sources travel with them
            return replace(self, reads=None)
        return ReadCache(FooterStore({}), self.sizes)
