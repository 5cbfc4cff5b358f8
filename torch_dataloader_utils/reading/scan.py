"""The order in which a stream's row groups are requested and read: what both kinds of scan share.

A row group is requested before it is read: its bytes are then fetched, and decoded in another thread. How many are
requested ahead is bounded by the memory budget.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

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
from torch_dataloader_utils.reading.file_row_group import FileRowGroup
from torch_dataloader_utils.reading.memory_budget import MemoryBudget, MemoryLease
from torch_dataloader_utils.reading.row_groups import RowGroupReader
from torch_dataloader_utils.reading.row_selection import REMOVED_COLUMN
from torch_dataloader_utils.reading.work import Counters, Work
from torch_dataloader_utils.storage.request_size import RequestSize

TOO_LONG = 2
"""How many times as long as it should be a request has to be for the rest of it to be requested again."""

MOST_IN_PARTS = 2
"""Row groups that are read in parts and requested at once: the one that is read, and the next."""


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


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a scan: a row group, or all row groups of a shard that is shuffled in rounds.

    Attributes:
        position: Index of its slice in the stream's slices.
        shard_slice: The slice.
        group: The row group; of a shard in rounds the first.
        first: The shard's delivered rows before it, if no filter removes any.
        last: Whether it is the slice's last.
        number: Its index among the row groups of the slice's shard.
        whole: Whether it is read as one table.
        size: Bytes to lease before it is requested. A row group that is read in parts takes a lease for each part.
        requested: Whether it is requested ahead. Rounds request their parts themselves.
        continues: Whether its shard is read together with the next one.
        following: The slices behind this one that it has all rows of, after those of this slice.
    """

    position: int
    shard_slice: ShardSlice
    group: FileRowGroup
    first: int
    last: bool
    number: int
    whole: bool
    size: int
    requested: bool = True
    continues: bool = False
    following: tuple[ShardSlice, ...] = ()


@dataclass(slots=True)
class _Run:
    """Steps that one request is for.

    Attributes:
        waiting: Those that are not requested yet.
        steps: How many they are, with those that are requested.
        stored_bytes: What is stored of all of them.
        requested_bytes: What is stored of those that are requested.
        is_guess: Whether no answer had told how long requests should be: it may be too long, and is cut then.
        is_prepared: Whether its request was made before the first of them is requested.
    """

    waiting: deque[Step] = field(default_factory=deque)
    steps: int = 0
    stored_bytes: int = 0
    requested_bytes: int = 0
    is_guess: bool = False
    is_prepared: bool = False


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

    def requested(self, steps: Iterable[Step]) -> Iterator[tuple[Step, MemoryLease]]:
        """Yield each step with its lease once it is requested; request as many ahead as the budget allows.

        Only the next step waits for memory. Those behind it are requested if their lease is granted at once: what is
        delivered releases memory for them, and the next step has to be read first. Consecutive row groups that come
        faster by one request are received one after another, each once there is memory for it. The next such request
        is made when half of them are requested, so that its answer begins while the others are received.
        """
        runs = self._runs(steps)
        run, following = next(runs, _Run()), None
        ahead: deque[tuple[Step, MemoryLease]] = deque()
        while ahead or run.waiting:
            while run.waiting and self._may_request(run.waiting[0], [step for step, _ in ahead]):
                step = run.waiting[0]
                size = self.reader.request_size
                if run.is_guess and size is not None and self._reaches(size, run):
                    is_received = self.reader.receives(step.group)
                    if is_received and ahead and not size.is_known:
                        break  # what is received first tells how long requests should be
                    run.is_guess = False
                    if is_received and run.stored_bytes > TOO_LONG * size.bytes:
                        self.reader.cut(step.group)
                        runs = chain(self._runs(run.waiting), [] if following is None else [following], runs)
                        run, following = next(runs), None
                lease = self.budget.try_take(step.size) if ahead else self.budget.take(step.size)
                if lease is None:
                    break
                run.waiting.popleft()
                run.requested_bytes += self.reader.stored_bytes(step.group)
                if step.requested:
                    self.reader.request(step.group, [later.group for later in run.waiting], whole=step.whole)
                    self.prepare_for(step)
                ahead.append((step, lease))
                if following is None and 2 * len(run.waiting) <= run.steps:
                    following = next(runs, _Run())
                    self._prepare(following)
                if following is not None and not run.waiting:
                    run, following = following, None
            yield ahead.popleft()

    def prepare_for(self, step: Step) -> None:  # noqa: B027 - only shuffled rows have something to prepare
        """Begin what can be done for a step that was requested while it is decoded."""

    def _prepare(self, run: _Run) -> None:
        """Let the answer begin that several row groups are received from, unless it was."""
        if len(run.waiting) > 1 and not run.is_prepared:
            run.is_prepared = True
            self.reader.prepare([step.group for step in run.waiting])

    def _runs(self, steps: Iterable[Step]) -> Iterator[_Run]:
        """Yield the steps in runs, each of which one request is for."""
        run = _Run()
        for step in steps:
            stored = self.reader.stored_bytes(step.group)
            if run.waiting and not self._may_join(run, step, stored):
                yield run
                run = _Run()
            size = self.reader.request_size
            run.is_guess = size is not None and not size.is_known
            run.waiting.append(step)
            run.steps += 1
            run.stored_bytes += stored
            if size is None or not step.whole:  # it has its own: the next step is made when more is known of sizes
                yield run
                run = _Run()
        if run.waiting:
            yield run

    def _reaches(self, size: RequestSize, run: _Run) -> bool:
        """Whether as much was requested of a run as one request should be for."""
        following = self.reader.stored_bytes(run.waiting[0].group)
        return run.requested_bytes > 0 and run.requested_bytes + following > size.bytes

    def _may_join(self, run: _Run, step: Step, stored: int) -> bool:
        """Whether a step may be received by the request of those before it."""
        size, last, added = self.reader.request_size, run.waiting[-1].group, step.group
        return (
            size is not None
            and last.is_followed_by(added)
            and step.whole
            and run.stored_bytes + stored <= size.most_bytes
        )

    def _may_request(self, step: Step, ahead: Collection[Step]) -> bool:
        """Whether a step may be requested behind others without using memory that the parts of a large one need."""
        if all(other.whole for other in ahead):
            return len(ahead) < self.reader.most_requested(step.group)
        return not step.whole and len(ahead) < MOST_IN_PARTS

    def count(self, group: FileRowGroup, *, again: bool) -> None:
        """Count a row group that is read, its stored bytes, and whether it is read again after a resume."""
        size = self.reader.stored_bytes(group)
        self._counters.row_groups_read += group.count
        self._counters.bytes_read += size
        if again:
            self._counters.row_groups_read_again += 1
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
