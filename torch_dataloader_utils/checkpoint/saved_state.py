"""A loaded state as frozen values. The type and the range of each value were checked. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch_dataloader_utils.checkpoint.mixture_run import SourcePosition
from torch_dataloader_utils.checkpoint.saved_exclusions import NO_SAVED_EXCLUSIONS, SavedExclusions
from torch_dataloader_utils.checkpoint.skipped_steps import Place, SkippedSteps
from torch_dataloader_utils.planning.excluded import NONE_EXCLUDED, ExcludedRows
from torch_dataloader_utils.planning.manifest import Layout, Manifest, Split
from torch_dataloader_utils.planning.mixture.source_paths import source_path
from torch_dataloader_utils.planning.mixture.weight_schedule import Shares
from torch_dataloader_utils.planning.plan import TO_THE_END, PartialShard, Shard
from torch_dataloader_utils.planning.row_hash import RankHashes
from torch_dataloader_utils.planning.row_ranges import Windows, splits_of_rows
from torch_dataloader_utils.planning.token_budget import TokenBudget

STATE_VERSION = 1
"""Version of the layout of a state."""

MOST_FILES = 10_000
"""Above this many files a state does not list them: it has only the manifest's fingerprint."""

BINDING = 8
"""Characters for each file by which a state records what the filter's columns are in it."""


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
        splits: Its row ranges, with paths relative to the root; empty if it has `rows`.
        rows: The same as row numbers of the whole manifest: start, stop, start, stop, ...
        windows: Its delivered rows. One that ends with the shard, where only reading tells how many rows that makes,
            ends with `TO_THE_END`.
        rounds: Number of rounds of its row-level shuffle.
        missing: Indices of the splits whose files had changed.
        repeats: Whether another slice delivers these rows as well, so that they count there.
    """

    splits: tuple[Split, ...]
    rows: tuple[int, ...] = ()
    windows: Windows = ()
    rounds: int = 1
    missing: tuple[int, ...] = ()
    repeats: bool = False

    def partial(
        self, files: Layout, left_out: ExcludedRows = NONE_EXCLUDED, *, is_open_ended: bool = False
    ) -> PartialShard:
        """Return the shard by ranges of files. `files` are those to which row numbers refer.

        `left_out` are the excluded rows that the plan of its epoch leaves out. `is_open_ended` says that only reading
        tells how many rows it delivers.
        """
        splits = self.splits or tuple(splits_of_rows(files, self.rows))
        delivers = TO_THE_END if is_open_ended else None
        return PartialShard(Shard(splits, self.rounds, self.missing, left_out, delivers), self.windows)


@dataclass(frozen=True, slots=True)
class SavedRows:
    """Rows as a state records them: whole shards, or row numbers of the whole manifest, and parts of shards."""

    completed: tuple[SavedShard, ...]
    completed_rows: tuple[int, ...]
    in_progress: tuple[SavedShard, ...]

    def whole(self, files: Layout) -> list[Split]:
        """Return the ranges of the whole shards. `files` are those to which row numbers refer."""
        by_path = [split for shard in self.completed for split in shard.splits]
        return [*by_path, *splits_of_rows(files, self.completed_rows)]


@dataclass(frozen=True, slots=True)
class SavedRestored:
    """How far skipped rows that come after the last step were delivered: see `Restored`."""

    number: int
    next_worker: int
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class SavedSkips:
    """What a state records of skipped steps: see `Progress`.

    Attributes:
        steps: The steps that the user wants skipped.
        skips: Those of which the rows are known.
        restores: Whether they are delivered after the last step.
        restored: How far they were.
        rows: The rows that were skipped, or will be, and are not delivered.
    """

    steps: Windows
    skips: tuple[SkippedSteps, ...]
    restores: bool
    restored: SavedRestored | None
    rows: SavedRows


@dataclass(frozen=True, slots=True)
class SavedBaseline:
    """What a state records of the epoch before an elastic load planned the rest again: see `DeliveredBaseline`.

    The completed rows are row numbers of the whole manifest: start, stop, start, stop, ... Of skipped steps there are
    the rows, the steps, and whether they are restored.
    """

    batches_delivered: int
    completed_rows: tuple[int, ...]
    in_progress: tuple[SavedShard, ...]
    left_out: tuple[str, ...]
    skipped: tuple[SavedRows, Windows, bool] | None = None
    hashes: tuple[RankHashes, ...] = ()
    gone: int = 0


@dataclass(frozen=True, slots=True)
class SavedSource:
    """A source of a mixture as a state records it: see `SourceRun`. Its settings must be equal in the loading run."""

    name: str
    settings: dict[str, Any]
    weight: Fraction
    position: SourcePosition
    fingerprint: str
    root: str
    files: tuple[SavedFile, ...] | None
    filter_bindings: str | None


@dataclass(frozen=True, slots=True)
class SavedMixture:
    """What a state of a mixture records: its sources in order, the rows of an epoch, and those planned before it.

    The schedule, and the weights of the next epoch, are those of a `MixtureRun`, and None in states of releases that
    did not record them. The rows of its epoch are None where they are those of every epoch.
    The carried rows are those that epochs before it have taken out of their turn; the earlier ones are those before
    the sources' positions: see `MixtureRun`.
    """

    sources: tuple[SavedSource, ...]
    rows_per_epoch: int
    rows_of_epoch: int | None
    rows_before: int
    schedule: Shares | None
    carried: SavedRows
    earlier: SavedRows
    next_weights: tuple[Fraction, ...] | None

    @property
    def layout(self) -> Layout | None:
        """Each file of each pass that the epoch reaches, to which row numbers refer; None if files are not listed."""
        if any(source.files is None or any(file.rows is None for file in source.files) for source in self.sources):
            return None
        return Layout(
            sorted(
                (source_path(source.name, number, file.path), file.rows or 0)
                for source in self.sources
                for number in source.position.passes
                for file in source.files or ()
            )
        )


@dataclass(frozen=True, slots=True)
class SavedState:
    """A state whose every value has the right type and range.

    Its settings must be equal in the run that loads it; they have the names that users know. The next worker may be a
    virtual one. The files are None where there were too many to list. `filter_bindings` is that of a `Run`, and None in
    states of releases that did not record it. What is done is recorded by `completed` shards, or by `completed_rows`:
    row numbers of the whole manifest, start, stop, start, stop, ... The baseline is what was delivered before the rest
    of the epoch was planned again. The plan's digest is None in states of one rank, and of releases that did not record
    it; so are the batch size, the token budget and `drop_last`, which may differ in the run that loads it. The skips
    are None where no steps are skipped. Of the rows that were excluded in its epoch, `excluded_delivered` are those
    that were delivered before, as the excluded rows are written; None where that is not known. The hashes are those of
    the rows that its planned ranks have delivered, or None. The mixture is None for a single dataset.
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
    plan_digest: str | None = None
    filter_bindings: str | None = None
    skips: SavedSkips | None = None
    excluded: SavedExclusions = NO_SAVED_EXCLUSIONS
    excluded_delivered: bytes | None = None
    hashes: RankHashes | None = None
    batch_size: int | None = None
    drop_last: bool | None = None
    batching: TokenBudget | None = None
    mixture: SavedMixture | None = None

    def done(self, files: Layout) -> list[Split]:
        """Return the ranges of files that are done. `files` are those to which row numbers refer."""
        by_path = [split for shard in self.completed for split in shard.splits]
        return [*by_path, *splits_of_rows(files, self.completed_rows)]

    @property
    def is_open_ended(self) -> bool:
        """Whether only reading tells how many rows its shards deliver."""
        return bool(self.settings["unit"] != "rows") and self.mixture is None

    @property
    def has_unequal_batches(self) -> bool:
        """Whether a token budget made its batches. Earlier releases record neither their size nor `drop_last`."""
        return self.batch_size is None and self.drop_last is not None

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


def lists_files(manifest: Manifest) -> bool:
    """Whether states list the files of a manifest."""
    return len(manifest.files) <= MOST_FILES


def dump_splits(manifest: Manifest, splits: Iterable[Split]) -> list[dict[str, str | int | None]]:
    """Return row ranges as states and errors show them. Where rows are not counted, these are bytes or whole files."""
    return [_dump_split(manifest, split) for split in splits]


def _dump_split(manifest: Manifest, split: Split) -> dict[str, str | int | None]:
    path = manifest.full_path(split.path)
    if manifest.counts_rows:
        return {"path": path, "row_offset": split.row_offset, "row_length": split.row_length}
    whole: dict[str, str | int | None] = {"path": path, "row_offset": None, "row_length": None}
    if split.row_length == manifest.rows_of.get(split.path) and lists_files(manifest):
        return whole
    return whole | {"byte_offset": split.row_offset, "byte_length": split.row_length}
