"""The way through a stream's slices: row groups asked for ahead of need, as far as the budget allows, read in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from torch_dataloader_utils.columns.transform import ColumnTransform
from torch_dataloader_utils.errors import ColumnError
from torch_dataloader_utils.planning.plan import ShardSlice
from torch_dataloader_utils.reading.batching import BytesRead, Chunk
from torch_dataloader_utils.reading.read_ahead import MemoryBudget
from torch_dataloader_utils.reading.row_groups import RowGroupPlace, RowGroupReader

__all__ = ["ReadOptions", "Scan", "Step"]


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How rows become batches.

    Attributes:
        batch_size: Rows in a batch; only a stream's last batch has fewer.
        drop_last: Whether a stream's short last batch is left out.
        transform: What is delivered of the columns that are read.
        row_id_column: Name of the added row id column, or None.
        row_shuffle_seed: Seed of the permutation inside shards, or None where rows keep their order.
        read_ahead_bytes: Decoded bytes that a stream holds at most; a shard of mixed rows may have more.
    """

    batch_size: int
    drop_last: bool
    transform: ColumnTransform
    row_id_column: str | None
    row_shuffle_seed: int | None
    read_ahead_bytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """A row group in its turn; or all of a shard's, where they are read side by side.

    Attributes:
        position: Index of its slice in the stream's slices.
        shard_slice: The shard_slice.
        path: Its file.
        place: The row group.
        first: The shard's delivered rows before it, where no filter takes any.
        last: Whether the slice has none after it.
        number: Its place among the row groups that the slice's shard has.
        whole: Whether it is read as one table.
        size: Bytes to take budget for before it is asked for; parts of it take theirs as they are read.
        asks: Whether it is to be asked for.
    """

    position: int
    shard_slice: ShardSlice
    path: str
    place: RowGroupPlace
    first: int
    last: bool
    number: int
    whole: bool
    size: int
    asks: bool = True


class Scan(ABC):
    """Reads the slices of a stream in order, as chunks.

    Args:
        reader: Reads row groups.
        slices: What to read.
        options: How rows become batches.
        budget: How much may be read that is not delivered yet.
    """

    def __init__(
        self, reader: RowGroupReader, slices: Sequence[ShardSlice], options: ReadOptions, budget: MemoryBudget
    ) -> None:
        self.reader = reader
        self.slices = slices
        self.options = options
        self.budget = budget
        self._bytes_read = BytesRead()

    @abstractmethod
    def chunks(self) -> Iterator[Chunk]:
        """Yield the rows of every slice; the last chunk of each says so, also when it holds no rows."""

    def close(self) -> None:  # noqa: B027 - most need nothing
        """Let go of what was needed beside the reader."""

    def take_bytes_read(self) -> BytesRead:
        """Return what was read since the last call."""
        taken, self._bytes_read = self._bytes_read, BytesRead()
        return taken

    def row_groups(self, position: int) -> list[tuple[str, RowGroupPlace]]:
        """Return the row groups of a slice's shard that can be read; let the reader prepare for them and the next."""
        for shard_slice in self.slices[position : position + 2]:
            self.reader.expect(shard_slice.shard.present)
        shard_slice = self.slices[position]
        return [(split.path, place) for split in shard_slice.shard.present for place in self.reader.row_groups(split)]

    def asked_for(self, steps: Iterable[Step]) -> Iterator[Step]:
        """Yield row groups once they are asked for, and ask ahead for as many as there is budget for."""
        upcoming = iter(steps)
        waiting = next(upcoming, None)
        asked: deque[Step] = deque()
        while asked or waiting is not None:
            while waiting is not None and self._may_ask(waiting, asked):
                if not self.budget.take(waiting.size, wait=not asked):
                    break
                if waiting.asks:
                    self.reader.ask_for(waiting.path, waiting.place, whole=waiting.whole)
                asked.append(waiting)
                waiting = next(upcoming, None)
            yield asked.popleft()

    def _may_ask(self, step: Step, asked: Collection[Step]) -> bool:
        """Whether a row group may be asked for behind others, without the budget that the parts of a large one need."""
        if all(other.whole for other in asked):
            return len(asked) < self.reader.most_asked
        return not step.whole and len(asked) < 2  # noqa: PLR2004 - the one that is read, and the next

    def count(self, path: str, place: RowGroupPlace, *, again: bool) -> None:
        """Count the bytes of a row group that is read, and whether they are read again after a resume."""
        size = self.reader.stored_bytes(path, place)
        self._bytes_read.total += size
        self._bytes_read.again += size if again else 0

    def delivered(self, path: str, place: RowGroupPlace, table: pa.Table) -> pa.Table:
        """Return rows of a row group as they are delivered, or raise if they hold what cannot be."""
        try:
            return self.options.transform.apply(table)
        except ColumnError as error:
            msg = f"{error} (row group {place.number} of {self.reader.full_path(path)})"
            raise ColumnError(msg) from None
