"""The rows that a state records as delivered, from outside to frozen values. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from torch_dataloader_utils.checkpoint.json_value import JsonValue
from torch_dataloader_utils.checkpoint.saved_state import SavedRows, SavedShard
from torch_dataloader_utils.errors import cut, shown
from torch_dataloader_utils.planning.manifest import Split, root_prefix
from torch_dataloader_utils.planning.plan import TO_THE_END
from torch_dataloader_utils.planning.row_ranges import RowRange, Windows, first_overlap, known_size_of, size_of


class FileTree(NamedTuple):
    """What rows of a state refer to.

    Attributes:
        root: The root directory of its files.
        rows: The rows of each listed file, by its path below the root.
        dataset_rows: The rows of all files.
        is_open_ended: Whether only reading tells how many rows shards deliver.
    """

    root: str
    rows: Mapping[str, int | None]
    dataset_rows: int
    is_open_ended: bool


def parse_rows(rows: JsonValue, tree: FileTree) -> SavedRows:
    """Return the rows that are completed or in progress, or raise a ValueError that names the wrong value."""
    completed = tuple(SavedShard(_splits(shard, tree)) for shard in rows["completed_shards"].items())
    in_progress = parse_partial_shards(rows["in_progress"], tree, completed)
    completed_rows = parse_rising_numbers(rows["completed_rows"], tree.dataset_rows)
    if completed and completed_rows:
        raise rows["completed_rows"].fail("an empty list together with completed_shards")
    return SavedRows(completed, completed_rows, in_progress)


def parse_rows_by_number(rows: JsonValue, tree: FileTree) -> SavedRows:
    """Return the same of rows that are recorded without completed shards."""
    completed = parse_rising_numbers(rows["completed_rows"], tree.dataset_rows)
    return SavedRows((), completed, parse_partial_shards(rows["in_progress"], tree))


def _splits(shard: JsonValue, tree: FileTree) -> tuple[Split, ...]:
    splits = tuple(_split(split, tree) for split in shard["splits"].items())
    if not splits:
        raise shard["splits"].fail("at least one split")
    return splits


def _split(split: JsonValue, tree: FileTree) -> Split:
    path = split["path"].string()
    prefix = root_prefix(tree.root)
    if not path.startswith(prefix):
        raise split["path"].fail(f"a path under the root {shown(tree.root)}")
    path = path.removeprefix(prefix)
    if not split["row_offset"].is_null:
        return Split(path, split["row_offset"].integer(), split["row_length"].integer(1))
    if not split["row_length"].is_null:
        raise split["row_length"].fail("None, as row_offset is None")
    if not split["byte_offset"].missing:
        return Split(path, split["byte_offset"].integer(), split["byte_length"].integer(1))
    whole = tree.rows.get(path)
    if not whole:
        raise split["path"].fail("a file that `files` lists with what it holds, or a byte_offset with it")
    return Split(path, 0, whole)


def parse_partial_shards(
    in_progress: JsonValue, tree: FileTree, completed: Sequence[SavedShard] = ()
) -> tuple[SavedShard, ...]:
    """Return shards in progress, or raise if a row is in two of them or completed."""
    shards = tuple(_partial_shard(shard, tree) for shard in in_progress.items())
    counted = [shard for shard in shards if not shard.repeats]
    repeated = [shard for shard in shards if shard.repeats]  # these rows may be in a shard that counts as well
    for apart in ((*completed, *counted), repeated):
        _refuse_overlap(RowRange("the dataset", *pair) for shard in apart for pair in _pairs(shard.rows))
        _refuse_overlap(RowRange.of(split) for shard in apart for split in shard.splits)
    return shards


def _partial_shard(shard: JsonValue, tree: FileTree) -> SavedShard:
    rows = _row_numbers(shard["rows"], tree.dataset_rows)
    if rows and shard["splits"].items():
        raise shard["splits"].fail("an empty list together with rows")
    splits = () if rows else _splits(shard, tree)
    missing = tuple(index.integer() for index in shard["absent"].optional_items())
    if any(index >= len(splits) for index in missing) or len(set(missing)) < len(missing):
        raise shard["absent"].fail("indices of splits")
    most = sum(split.row_length for split in splits) + size_of(_pairs(rows))
    rounds = 1 if shard["rounds"].missing else shard["rounds"].integer(1)
    if rounds > most:
        raise shard["rounds"].fail("at most one for each row of the shard")
    return SavedShard(
        splits=splits,
        rows=rows,
        windows=_windows(shard, None if tree.is_open_ended else most - sum(splits[i].row_length for i in missing)),
        rounds=rounds,
        missing=missing,
        repeats=not shard["repeats"].missing and shard["repeats"].boolean(),
    )


def _windows(shard: JsonValue, most: int | None) -> Windows:
    """Return the delivered windows of a shard of at most so many rows; without `windows` its first rows.

    None for a shard of which only reading tells how many it delivers. Then a window may end with the shard.
    """
    delivered = shard["rows_delivered"].integer()
    windows = tuple(_window(window, may_be_open=most is None) for window in shard["windows"].optional_items())
    if shard["windows"].missing:
        windows = ((0, delivered),) if delivered else ()
    if any(stop >= start for (_, stop), (start, _) in pairwise(windows)):
        raise shard["windows"].fail("rising windows of which no two touch")
    if known_size_of(windows) != delivered:
        raise shard["rows_delivered"].fail("the number of rows in the windows")
    if windows and windows[-1][1] > (TO_THE_END if most is None else most):
        raise shard["rows_delivered"].fail("no more rows than the shard has")
    return windows


def _window(window: JsonValue, *, may_be_open: bool) -> tuple[int, int]:
    bounds = window.items()
    if len(bounds) != len(("start", "stop")):
        raise window.fail("start and stop of a window")
    start = bounds[0].integer()
    stop = TO_THE_END if may_be_open and bounds[1].is_null else bounds[1].integer()
    if start >= stop:
        raise window.fail("start and stop of a window")
    return start, stop


def _pairs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip(rows[::2], rows[1::2], strict=True)


def _refuse_overlap(ranges: Iterable[RowRange]) -> None:
    overlap = first_overlap(ranges)
    if overlap is not None:
        path, start, *_ = overlap[1]
        msg = f"not a state of this package: it records rows of {cut(path)} twice, from {shown(start)} on; two states "
        raise ValueError(msg + "were mixed up, or a state was edited")


def parse_rising_numbers(numbers: JsonValue, dataset_rows: int) -> tuple[int, ...]:
    """Return rising pairs of row numbers of a dataset of so many rows, or raise a ValueError."""
    rows = _row_numbers(numbers, dataset_rows)
    if any(row >= following for row, following in pairwise(rows)):
        raise numbers.fail("rising row numbers")
    return rows


def _row_numbers(numbers: JsonValue, dataset_rows: int) -> tuple[int, ...]:
    rows = tuple(number.integer() for number in numbers.optional_items())
    if len(rows) % 2 or not all(start < stop <= dataset_rows for start, stop in _pairs(rows)):
        raise numbers.fail("pairs of row numbers, start before stop, none above the dataset's number of rows")
    return rows
