"""A state from outside, checked value by value before anything uses it. Pure.

Whatever is loaded, a wrong value ends in a ``ValueError`` that names its place, never in a ``KeyError`` further on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch_dataloader_utils.checkpoint.json_value import Place
from torch_dataloader_utils.checkpoint.saved_state import (
    STATE_VERSION,
    SavedBaseline,
    SavedFile,
    SavedShard,
    SavedState,
)
from torch_dataloader_utils.planning.manifest import Split, root_prefix
from torch_dataloader_utils.planning.plan import UNEVEN_RANKS

__all__ = ["parse_state", "parse_states"]


MOST_WORKERS = 10_000
"""More workers than any machine runs: a number above it is damage, and planning for it would take forever."""


FILE_REQUIRED = ("path", "size", "digest")


FILE_OPTIONAL = ("etag", "modified", "rows")
"""What a file's entry holds, in order."""


def parse_states(raw: object) -> list[SavedState]:
    """Check one state, or a list of them, and return them as frozen values; equal file tables are checked once."""
    states = list(raw) if isinstance(raw, (list, tuple)) else [raw]
    if not states:
        msg = "not a state of this package: state is an empty list, expected this rank's state or those of all ranks"
        raise ValueError(msg)
    first = parse_state(states[0])
    return [first, *(parse_state(state, (states[0], first)) for state in states[1:])]


def parse_state(raw: object, known: tuple[Any, SavedState] | None = None) -> SavedState:
    """Check a state and return it as frozen values.

    Args:
        raw: What ``state_dict()`` returned, possibly through JSON or ``torch.save``.
        known: A state that is checked, and what it is as frozen values: its file table need not be checked again.

    Returns:
        The state.

    Raises:
        ValueError: If it is not such a state; the message names the place.
    """
    state = Place(raw, "state")
    version = state["version"].integer()
    if version != STATE_VERSION:
        msg = (
            f"the state has version {version}, this release reads version {STATE_VERSION}: "
            "load it with the release that saved it"
        )
        raise ValueError(msg)
    plan = state["plan"]
    root = plan["root"].text()
    settings = _settings(state, plan)
    next_worker = state["next_worker"].integer()
    if next_worker >= max(1, settings["virtual_workers"] or settings["num_workers"]):
        raise state["next_worker"].fail(f"less than the number of workers, {settings['num_workers']}")
    if known is not None and known[0]["files"] == state["files"].value:
        files = known[1].files
    else:
        files = None if state["files"].is_null else _files(state["files"])
    tree = _Tree(root, {file.path: file.rows for file in files or ()})
    completed = tuple(_shard(place, tree) for place in state["completed_shards"].items())
    in_progress = _started_shards(state["in_progress"], tree, settings["rows"])
    own = [shard for shard in in_progress if not shard.repeats]
    _refuse_overlap([(split.path, *_ends(split)) for shard in [*completed, *own] for split in shard.splits])
    completed_rows = _rising_numbers(state["completed_rows"], settings["rows"])
    if completed and completed_rows:
        raise state["completed_rows"].fail("an empty list beside completed_shards")
    return SavedState(
        settings=settings,
        epoch=state["epoch"].integer(),
        batches_delivered=state["batches_delivered"].integer(),
        next_worker=next_worker,
        fingerprint=plan["fingerprint"].text(),
        root=root,
        files=files,
        completed=completed,
        completed_rows=completed_rows,
        in_progress=in_progress,
        baseline=None if state["base"].is_null else _base(state["base"], tree, settings["rows"]),
    )


def _base(place: Place, tree: _Tree, dataset_rows: int) -> SavedBaseline:
    in_progress = _started_shards(place["in_progress"], tree, dataset_rows)
    _refuse_overlap([(split.path, *_ends(split)) for shard in in_progress for split in shard.splits])
    return SavedBaseline(
        batches_delivered=place["batches_delivered"].integer(),
        completed_rows=_rising_numbers(place["completed_rows"], dataset_rows),
        in_progress=in_progress,
        left_out=tuple(path.text() for path in place["left_out"].items()),
    )


def _settings(state: Place, plan: Place) -> dict[str, Any]:
    def optional(place: Place) -> int | None:
        return None if place.is_null else place.integer(1)

    num_workers = state["_num_workers"].integer()
    if num_workers > MOST_WORKERS:
        raise state["_num_workers"].fail(f"at most {MOST_WORKERS} workers")
    num_ranks, rank = state["num_ranks"].integer(1), state["rank"].integer()
    if rank >= num_ranks:
        raise state["rank"].fail(f"less than the number of ranks, {num_ranks}")
    return {
        "num_workers": num_workers,
        "num_ranks": num_ranks,
        "rank": rank,
        "shuffle_seed": state["_shuffle_seed"].integer(None),
        "shuffle": plan["shuffle"].boolean(),
        "shuffle_buffer_size": optional(plan["shuffle_buffer_size"]),
        "split_bytes": plan["split_bytes"].integer(1),
        "split_rows": optional(plan["split_rows"]),
        "rows": plan["rows"].integer(),
        "shuffle_interleave": plan["shuffle_interleave"].integer(1),
        "uneven_ranks": plan["uneven_ranks"].choice(UNEVEN_RANKS),
        "virtual_ranks": optional(plan["virtual_ranks"]),
        "virtual_workers": optional(plan["virtual_workers"]),
        "global_batch_size": optional(plan["global_batch_size"]),
        "format": plan["format"].text(),
        "format_options": None if plan["format_options"].is_null else plan["format_options"].text(),
        "snapshot_id": None if plan["snapshot_id"].is_null else plan["snapshot_id"].integer(),
        "version": None if plan["version"].is_null else plan["version"].integer(),
        "split_strategy": None if plan["split_strategy"].is_null else plan["split_strategy"].text(),
        "filters": None if plan["filter"].is_null else plan["filter"].text(),
        "plan_algorithm": state["plan_algorithm"].integer(),
    }


def _files(place: Place) -> tuple[SavedFile, ...]:
    files = []
    for entry in place.items():
        values = entry.items()
        if not len(FILE_REQUIRED) <= len(values) <= len(FILE_REQUIRED) + len(FILE_OPTIONAL):
            raise entry.fail(f"a list of {', '.join(FILE_REQUIRED)} and perhaps {', '.join(FILE_OPTIONAL)}")
        path, size, digest, *extra = values
        etag, modified, rows = [*extra, *[Place(None, "")] * len(FILE_OPTIONAL)][: len(FILE_OPTIONAL)]
        files.append(
            SavedFile(
                path=path.text(),
                size=size.integer(),
                digest=digest.text(),
                etag=None if etag.is_null else etag.text(),
                modified=None if modified.is_null else modified.number(),
                rows=None if rows.is_null else rows.integer(),
            )
        )
    if len({file.path for file in files}) != len(files):
        raise place.fail("each path once")
    return tuple(files)


@dataclass(frozen=True, slots=True)
class _Tree:
    """The directory that a state's files were in, and the rows of each, by relative path, as far as it lists them."""

    root: str
    rows: Mapping[str, int | None]


def _split(place: Place, tree: _Tree) -> Split:
    path = place["path"].text()
    prefix = root_prefix(tree.root)
    if not path.startswith(prefix):
        raise place["path"].fail(f"a path under the root {tree.root!r}")
    path = path.removeprefix(prefix)
    if not place["row_offset"].is_null:
        return Split(path, place["row_offset"].integer(), place["row_length"].integer(1))
    if not place["row_length"].is_null:
        raise place["row_length"].fail("None beside a row_offset of None")
    if not place["byte_offset"].missing:
        return Split(path, place["byte_offset"].integer(), place["byte_length"].integer(1))
    whole = tree.rows.get(path)
    if not whole:
        raise place["path"].fail("a file that `files` lists with what it holds, or a byte_offset beside it")
    return Split(path, 0, whole)


def _shard(place: Place, tree: _Tree) -> SavedShard:
    splits = tuple(_split(split, tree) for split in place["splits"].items())
    if not splits:
        raise place["splits"].fail("at least one split")
    return SavedShard(splits)


def _started_shards(places: Place, tree: _Tree, dataset_rows: int) -> tuple[SavedShard, ...]:
    shards = tuple(_started_shard(place, tree, dataset_rows) for place in places.items())
    own = [shard for shard in shards if not shard.repeats]
    _refuse_overlap([("the dataset", *pair) for shard in own for pair in _pairs(shard.rows)])
    return shards


def _started_shard(place: Place, tree: _Tree, dataset_rows: int) -> SavedShard:
    delivered = place["rows_delivered"].integer()
    rows = _row_numbers(place["rows"], dataset_rows)
    if rows and place["splits"].items():
        raise place["splits"].fail("an empty list beside rows")
    splits = () if rows else _shard(place, tree).splits
    missing = tuple(entry.integer() for entry in place["absent"].optional_items())
    if any(one >= len(splits) for one in missing) or len(set(missing)) < len(missing):
        raise place["absent"].fail("places of splits")
    most = sum(split.row_length for number, split in enumerate(splits) if number not in missing)
    most += sum(rows[1::2]) - sum(rows[::2])
    windows = tuple(_window(entry) for entry in place["windows"].optional_items())
    if place["windows"].missing:
        windows = ((0, delivered),) if delivered else ()
    if any(stop >= start for (_, stop), (start, _) in pairwise(windows)):
        raise place["windows"].fail("rising windows that do not touch one another")
    if sum(stop - start for start, stop in windows) != delivered:
        raise place["rows_delivered"].fail("the number of rows in the windows")
    if windows and windows[-1][1] > most:
        raise place["rows_delivered"].fail("no more rows than the shard has")
    return SavedShard(
        splits=splits,
        rows=rows,
        windows=windows,
        rounds=1 if place["rounds"].missing else place["rounds"].integer(1),
        missing=missing,
        repeats=not place["repeats"].missing and place["repeats"].boolean(),
    )


def _window(place: Place) -> tuple[int, int]:
    bounds = [entry.integer() for entry in place.items()]
    if len(bounds) != len(("start", "stop")) or bounds[0] >= bounds[1]:
        raise place.fail("start and stop of a window")
    return bounds[0], bounds[1]


def _ends(split: Split) -> tuple[int, int]:
    return split.row_offset, split.row_offset + split.row_length


def _pairs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip(rows[::2], rows[1::2], strict=True)


def _refuse_overlap(ranges: Sequence[tuple[str, int, int]]) -> None:
    for (path, _, stop), (other, start, _) in pairwise(sorted(ranges)):
        if path == other and stop > start:
            msg = (
                f"not a state of this package: it records rows of {path} twice, from {start} on; two states were mixed "
                "up, or one was edited"
            )
            raise ValueError(msg)


def _rising_numbers(place: Place, dataset_rows: int) -> tuple[int, ...]:
    numbers = _row_numbers(place, dataset_rows)
    if any(one >= other for one, other in pairwise(numbers)):
        raise place.fail("rising row numbers")
    return numbers


def _row_numbers(place: Place, dataset_rows: int) -> tuple[int, ...]:
    numbers = tuple(entry.integer() for entry in place.optional_items())
    sound = len(numbers) % 2 == 0 and all(start < stop <= dataset_rows for start, stop in _pairs(numbers))
    if not sound:
        raise place.fail("pairs of row numbers, start before stop, none above the dataset's number of rows")
    return numbers
