"""A stream read: from its pieces to batches with their receipts."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from torch_dataloader_utils.columns.convert import join
from torch_dataloader_utils.columns.delivery import null_message
from torch_dataloader_utils.cutting import Batches, Cutter, StreamEnd
from torch_dataloader_utils.errors import ColumnError
from torch_dataloader_utils.formats.rowgroups import RowGroupReader
from torch_dataloader_utils.formats.source import Source
from torch_dataloader_utils.mixing import MixedWalk
from torch_dataloader_utils.model import Lane, Receipt
from torch_dataloader_utils.readahead import Room
from torch_dataloader_utils.walking import OrderedWalk, ReadOptions, Walk

__all__ = ["check_columns", "read_stream"]


def check_columns(source: Source, options: ReadOptions) -> None:
    """Raise now what would otherwise be raised in the middle of an epoch.

    Raises:
        ColumnError: If the row id column has the name of another, or a column cannot be delivered as asked: its
            footers announce nulls that have no value, or its type cannot be filtered or mixed.
    """
    if options.row_id_column in (*source.schema.names, *source.filter_columns):
        msg = f"row_id_column={options.row_id_column!r} is the name of a column of the files: choose another"
        raise ColumnError(msg)
    for announced in source.announced_nulls:
        found = announced.found
        msg = f"{null_message(found.column, found.nulls)} (row group {found.row_group} of {announced.path})"
        if announced.home is not None:
            msg = f"column {found.column!r} is in {announced.home} but not in {announced.path}, where it is null: {msg}"
        raise ColumnError(msg)
    if source.filter is not None or options.mixing_seed is not None:
        for column in source.schema:
            _require_selectable(column)


def _require_selectable(column: pa.Field) -> None:
    try:
        row = pa.chunked_array([pa.nulls(1, column.type)])
        row.take(pa.array([0]))
        row.filter(pa.array([True]))
    except pa.ArrowException as error:
        msg = f"rows of column {column.name!r} can be neither filtered nor mixed: {error}"
        raise ColumnError(msg) from None


def read_stream(
    source: Source, lane: Lane, epoch: int, options: ReadOptions, room: Room
) -> Iterator[Batches | StreamEnd]:
    """Read the pieces of one stream and yield its batches, then its end.

    Args:
        source: The data files.
        lane: What to read.
        epoch: The epoch.
        options: How rows become batches.
        room: How much may be read that is not delivered yet. Whoever delivers gives back what batches held.

    Yields:
        Every batch with its receipt, many together; last the end, with the receipt that says that all pieces are done.

    Raises:
        UnreadableFileError: If a file cannot be read.
        ColumnError: If an integer or boolean column holds nulls; the message names the file and the row group.
    """
    reader = RowGroupReader(source, options.row_id_column)
    mixes = options.mixing_seed is not None
    walk: Walk
    walk = (
        MixedWalk(reader, lane.pieces, options, room, epoch)
        if mixes
        else OrderedWalk(reader, lane.pieces, options, room)
    )
    try:
        yield from _cut(walk, lane, options, room)
    finally:
        walk.close()
        reader.close()


def _cut(walk: Walk, lane: Lane, options: ReadOptions, room: Room) -> Iterator[Batches | StreamEnd]:
    """Cut chunks into batches that span row groups, shards and files."""
    cutter = Cutter(lane.stream, options.batch_size)
    held = 0
    for chunk in walk.chunks():
        cutter.add(chunk)
        held += chunk.held
        del chunk  # it must be gone before the next one is read
        for cut in cutter.full_batches():
            is_last = cutter.rows < options.batch_size
            yield Batches(join(cut.cuts), cut.receipts, walk.take_bytes_read(), held if is_last else 0)
            held = 0 if is_last else held
        room.keep(held)  # no batch is full yet: what it needs beyond the room has to be read all the same
    if cutter.rows and not options.drop_last:
        cut = cutter.take(cutter.rows)
        yield Batches(join(cut.cuts), cut.receipts, walk.take_bytes_read(), held)
    else:
        room.give_back(held)
    end = Receipt(lane.stream, len(lane.pieces), 0, rows=0, rows_dropped=cutter.rows)
    yield StreamEnd(end, walk.take_bytes_read())
