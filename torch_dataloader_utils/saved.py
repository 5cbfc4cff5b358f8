"""A state from outside, checked value by value before anything uses it. Pure.

Whatever is loaded, a wrong value ends in a ``ValueError`` that names its place, never in a ``KeyError`` further on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch_dataloader_utils.model import Split, root_prefix

__all__ = ["STATE_VERSION", "SavedFile", "SavedShard", "SavedState", "parse_state"]

STATE_VERSION = 1
"""Version of the layout of a state."""

MOST_WORKERS = 10_000
"""More workers than any machine runs: a number above it is damage, and planning for it would take forever."""

FILE_REQUIRED = ("path", "size", "digest")
FILE_OPTIONAL = ("etag", "modified")
"""What a file's entry holds, in order."""

_MISSING = object()


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A data file as a state records it."""

    path: str
    size: int
    digest: str
    etag: str | None
    modified: float | None


@dataclass(frozen=True, slots=True)
class SavedShard:
    """A shard as a state records it.

    Attributes:
        splits: Its row ranges, paths relative to the root; empty where `rows` stands for them.
        rows: The same as places among all rows of the manifest: start, stop, start, stop, ...
        rows_delivered: Rows delivered of it.
    """

    splits: tuple[Split, ...]
    rows: tuple[int, ...] = ()
    rows_delivered: int = 0


@dataclass(frozen=True, slots=True)
class SavedState:
    """A state whose every value has the right type and range.

    Attributes:
        settings: What must be equal in the run that loads it, by the names that users know.
        epoch: The epoch.
        batches_delivered: Batches handed over in this epoch.
        next_worker: The worker whose batch is due next.
        fingerprint: The manifest's fingerprint.
        files: The data files, or None where there were too many to list.
        completed: Shards that are done.
        completed_rows: Ranges of the manifest's rows that are done: start, stop, start, stop, ...
        in_progress: Shards that are under way.
    """

    settings: dict[str, Any]
    epoch: int
    batches_delivered: int
    next_worker: int
    fingerprint: str
    files: tuple[SavedFile, ...] | None
    completed: tuple[SavedShard, ...]
    completed_rows: tuple[int, ...]
    in_progress: tuple[SavedShard, ...]

    @property
    def num_workers(self) -> int:
        """The worker count that the state was saved under."""
        return int(self.settings["num_workers"])


class _Place:
    """A value in a state and where it stands, so that an error can say so."""

    def __init__(self, value: object, name: str) -> None:
        self.value = value
        self.name = name

    def fail(self, wanted: str) -> ValueError:
        shown = "is missing" if self.value is _MISSING else f"is {type(self.value).__name__} {self.value!r:.80}"
        return ValueError(f"not a state of this package: {self.name} {shown}, expected {wanted}")

    def __getitem__(self, key: str) -> _Place:
        if not isinstance(self.value, Mapping):
            raise self.fail("a dictionary")
        return _Place(self.value.get(key, _MISSING), f"{self.name}[{key!r}]")

    def items(self) -> list[_Place]:
        if not isinstance(self.value, Sequence) or isinstance(self.value, (str, bytes)):
            raise self.fail("a list")
        return [_Place(value, f"{self.name}[{number}]") for number, value in enumerate(self.value)]

    @property
    def missing(self) -> bool:
        """Whether there is no such value at all."""
        return self.value is _MISSING

    def integer(self, least: int | None = 0) -> int:
        if type(self.value) is not int or (least is not None and self.value < least):
            raise self.fail("an integer" if least is None else f"an integer of at least {least}")
        return self.value

    def boolean(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.fail("true or false")
        return self.value

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.fail("a string")
        return self.value

    def number(self) -> float:
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)):
            raise self.fail("a number")
        try:
            number = float(self.value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.fail("a finite number")
        return number

    @property
    def absent(self) -> bool:
        """Whether the value is None; a missing one is an error of its own."""
        if self.value is _MISSING:
            raise self.fail("a value or None")
        return self.value is None


def parse_state(raw: object) -> SavedState:
    """Check a state and return it as frozen values.

    Args:
        raw: What ``state_dict()`` returned, possibly through JSON or ``torch.save``.

    Returns:
        The state.

    Raises:
        ValueError: If it is not such a state; the message names the place.
    """
    state = _Place(raw, "state")
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
    if not state["base"].absent:
        raise state["base"].fail("None")
    next_worker = state["next_worker"].integer()
    if next_worker >= max(1, settings["num_workers"]):
        raise state["next_worker"].fail(f"less than the number of workers, {settings['num_workers']}")
    completed = tuple(_shard(place, root) for place in state["completed_shards"].items())
    in_progress = tuple(_started_shard(place, root, settings["rows"]) for place in state["in_progress"].items())
    _refuse_overlap([(split.path, *_ends(split)) for shard in [*completed, *in_progress] for split in shard.splits])
    _refuse_overlap([("the dataset", *pair) for shard in in_progress for pair in _pairs(shard.rows)])
    completed_rows = _row_numbers(state["completed_rows"], settings["rows"])
    if any(one >= other for one, other in pairwise(completed_rows)):
        raise state["completed_rows"].fail("rising row numbers")
    if completed and completed_rows:
        raise state["completed_rows"].fail("an empty list beside completed_shards")
    return SavedState(
        settings=settings,
        epoch=state["epoch"].integer(),
        batches_delivered=state["batches_delivered"].integer(),
        next_worker=next_worker,
        fingerprint=plan["fingerprint"].text(),
        files=None if state["files"].absent else _files(state["files"]),
        completed=completed,
        completed_rows=completed_rows,
        in_progress=in_progress,
    )


def _settings(state: _Place, plan: _Place) -> dict[str, Any]:
    def optional(place: _Place) -> int | None:
        return None if place.absent else place.integer(1)

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
        "filters": None if plan["filter"].absent else plan["filter"].text(),
        "plan_algorithm": state["plan_algorithm"].integer(),
    }


def _files(place: _Place) -> tuple[SavedFile, ...]:
    files = []
    for entry in place.items():
        values = entry.items()
        if not len(FILE_REQUIRED) <= len(values) <= len(FILE_REQUIRED) + len(FILE_OPTIONAL):
            raise entry.fail(f"a list of {', '.join(FILE_REQUIRED)} and perhaps {', '.join(FILE_OPTIONAL)}")
        path, size, digest, *extra = values
        etag, modified = [*extra, _Place(None, ""), _Place(None, "")][: len(FILE_OPTIONAL)]
        files.append(
            SavedFile(
                path=path.text(),
                size=size.integer(),
                digest=digest.text(),
                etag=None if etag.absent else etag.text(),
                modified=None if modified.absent else modified.number(),
            )
        )
    if len({file.path for file in files}) != len(files):
        raise place.fail("each path once")
    return tuple(files)


def _split(place: _Place, root: str) -> Split:
    path = place["path"].text()
    prefix = root_prefix(root)
    if not path.startswith(prefix):
        raise place["path"].fail(f"a path under the root {root!r}")
    return Split(path.removeprefix(prefix), place["row_offset"].integer(), place["row_length"].integer(1))


def _shard(place: _Place, root: str) -> SavedShard:
    splits = tuple(_split(split, root) for split in place["splits"].items())
    if not splits:
        raise place["splits"].fail("at least one split")
    return SavedShard(splits)


def _started_shard(place: _Place, root: str, dataset_rows: int) -> SavedShard:
    delivered = place["rows_delivered"].integer()
    rows = _row_numbers(place["rows"], dataset_rows)
    if rows and place["splits"].items():
        raise place["splits"].fail("an empty list beside rows")
    splits = () if rows else _shard(place, root).splits
    if delivered > sum(split.row_length for split in splits) + sum(rows[1::2]) - sum(rows[::2]):
        raise place["rows_delivered"].fail("no more rows than the shard has")
    return SavedShard(splits, rows, delivered)


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


def _row_numbers(place: _Place, dataset_rows: int) -> tuple[int, ...]:
    numbers = () if place.missing else tuple(entry.integer() for entry in place.items())
    sound = len(numbers) % 2 == 0 and all(start < stop <= dataset_rows for start, stop in _pairs(numbers))
    if not sound:
        raise place.fail("pairs of row numbers, start before stop, none above the dataset's number of rows")
    return numbers
