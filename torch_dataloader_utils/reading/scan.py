"""Reads the slices of a stream: what both kinds of scan share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from torch_dataloader_utils.columns.convert import list_lengths, without_column
from torch_dataloader_utils.columns.options import Packing
from torch_dataloader_utils.columns.transform import ColumnTransform
from torch_dataloader_utils.errors import ColumnError, TransformError
from torch_dataloader_utils.planning.plan import TO_THE_END, ShardSlice
from torch_dataloader_utils.planning.token_budget import UNKNOWN_BATCHES, TokenBudget
from torch_dataloader_utils.planning.token_counts import TokenCounts
from torch_dataloader_utils.reading.batching import Chunk
from torch_dataloader_utils.reading.memory_budget import MemoryBudget
from torch_dataloader_utils.reading.row_groups.file_row_group import FileRowGroup
from torch_dataloader_utils.reading.row_groups.reader import RowGroupReader
from torch_dataloader_utils.reading.row_groups.selection import REMOVED_COLUMN
from torch_dataloader_utils.reading.work import Counters, Work


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How rows become batches.

    Attributes:
        batch_size: Rows in a batch; only a stream's last batch has fewer. It has no meaning with `batching`.
        drop_last: Whether a stream's short last batch is left out.
        transform: What is delivered of the columns that are read.
        row_id_column: Name of the added row id column, or None.
        row_shuffle_seed: Seed of the permutation inside shards, or None where rows keep their order.
        read_ahead_bytes: Decoded bytes that a stream holds at most; with row-level shuffle a shard may have more.
        fingerprint: Whether each batch gets the hash of its rows: which rows of which files they are.
        packing: How rows become sequences, which batches then count; None where they do not.
        batching: How many tokens a batch has; None where batches have `batch_size` rows.
    """

    batch_size: int
    drop_last: bool
    transform: ColumnTransform
    row_id_column: str | None
    row_shuffle_seed: int | None
    read_ahead_bytes: int
    fingerprint: bool
    packing: Packing | None = None
    batching: TokenBudget | None = None

    @property
    def unknown_batches(self) -> str | None:
        """Why it is unknown how many batches rows make; None where it is known."""
        return None if self.batching is None else UNKNOWN_BATCHES


class Scan(ABC):
    """Reads the slices of a stream in order, as chunks, within the budget for what is read and not yet delivered."""

    def __init__(
        self, reader: RowGroupReader, slices: Sequence[ShardSlice], options: ReadOptions, budget: MemoryBudget
    ) -> None:
        self.reader = reader
        self.slices = slices
        self.options = options
        self.budget = budget
        self._counters = Counters()
        self._read: dict[FileRowGroup, tuple[int, int]] = {}

    @abstractmethod
    def chunks(self) -> Generator[Chunk, None, None]:
        """Yield the rows of every slice. The last chunk of each slice says so, even if it holds no rows."""

    def close(self) -> None:
        """Free what the scan needs, and close the reader."""
        self.reader.close()

    def take_work(self) -> Work:
        """Return what was read, and waited for, since the last call."""
        counters, self._counters = self._counters, Counters()
        return Work(counters, self.reader.take_waits())

    def row_groups(self, position: int) -> list[FileRowGroup]:
        """Return the row groups of a slice's shard that can be read; let the reader prepare for them and the next."""
        for shard_slice in self.slices[position : position + 2]:
            self.reader.expect(shard_slice.shard.present)
        return [group for split in self.slices[position].shard.present for group in self.reader.row_groups(split)]

    def count(self, group: FileRowGroup, *, again: bool) -> None:
        """Count a row group that is read, its stored bytes, and whether it is read again after a resume."""
        size = self.reader.sizes.stored_bytes(group)
        self._counters.row_groups_read += group.count
        self._counters.bytes_read += size
        if again:
            self._counters.row_groups_read_again += group.count
            self._counters.bytes_read_again += size

    def require_rows(self, shard_slice: ShardSlice, rows: int) -> None:
        """Raise a TransformError if a shard that was read to its end makes fewer rows than were delivered of it."""
        known = shard_slice.start if shard_slice.stop == TO_THE_END else shard_slice.stop
        if not self.reader.makes_rows or rows >= known:
            return
        first = shard_slice.shard.splits[0]
        msg = (
            f"transform: it makes {rows} rows of the shard that begins with row {first.row_offset} of {first.path}, of "
        )
        msg += (
            f"which the loaded state records {known}: it has to make the same rows of the same table each time. Begin "
        )
        raise TransformError(f"{msg}the epoch again, without the state")

    def delivered(self, group: FileRowGroup, table: pa.Table, first: int | None = None) -> pa.Table:
        """Return rows of a row group as they are delivered, or raise a ColumnError that names the row group.

        `first` is the number of the first of them in the row group if no row was left out; None if that is not known.
        """
        batching = self.options.batching
        try:
            delivered = self.options.transform.apply(table)
            if batching is not None and batching.oversized == "error":
                self._require_fitting(batching, group, delivered, first)
            if self.reader.tokens is not None:
                self._require_counted(self.reader.tokens, group, delivered)
        except ColumnError as error:
            raise ColumnError(f"{error} ({self.reader.name(group)})") from None
        return delivered

    def _require_counted(self, tokens: TokenCounts, group: FileRowGroup, table: pa.Table) -> None:
        """Raise a ColumnError once a row group is read to its end, if it has other tokens than were counted ahead."""
        rows, read = self._read.pop(group, (0, 0))
        rows, read = rows + table.num_rows, read + int(list_lengths(table, tokens.column).sum())
        if rows < group.rows:
            self._read[group] = rows, read
            return
        counted = tokens.sums[group.path][group.number]
        if read != counted:
            source = "its statistics, or an earlier reading, tell"
            if tokens.length_column is not None:
                source = f"column {tokens.length_column!r} tells"
            msg = f"column {tokens.column!r} has {read} tokens, and {source} {counted}: the counts of sequences would "
            raise ColumnError(f"{msg}be wrong; open the dataset without count_tokens")

    def _require_fitting(self, batching: TokenBudget, group: FileRowGroup, table: pa.Table, first: int | None) -> None:
        """Raise a ColumnError if a row has more tokens than a batch may have. Rows that batches lose do not count."""
        lengths = list_lengths(table, batching.column)
        if REMOVED_COLUMN in table.column_names:
            lengths = np.where(without_column(table, REMOVED_COLUMN)[1], 0, lengths)
        if lengths.max(initial=0) <= batching.tokens:
            return
        row = int(np.argmax(lengths > batching.tokens))
        place = ""
        if first is not None and self.reader.has_all_rows(group):
            place = f" in row {group.first_unfiltered + first + row} of the file"
        elif self.options.row_id_column is not None:
            name = self.options.row_id_column
            place = f" in the row whose {name!r} is {table[name][row].as_py()}"
        msg = f"column {batching.column!r} holds a list of {lengths[row]} values{place}, more than TokenBudget(tokens="
        msg += f"{batching.tokens}) allows in a batch: raise tokens, let such rows have batches of their own with "
        raise ColumnError(f"{msg}oversized='alone', or leave them out by filters or exclude")
