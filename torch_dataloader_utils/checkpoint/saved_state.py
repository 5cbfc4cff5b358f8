"""A state that was loaded, as frozen values whose every type and range was checked. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch_dataloader_utils.planning.manifest import Manifest, Split
from torch_dataloader_utils.planning.row_ranges import Windows

__all__ = ["MOST_FILES", "STATE_VERSION", "SavedBaseline", "SavedFile", "SavedShard", "SavedState", "dump_splits"]


STATE_VERSION = 1
"""Version of the layout of a state."""


MOST_FILES = 10_000
"""Above this many files a state carries the manifest's fingerprint alone."""


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A data file as a state records it."""

    path: str
    size: int
    digest: str
    etag: str | None
    modified: float | None
    rows: int | None


@dataclass(frozen=True, slots=True)
class SavedShard:
    """A shard as a state records it.

    Attributes:
        splits: Its row ranges, paths relative to the root; empty where `rows` stands for them.
        rows: The same as places among all rows of the manifest: start, stop, start, stop, ...
        windows: Which of its rows were delivered.
        rounds: In how many rounds it is mixed.
        missing: Places of the splits whose files had changed.
        repeats: Whether these rows count where others delivered them.
    """

    splits: tuple[Split, ...]
    rows: tuple[int, ...] = ()
    windows: Windows = ()
    rounds: int = 1
    missing: tuple[int, ...] = ()
    repeats: bool = False


@dataclass(frozen=True, slots=True)
class SavedBaseline:
    """What a state records of the epoch before it was planned anew.

    Attributes:
        batches_delivered: Batches that the rank with the most of them had handed over.
        completed_rows: Ranges of the manifest's rows that are done: start, stop, start, stop, ...
        in_progress: Shards that were under way.
        left_out: Files that had been written anew.
    """

    batches_delivered: int
    completed_rows: tuple[int, ...]
    in_progress: tuple[SavedShard, ...]
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SavedState:
    """A state whose every value has the right type and range.

    Attributes:
        settings: What must be equal in the run that loads it, by the names that users know.
        epoch: The epoch.
        batches_delivered: Batches handed over in this epoch.
        next_worker: The worker whose batch is due next; of a grid, the virtual one.
        fingerprint: The manifest's fingerprint.
        root: The directory that all files were in.
        files: The data files, or None where there were too many to list.
        completed: Shards that are done.
        completed_rows: Ranges of the manifest's rows that are done: start, stop, start, stop, ...
        in_progress: Shards that are under way.
        baseline: What was done before the epoch was planned anew, or None.
    """

    settings: dict[str, Any]
    epoch: int
    batches_delivered: int
    next_worker: int
    fingerprint: str
    root: str
    files: tuple[SavedFile, ...] | None
    completed: tuple[SavedShard, ...]
    completed_rows: tuple[int, ...]
    in_progress: tuple[SavedShard, ...]
    baseline: SavedBaseline | None

    @property
    def rank(self) -> int:
        """The rank that saved it."""
        return int(self.settings["rank"])

    @property
    def num_ranks(self) -> int:
        """The number of ranks that it was saved under."""
        return int(self.settings["num_ranks"])

    @property
    def num_workers(self) -> int:
        """The worker count that the state was saved under."""
        return int(self.settings["num_workers"])


def dump_splits(manifest: Manifest, splits: Iterable[Split]) -> list[dict[str, str | int | None]]:
    """Return row ranges as states and errors show them; where rows are not counted, ranges of bytes or whole files."""
    return [_dump_split(manifest, one) for one in splits]


def _dump_split(manifest: Manifest, split: Split) -> dict[str, str | int | None]:
    path = manifest.full_path(split.path)
    if manifest.counts_rows:
        return {"path": path, "row_offset": split.row_offset, "row_length": split.row_length}
    whole: dict[str, str | int | None] = {"path": path, "row_offset": None, "row_length": None}
    if split.row_length == manifest.rows_of.get(split.path) and len(manifest.files) <= MOST_FILES:
        return whole
    return whole | {"byte_offset": split.row_offset, "byte_length": split.row_length}
