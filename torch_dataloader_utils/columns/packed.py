"""Documents become sequences of one length: tokens are copied where `planning.packing` has decided that they go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from torch_dataloader_utils.columns.arrow_memory import new_array
from torch_dataloader_utils.columns.dense import dense_array
from torch_dataloader_utils.columns.options import Packing
from torch_dataloader_utils.columns.ragged import Ragged, Values, split_values

PADDING_ID = -1
"""The document id of padding."""

SHORT_RUN = 64
"""Runs that have fewer values than this, on average, are looked up value by value."""

RUNS_TOGETHER = 4_096
"""The indices of so many runs are made at once, which bounds their memory."""

Numbers: TypeAlias = npt.NDArray[np.int64]


class Pieces(Protocol):
    """The pieces of documents that sequences are made of: see `planning.packing`."""

    @property
    def documents(self) -> Numbers:
        """Index of each piece's document."""

    @property
    def firsts(self) -> Numbers:
        """Number of the document's tokens before each piece."""

    @property
    def lengths(self) -> Numbers:
        """Tokens of each piece."""

    @property
    def bounds(self) -> Numbers:
        """Where the pieces of each sequence begin, and where those of the last one end."""

    @property
    def sequences(self) -> int:
        """Number of sequences."""


def document_lengths(tokens: Ragged, packing: Packing) -> Numbers:
    """Return the tokens of each document; a separator is the last one of its document."""
    lengths: Numbers = np.diff(tokens.offsets)
    return lengths + (packing.separator is not None)


def packed(columns: Mapping[str, Ragged], pieces: Pieces, packing: Packing) -> dict[str, Any]:
    """Return the sequences that pieces of documents make.

    Returns:
        The packed columns, arrays of shape ``(sequences, length)`` in their dtypes, and the outputs asked for:
        ``document_ids`` and ``position_ids``, int32 of the same shape, and the lengths of each sequence's segments,
        of which batches make ``cu_seqlens`` and ``max_seqlen``.
    """
    length, sequences = packing.length, pieces.sequences
    of_sequences = np.repeat(np.arange(sequences), np.diff(pieces.bounds))
    used = np.bincount(of_sequences, weights=pieces.lengths, minlength=sequences).astype(np.int64)
    columns = dict(columns)
    tensors = isinstance(columns[packing.column].values, torch.Tensor)
    made: dict[str, Any] = {}
    for name in list(columns):
        made[name] = _sequences(columns.pop(name), pieces, used, packing, name)
    segments, bounds = _with_padding(pieces.lengths, pieces.bounds, length - used)
    if "document_ids" in packing.outputs:
        made["document_ids"] = _document_ids(segments, bounds, used, length)
    if "position_ids" in packing.outputs:
        made["position_ids"] = _position_ids(segments, sequences, length)
    for name, column in (("cu_seqlens", Segments), ("max_seqlen", LongestSegments)):
        if name in packing.outputs:
            lengths = segments.astype(np.int32)
            made[name] = column(torch.from_numpy(lengths) if tensors else lengths, bounds, "jagged")
    return made


def _sequences(column: Ragged, pieces: Pieces, used: Numbers, packing: Packing, name: str) -> npt.NDArray[Any]:
    """Return the values of a column as sequences of one length, padded at their ends."""
    missing = packing.length - used
    padded = np.flatnonzero(missing)
    missing = missing[padded]
    # The padding of all sequences, one after the other, each from where its sequence's tokens end.
    begins = padded * packing.length + used[padded] - (np.cumsum(missing) - missing)
    padding = np.repeat(begins, missing) + np.arange(missing.sum())
    before = np.zeros(pieces.sequences, np.int64)  # padding before each sequence
    before[padded] = missing
    before = np.cumsum(before) - before
    stops = np.cumsum(pieces.lengths) + np.repeat(before, np.diff(pieces.bounds))
    values = _laid_out(column, pieces, packing.separator_of(name), stops, (padding, packing.pad_value_of(name)))
    return values.reshape(pieces.sequences, packing.length)


def joined_pieces(column: Ragged, pieces: Pieces, separator: int | None) -> npt.NDArray[Any]:
    """Return the values of a column's pieces, one after the other, with a separator at the end of each document."""
    return _laid_out(column, pieces, separator, np.cumsum(pieces.lengths))


def _laid_out(
    column: Ragged,
    pieces: Pieces,
    separator: int | None,
    stops: Numbers,
    padding: tuple[Numbers, int] = (np.empty(0, np.int64), 0),
) -> npt.NDArray[Any]:
    """Return each piece so that it ends at its stop, with its document's separator, and padding between them.

    Args:
        column: The documents, without separators.
        pieces: What to take of them, in the order in which they are laid out.
        separator: The last value of each document, which `pieces` count; None if they have none.
        stops: Where each piece ends.
        padding: The places that no piece takes, and their value.
    """
    lengths = pieces.lengths
    separators = np.empty(0, np.int64)
    if separator is not None:
        ends = pieces.firsts + lengths > np.diff(column.offsets)[pieces.documents]
        lengths = lengths - ends
        separators = stops[ends] - 1
    values = _taken(column, pieces.documents, pieces.firsts, lengths)
    total = len(values) + len(separators) + len(padding[0])
    if len(values) == total:
        return values
    made = new_array((total,), values.dtype)
    is_value = np.ones(total, np.bool_)
    for places, value in ((separators, separator or 0), padding):
        is_value[places] = False
        made[places] = value
    made[is_value] = values
    return made


def _taken(column: Ragged, documents: Numbers, firsts: Numbers, lengths: Numbers) -> npt.NDArray[Any]:
    """Return values of documents, one piece after the other: a view where they are so in the column."""
    values = np.asarray(column.values)
    starts = column.offsets[documents] - column.offsets[0] + firsts
    if (starts[1:] != starts[:-1] + lengths[:-1]).any():
        return _gathered(values, starts, lengths)
    first = int(starts[0]) if len(starts) else 0
    return values[first : first + int(lengths.sum())]


def _gathered(values: npt.NDArray[Any], starts: Numbers, lengths: Numbers) -> npt.NDArray[Any]:
    """Return runs of values, one after the other.

    Arrow copies each run as a whole, but a run takes it as long as NumPy takes to look up more than a hundred values.
    """
    if lengths.sum() < SHORT_RUN * len(lengths):
        made: npt.NDArray[Any] = new_array((int(lengths.sum()),), values.dtype)
        stop = 0
        for first in range(0, len(starts), RUNS_TOGETHER):
            runs = slice(first, first + RUNS_TOGETHER)
            places = _places(starts[runs], lengths[runs])
            begin, stop = stop, stop + len(places)
            values.take(places, out=made[begin:stop], mode="clip")
        return made
    views = pa.LargeListViewArray.from_arrays(pa.array(starts), pa.array(lengths), pa.array(values))
    return dense_array(views.flatten(), numpy_times=False).view(values.dtype)


def _places(starts: Numbers, lengths: Numbers) -> Numbers:
    """Return the indices of runs of values, one after the other."""
    places: Numbers = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    places += np.arange(len(places))
    return places


def _with_padding(lengths: Numbers, bounds: Numbers, missing: Numbers) -> tuple[Numbers, Numbers]:
    """Return the lengths of the segments of each sequence, and where each begins: its pieces, and its padding."""
    padded = missing > 0
    segments = np.insert(lengths, bounds[1:][padded], missing[padded])
    return segments, bounds + np.concatenate([[0], np.cumsum(padded)])


def _document_ids(segments: Numbers, bounds: Numbers, used: Numbers, length: int) -> npt.NDArray[np.int32]:
    """Return for each token the number of its piece in its sequence, and -1 for padding."""
    numbers = np.arange(len(segments)) - np.repeat(bounds[:-1], np.diff(bounds))
    numbers[bounds[1:][used < length] - 1] = PADDING_ID
    return np.repeat(numbers.astype(np.int32), segments).reshape(-1, length)


def _position_ids(segments: Numbers, sequences: int, length: int) -> npt.NDArray[np.int32]:
    """Return for each token how many of its segment come before it."""
    starts = np.cumsum(segments) - segments
    positions = np.arange(sequences * length, dtype=np.int32)
    positions -= np.repeat(starts.astype(np.int32), segments)
    return positions.reshape(sequences, length)


@dataclass(frozen=True, slots=True)
class Segments(Ragged):
    """The lengths of each sequence's segments, int32. A batch of them is ``cu_seqlens``."""

    def batches(self, sizes: Sequence[int]) -> Iterator[Values]:
        """Yield where the segments of each batch begin, and where the last one ends."""
        yield from self.split(sizes)

    def split(self, sizes: Sequence[int]) -> SegmentBatches:  # type: ignore[override]
        """Return the same for all batches, whose memory is ready."""
        lengths, tensors = np.asarray(self.values), isinstance(self.values, torch.Tensor)
        stops = self.offsets[np.cumsum([0, *sizes])] - self.offsets[0]
        bounds = np.zeros(len(lengths) + len(sizes), np.int32)
        for number, (start, stop) in enumerate(zip(stops[:-1].tolist(), stops[1:].tolist(), strict=True)):
            np.cumsum(lengths[start:stop], out=bounds[start + number + 1 : stop + number + 1])
        return SegmentBatches(torch.from_numpy(bounds) if tensors else bounds, tuple((np.diff(stops) + 1).tolist()))


@dataclass(frozen=True, slots=True)
class SegmentBatches:
    """For each batch where its segments begin, and where the last one ends: int32, one batch after the other."""

    bounds: Values
    counts: tuple[int, ...]

    def __iter__(self) -> Iterator[Values]:
        return iter(split_values(self.bounds, self.counts))


@dataclass(frozen=True, slots=True)
class LongestSegments(Ragged):
    """The lengths of each sequence's segments. A batch of them is ``max_seqlen``, the longest one."""

    def batches(self, sizes: Sequence[int]) -> Iterator[int]:
        """Yield the longest segment of each batch."""
        yield from self.split(sizes)

    def split(self, sizes: Sequence[int]) -> list[int]:  # type: ignore[override]
        """Return the same."""
        lengths, stops = np.asarray(self.values), list(accumulate(sizes, initial=0))
        ends = (self.offsets[stops] - self.offsets[0]).tolist()
        return [int(lengths[start:stop].max(initial=0)) for start, stop in pairwise(ends)]
