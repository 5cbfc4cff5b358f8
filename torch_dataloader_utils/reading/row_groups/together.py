"""Which small row groups are decoded by one task: a task, and a table, has costs that do not depend on its size."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from torch_dataloader_utils.reading.row_groups.file_row_group import FileRowGroup
from torch_dataloader_utils.reading.row_groups.reader import RowGroupReader

JOINED_SHARE = 6
"""Consecutive row groups that take together no more than this part (a sixth) of the budget are read as one: of a stream
one, then two, four, eight, so that its first batches come soon."""

COPIED_BYTES = 1 << 20
"""Row groups of several files are read as one if each takes no more than this in memory. They are copied to join them,
which takes longer for larger ones than what it saves: some operations of several threads for each."""

MOST_TOGETHER = 8
"""Row groups of several files that are read as one, at most; of a shuffled shard, files. More of them save nothing
more, and whoever waits for a batch, or leaves an epoch, waits for all: where files are tiny, thousands would fit."""

SHUFFLED_BYTES = 2 << 20
"""Row groups of a shuffled shard are decoded together, with one call for those of a file, up to so many bytes. Each of
the threads that decode gets a part of the shard."""

UNDIVIDED_BYTES = 1 << 18
"""So many bytes are never divided among these threads: to hand over a small task takes longer than the task."""


class Joiner:
    """Joins row groups of a stream that are read as one table.

    Args:
        reader: Knows their sizes.
        budget: Bytes that the stream holds at most.
    """

    def __init__(self, reader: RowGroupReader, budget: int) -> None:
        self._reader = reader
        self._limit = budget // JOINED_SHARE

    def joined(
        self, group: FileRowGroup, left: deque[FileRowGroup], most: int, wanted: int | None
    ) -> tuple[FileRowGroup, tuple[FileRowGroup, ...]]:
        """Return a row group and what is read as one with it: of its file, and of the files behind.

        They are taken from those that are left: at most `most`, and none that follows the `wanted` rows.
        """
        reader = self._reader
        group = self.joined_of_file(group, left, most, wanted)
        behind: list[FileRowGroup] = []
        count, rows, size = group.count, reader.rows_left(group), reader.sizes.decoded_bytes(group)
        if size > COPIED_BYTES or not reader.joins_small(group):
            return group, ()
        while left and count < min(most, MOST_TOGETHER) and (wanted is None or rows < wanted):
            added = left[0]
            try:
                decoded = reader.sizes.decoded_bytes(added)
            except OSError:  # its footer cannot be read: raised again for its own step, after the rows before it
                break
            size += decoded
            if decoded > COPIED_BYTES or size > self._limit or not reader.joins_small(added):
                break
            count, rows = count + 1, rows + reader.rows_left(left.popleft())
            if behind and behind[-1].is_followed_by(added):
                behind[-1] = behind[-1].joined_with(added)
            else:
                behind.append(added)
        return group, tuple(behind)

    def joined_of_file(
        self, group: FileRowGroup, left: deque[FileRowGroup], most: int, wanted: int | None = None
    ) -> FileRowGroup:
        """Return a row group with the consecutive ones of its file that are read as one with it."""
        reader = self._reader
        if not left or not reader.joins(group.path):
            return group
        size = reader.sizes.decoded_bytes(group)
        while left and group.count < most and group.is_followed_by(left[0]) and reader.sizes.are_known(left[0]):
            size += reader.sizes.decoded_bytes(left[0])
            if size > self._limit or (wanted is not None and reader.rows_left(group) >= wanted):
                break
            group = group.joined_with(left.popleft())
        return group


def decoded_together(
    in_file_order: Sequence[int], groups: Sequence[FileRowGroup], reader: RowGroupReader, size: int
) -> Iterator[list[int]]:
    """Yield the numbers of a shuffled shard's row groups, those together that one task decodes.

    Not those of files with deleted rows: what is left of a row group without them is a copy, beside which the parts of
    others would keep all that was decoded. `size` is that of the shard, in bytes.
    """
    limit = min(SHUFFLED_BYTES, max(UNDIVIDED_BYTES, size // reader.decoders))
    left = deque(in_file_order)
    while left:
        numbers = [left.popleft()]
        group = groups[numbers[0]]
        paths, taken = {group.path}, reader.sizes.decoded_bytes(group)
        while left and _may_join(reader, group) and _may_join(reader, added := groups[left[0]]):
            taken += reader.sizes.decoded_bytes(added)
            paths.add(added.path)
            if taken > limit or len(paths) > MOST_TOGETHER:
                break
            numbers.append(left.popleft())
        yield numbers


def _may_join(reader: RowGroupReader, group: FileRowGroup) -> bool:
    return reader.joins_small(group) and not reader.has_deleted(group.path)
