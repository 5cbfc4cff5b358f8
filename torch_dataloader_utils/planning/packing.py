"""Which tokens of which documents make each sequence of a fixed length. Pure.

A packer gets the number of tokens of each document, in the order of delivery, and returns the pieces of documents that
the sequences are made of. It is a function of these numbers alone, so that a resume makes the same sequences again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

Numbers: TypeAlias = npt.NDArray[np.int64]

Strategy: TypeAlias = Literal["concat", "best_fit"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)

WINDOW_DOCUMENTS = 1 << 16
"""Documents that are packed together by best fit. It is a part of the plan: another number makes other sequences."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of documents that sequences are made of, one sequence after the other.

    Attributes:
        documents: Index of each piece's document.
        firsts: Number of the document's tokens before the piece.
        lengths: Tokens of the piece, at least 1.
        bounds: Where the pieces of each sequence begin, and where those of the last one end: of shape (sequences + 1,).
        dropped: Tokens of documents that are in no sequence.
    """

    documents: Numbers
    firsts: Numbers
    lengths: Numbers
    bounds: Numbers
    dropped: int = 0

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return len(self.bounds) - 1

    def between(self, start: int, stop: int) -> Pieces:
        """Return consecutive sequences, from the first given to before the last given."""
        bounds = self.bounds[start : stop + 1]
        some = slice(int(bounds[0]), int(bounds[-1]))
        return Pieces(self.documents[some], self.firsts[some], self.lengths[some], bounds - bounds[0], self.dropped)

    def taken(self, order: Numbers) -> Pieces:
        """Return some of the sequences, in the order given."""
        counts = np.diff(self.bounds)[order]
        bounds = np.concatenate([[0], np.cumsum(counts)])
        places = np.arange(bounds[-1]) + np.repeat(self.bounds[:-1][order] - bounds[:-1], counts)
        return Pieces(self.documents[places], self.firsts[places], self.lengths[places], bounds, self.dropped)


def pack(lengths: Numbers, *, length: int, strategy: Strategy, split_documents: bool) -> Pieces:
    """Return the pieces of documents that make sequences of at most `length` tokens.

    Args:
        lengths: The tokens of each document, in the order of delivery. Documents without tokens are in no sequence.
        length: Tokens of a sequence.
        strategy: ``"concat"`` takes the documents in order, ``"best_fit"`` first those that are longest.
        split_documents: Whether documents may be cut. ``"concat"`` cuts them wherever a sequence ends, ``"best_fit"``
            only those that are longer than a sequence. If not, those are dropped.
    """
    if strategy == "concat" and split_documents:
        return _cut(lengths, length)
    documents, firsts, parts = _whole_or_split(lengths, length, split_documents=split_documents)
    dropped = int(lengths.sum() - parts.sum())
    if strategy == "concat":
        bounds = _in_order(parts, length)
        return Pieces(documents, firsts, parts, bounds, dropped)
    edges = np.searchsorted(documents, np.arange(0, len(lengths) + WINDOW_DOCUMENTS, WINDOW_DOCUMENTS))
    orders, counts = [np.empty(0, dtype=np.int64)], [np.zeros(1, dtype=np.int64)]
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        order, sizes = _best_fit(parts[begin:end], length)
        orders.append(order + begin)
        counts.append(sizes)
    order = np.concatenate(orders)
    return Pieces(documents[order], firsts[order], parts[order], np.cumsum(np.concatenate(counts)), dropped)


def _cut(lengths: Numbers, length: int) -> Pieces:
    """Return the pieces of documents that are laid end to end and cut at every multiple of the length."""
    present = np.flatnonzero(lengths)
    ends = np.cumsum(lengths[present])
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.arange(length, total, length)
    places = np.searchsorted(ends, cuts)
    places, cuts = places[ends[places] != cuts], cuts[ends[places] != cuts]  # where no document ends anyway
    stops = np.insert(ends, places, cuts)
    starts = np.concatenate([np.zeros(min(1, total), np.int64), stops[:-1]])
    documents = np.insert(np.arange(len(ends)), places, places)
    firsts = starts - (ends - lengths[present])[documents]
    bounds = np.searchsorted(starts, np.arange(-(-total // length) + 1) * length)
    return Pieces(present[documents], firsts, stops - starts, bounds)


def _whole_or_split(lengths: Numbers, length: int, *, split_documents: bool) -> tuple[Numbers, Numbers, Numbers]:
    """Return what fits into a sequence: whole documents, and the parts of longer ones, unless these are dropped."""
    counts = -(-lengths // length)
    if not split_documents:
        counts[counts > 1] = 0
    documents = np.repeat(np.arange(len(lengths)), counts)
    before = np.cumsum(counts) - counts
    firsts = (np.arange(len(documents)) - before[documents]) * length
    return documents, firsts, np.minimum(lengths[documents] - firsts, length)


def _in_order(parts: Numbers, length: int) -> Numbers:
    """Return where sequences begin if each takes the next parts as long as they fit."""
    ends = np.cumsum(parts)
    following = np.searchsorted(ends, ends - parts + length, side="right").tolist()
    bounds = [0]
    while bounds[-1] < len(following):
        bounds.append(following[bounds[-1]])
    return np.array(bounds, dtype=np.int64)


def _best_fit(parts: Numbers, length: int) -> tuple[Numbers, Numbers]:
    """Return the order of parts, sequence by sequence, and the number of parts of each sequence.

    Best-fit decreasing (Johnson, "Near-optimal bin packing algorithms", 1973): the longest part comes first, and each
    goes where it leaves the least space. Parts of one length go together: as many as fit into the fullest sequence that
    has room for one, for it stays the fullest as long as it has room, and then into the next.
    """
    falling = _stable_order(length - parts)
    sizes, counts = np.unique(parts, return_counts=True)
    room: dict[int, list[int]] = {}  # the sequences that have so many tokens left
    rooms: list[int] = []  # in rising order
    placed: list[int] = []  # the sequence of each part, in falling order
    made = 0
    for size, number in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        left = number
        while left:
            place = bisect_left(rooms, size)
            if place < len(rooms):
                space = rooms[place]
                each = min(space // size, left)
                among = room[space]
                fitting = among[-(left // each) :]
                if len(fitting) == len(among):
                    del rooms[place], room[space]
                else:
                    del among[-len(fitting) :]
            else:
                space, each = length, min(length // size, left)
                fitting = list(range(made, made + left // each))
                made += len(fitting)
            left -= each * len(fitting)
            placed += fitting if each == 1 else [sequence for sequence in fitting for _ in range(each)]
            rest = space - each * size
            if rest:
                if rest not in room:
                    insort(rooms, rest)
                    room[rest] = []
                room[rest] += fitting
    sequences = np.array(placed, dtype=np.int64)
    order = falling[_stable_order(sequences)]
    return order, np.bincount(sequences, minlength=made)


def _stable_order(numbers: Numbers) -> npt.NDArray[np.intp]:
    """Return the stable order of numbers that are not negative. NumPy sorts 16 bits by their digits: much faster."""
    is_short = numbers.max(initial=0) <= np.iinfo(np.uint16).max
    return np.argsort(numbers.astype(np.uint16) if is_short else numbers, kind="stable")
