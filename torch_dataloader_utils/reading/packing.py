"""The scan that packs: all rows of a shard become sequences, of which a slice delivers a window."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from torch_dataloader_utils.columns.convert import Columns, ColumnSlice, join, size_of
from torch_dataloader_utils.columns.options import Packing
from torch_dataloader_utils.columns.packed import document_lengths, packed
from torch_dataloader_utils.columns.ragged import Ragged
from torch_dataloader_utils.errors import ColumnError, UnreadableFileError
from torch_dataloader_utils.formats.row_packing import DROPPED_COLUMN, ENDED_COLUMN, SEGMENTS_COLUMN
from torch_dataloader_utils.planning.packing import Numbers, Pieces, pack
from torch_dataloader_utils.planning.plan import TO_THE_END, Shard, ShardSlice
from torch_dataloader_utils.planning.shuffle import permutation
from torch_dataloader_utils.reading.batching import Batches, Chunk, StreamEnd
from torch_dataloader_utils.reading.memory_budget import MemoryLease
from torch_dataloader_utils.reading.scan import Scan
from torch_dataloader_utils.reading.work import Work

BYTES_TOGETHER = 4 << 20
"""Bytes of sequences, and of what is delivered beside them, that are made at once."""

SEQUENCES = -1
"""Stands for a round in the key of the permutation of a shard's sequences: no round has this number."""


def unpacked(slices: Sequence[ShardSlice], *, knows_rows: bool) -> tuple[ShardSlice, ...]:
    """Return the slices to read in order to pack these: all rows of their shards, if it is known how many there are."""
    delivers = None if knows_rows else TO_THE_END
    return tuple(ShardSlice(replace(part.shard, delivers=delivers)) for part in slices)


def with_sequences(contents: Iterable[Batches | StreamEnd], packing: Packing) -> Iterator[Batches | StreamEnd]:
    """Yield batches of sequences, whose row groups were packed, in the form that is delivered."""
    for content in contents:
        yield _finished(content, packing) if isinstance(content, Batches) else content
        del content


def _finished(batches: Batches, packing: Packing) -> Batches:
    columns = dict(batches.columns)
    segments: Ragged = columns.pop(SEGMENTS_COLUMN)
    ended, dropped = (int(np.asarray(columns.pop(name)).sum()) for name in (ENDED_COLUMN, DROPPED_COLUMN))
    lengths, bounds = np.asarray(segments.values), segments.offsets - segments.offsets[0]
    sequences = len(segments)
    starts = np.cumsum(lengths) - lengths
    documents = np.repeat(np.arange(sequences), np.diff(bounds))
    pieces = Pieces(documents, starts - np.append(starts, 0)[bounds[:-1]][documents], lengths, bounds)
    tokens = int(lengths.sum())
    work = Work() if batches.work is None else batches.work
    work.counters.tokens_packed += tokens
    work.counters.tokens_padding += sequences * packing.length - tokens
    work.counters.tokens_separators += ended if packing.separator is not None else 0
    work.counters.tokens_dropped += dropped
    documents_of = {name: values for name, values in columns.items() if isinstance(values, Ragged)}
    others = {name: values for name, values in columns.items() if name not in documents_of}
    has_separators = replace(packing, separator=None)  # its documents have theirs already
    made = {**packed(documents_of, pieces, has_separators), **others}
    if batches.lease is not None:
        batches.lease.resize(max(size_of(made), batches.lease.size))
    return replace(batches, columns=made, work=work)


class PackedScan(Scan):
    """Yields the sequences of each slice. The scan reads the `unpacked` slices.

    A seed is there if rows are shuffled: then a shard's sequences come in an order that its key permutes, for best fit
    makes those of the longest documents first.
    """

    def __init__(
        self, scan: Scan, slices: Sequence[ShardSlice], packing: Packing, *, seed: int | None, epoch: int
    ) -> None:
        super().__init__(scan.reader, slices, scan.options, scan.budget)
        self._scan = scan
        self._packing = packing
        self._seed = seed
        self._epoch = epoch

    def close(self) -> None:
        """Free what the scan needs, and close the reader."""
        self._scan.close()

    def take_work(self) -> Work:
        """Return what was read, and waited for, since the last call."""
        work = super().take_work()
        work.add(self._scan.take_work())
        return work

    def chunks(self) -> Generator[Chunk, None, None]:
        """Yield the sequences of every slice. The last of a slice's chunks has the memory of all of them."""
        held: list[Columns] = []
        lease: MemoryLease | None = None
        for chunk in self._scan.chunks():
            held.append(chunk.columns)
            if chunk.lease is not None:
                if lease is None:
                    lease = chunk.lease
                else:
                    lease.merge(chunk.lease)
                lease.keep()  # the shard's other rows are read before these are delivered
            position, is_last = chunk.position, chunk.ends
            del chunk  # its rows are freed when they are packed
            if is_last:
                yield from self._packed_chunks(position, held, lease)
                lease = None

    def _packed_chunks(self, position: int, held: list[Columns], lease: MemoryLease | None) -> Iterator[Chunk]:
        """Yield the sequences of a slice, some at a time, so that they are made in the processor's cache.

        The list of what was read is emptied.
        """
        shard_slice = self.slices[position]
        pieces = self._pieces(shard_slice, held)
        documents = _Documents(held, self._packing.column, in_order=self._is_in_order)
        held.clear()
        size = 0 if lease is None else lease.size
        made = 0
        rows = self._rows_together(documents.columns)
        starts = range(0, max(pieces.sequences, 1), rows)
        for start in starts:
            stop = min(start + rows, pieces.sequences)
            columns = packed(*documents.of(pieces.between(start, stop)), self._packing)
            is_last = start == starts[-1]
            if is_last:
                documents.columns.clear()
            if lease is not None:
                made += size_of(columns)
                lease.resize(made if is_last else size + made)
            first = shard_slice.start + start
            yield Chunk(position, first, stop - start, is_last, columns, lease if is_last else None)
            del columns

    @property
    def _is_in_order(self) -> bool:
        """Whether sequences have the documents in the order in which they are read."""
        return self._packing.strategy == "concat" and self._seed is None

    def _rows_together(self, held: Sequence[Columns]) -> int:
        """Return how many sequences are made at once: whole batches of some megabytes."""
        ids = {"document_ids", "position_ids"} & set(self._packing.outputs)
        bytes_each = 4 * len(ids) + sum(np.asarray(values.values).itemsize for values in held[0].values())
        batch_size = self.options.batch_size
        return max(BYTES_TOGETHER // (self._packing.length * bytes_each) // batch_size, 1) * batch_size

    def _pieces(self, shard_slice: ShardSlice, held: Sequence[Columns]) -> Pieces:
        """Return what the sequences of a slice are made of, and count their tokens."""
        packing = self._packing
        for part in held:
            for name, values in part.items():
                if not np.array_equal(np.diff(values.offsets), np.diff(part[packing.column].offsets)):
                    msg = f"column {name!r} has lists of other lengths than {packing.column!r}, with which it is packed"
                    raise ColumnError(f"{msg} ({_named(shard_slice.shard)})")
        lengths = np.concatenate([document_lengths(part[packing.column], packing) for part in held])
        pieces = pack(
            lengths, length=packing.length, strategy=packing.strategy, split_documents=packing.split_documents
        )
        counted = shard_slice.shard.delivers
        if counted not in (None, TO_THE_END, pieces.sequences):
            msg = f"{_named(shard_slice.shard)} gives {pieces.sequences} sequences, and by the tokens counted ahead "
            raise ColumnError(f"{msg}{counted}: {self._source()} does not tell the tokens of each document")
        if pieces.sequences < shard_slice.start:
            msg = f"{_named(shard_slice.shard)} gave {shard_slice.start} sequences before, and now {pieces.sequences}: "
            raise UnreadableFileError(f"{msg}its rows, or what a transform makes of them, have changed")
        stop = min(shard_slice.stop, pieces.sequences)
        taken = pieces.taken(self._order(shard_slice.shard, pieces)[shard_slice.start : stop])
        self._count_tokens(taken, lengths)
        if not shard_slice.start:  # a resume in the middle of the shard does not count them again
            self._counters.tokens_dropped += pieces.dropped
        return taken

    def _count_tokens(self, pieces: Pieces, lengths: Numbers) -> None:
        """Count the tokens of sequences. `lengths` are the tokens of each document."""
        tokens = int(pieces.lengths.sum())
        self._counters.tokens_packed += tokens
        self._counters.tokens_padding += pieces.sequences * self._packing.length - tokens
        if self._packing.separator is not None:
            ends = pieces.firsts + pieces.lengths == lengths[pieces.documents]
            self._counters.tokens_separators += int(ends.sum())

    def _source(self) -> str:
        tokens = self.reader.tokens
        column = None if tokens is None else tokens.length_column
        return f"column {self._packing.column!r} has changed, so that it" if column is None else f"column {column!r}"

    def _order(self, shard: Shard, pieces: Pieces) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
        if self._seed is None:
            return np.arange(pieces.sequences)
        return permutation(pieces.sequences, seed=self._seed, epoch=self._epoch, shard=shard, number=SEQUENCES)


class _Documents:
    """The documents of a slice, as they were read.

    Where sequences have them in order, those that are packed together are views, mostly, of what was read; else the
    documents of all sequences are joined once.
    """

    def __init__(self, held: Sequence[Columns], column: str, *, in_order: bool) -> None:
        self.columns = list(held)
        self._in_order = in_order
        counts = [len(part[column]) for part in held]
        if not in_order and len(held) > 1:
            self.columns = [join([ColumnSlice(part, 0, count) for part, count in zip(held, counts, strict=True)])]
        self._stops = np.cumsum(counts)

    def of(self, pieces: Pieces) -> tuple[Columns, Pieces]:
        """Return columns that have the documents of some pieces, and the pieces of these columns."""
        if not self._in_order or not len(pieces.documents):
            return self.columns[0], pieces
        first, last = int(pieces.documents[0]), int(pieces.documents[-1])
        begin, end = np.searchsorted(self._stops, [first, last], side="right").tolist()
        slices = []
        for number in range(begin, end + 1):
            before = int(self._stops[number - 1]) if number else 0
            stop = min(last + 1, int(self._stops[number]))
            slices.append(ColumnSlice(self.columns[number], max(first - before, 0), stop - before))
        return join(slices), replace(pieces, documents=pieces.documents - first)


def _named(shard: Shard) -> str:
    first, last = shard.splits[0], shard.splits[-1]
    rows = f"rows {first.row_offset} to {first.row_offset + first.row_length} of {first.path}"
    return rows if first is last else f"{rows} and {len(shard.splits) - 1} more ranges, the last of {last.path}"
