"""Streams of different lengths to ranks that make the same steps. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle

from torch_dataloader_utils.planning.plan import Evened, Piece

__all__ = ["even"]


def even(ranks: Sequence[Sequence[Sequence[Piece]]], batch_size: int, *, pad: bool) -> Evened:
    """ColumnSlice streams, and put what is cut off behind others, so that every rank makes the same steps.

    All ranks get the same number of rows. Step t of a rank comes from its worker t modulo workers, and all steps but
    the last have a full batch; so each worker's number of rows is known. Streams keep the beginning of what they have.

    Args:
        ranks: For each rank and worker what it would walk.
        batch_size: Rows of a step.
        pad: Whether rows of the epoch's beginning are repeated for ranks that would have one row less than others; if
            not, the rows that others have more are left out.

    Returns:
        The streams, and what was dropped or repeated.
    """
    num_ranks = len(ranks)
    total = sum(piece.rows for streams in ranks for stream in streams for piece in stream)
    rows = -(-total // num_ranks) if pad else total // num_ranks
    wanted = [_rows_of_worker(rows, batch_size, worker, len(ranks[0])) for worker in range(len(ranks[0]))]
    loose: deque[Piece] = deque()
    kept = [[_keep(stream, count, loose) for stream, count in zip(streams, wanted, strict=True)] for streams in ranks]
    everything = [piece for streams in ranks for stream in streams for piece in stream]
    missing = num_ranks * rows - total
    repeats = deque(_first_rows(everything, missing) if missing > 0 else ())
    repeated = tuple(repeats)
    for streams in kept:
        for stream, count in zip(streams, wanted, strict=True):
            short = count - sum(piece.rows for piece in stream)
            short = _fill(stream, short, loose)
            _fill(stream, short, repeats)
    evened = tuple(tuple(map(tuple, streams)) for streams in kept)
    return Evened(evened, dropped=tuple(loose), repeated=repeated)


def _rows_of_worker(rows: int, batch_size: int, worker: int, workers: int) -> int:
    """Return how many of a rank's rows are in the steps of one of its workers."""
    full, rest = divmod(rows, batch_size)
    own = batch_size * len(range(worker, full, workers))
    return own + (rest if full % workers == worker else 0)


def _keep(stream: Iterable[Piece], rows: int, loose: deque[Piece]) -> list[Piece]:
    """Return the first rows of a stream, and put the others to those that are loose."""
    kept = []
    for piece in stream:
        first, others = _cut(piece, rows)
        if first is not None:
            kept.append(first)
            rows -= first.rows
        if others is not None:
            loose.append(others)
    return kept


def _fill(stream: list[Piece], rows: int, loose: deque[Piece]) -> int:
    """Put loose rows at the end of a stream; return how many it still lacks."""
    while rows and loose:
        first, others = _cut(loose.popleft(), rows)
        if others is not None:
            loose.appendleft(others)
        if first is not None:
            stream.append(first)
            rows -= first.rows
    return rows


def _cut(piece: Piece, rows: int) -> tuple[Piece | None, Piece | None]:
    """Return the first rows of a piece, and the others."""
    if rows <= 0:
        return None, piece
    if rows >= piece.rows:
        return piece, None
    place = piece.start + rows
    shard, stop = piece.shard, piece.stop
    return Piece(shard, piece.start, place, piece.repeats), Piece(shard, place, stop, piece.repeats)


def _first_rows(pieces: Sequence[Piece], rows: int) -> Iterator[Piece]:
    """Yield the first rows of the pieces, all over again as often as it takes."""
    for piece in cycle(pieces):
        first, _ = _cut(piece, rows)
        if first is None:
            return
        yield Piece(first.shard, first.start, first.stop, repeats=True)
        rows -= first.rows
