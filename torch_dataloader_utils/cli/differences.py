"""What differs between two states, or between two manifests, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from torch_dataloader_utils.checkpoint.audit import audit_states, unit_of
from torch_dataloader_utils.checkpoint.audit_result import Audit
from torch_dataloader_utils.checkpoint.compare import weights_of
from torch_dataloader_utils.checkpoint.file_changes import how_changed
from torch_dataloader_utils.checkpoint.parse.states import parse_states
from torch_dataloader_utils.checkpoint.saved_exclusions import SavedExclusions
from torch_dataloader_utils.checkpoint.saved_state import SavedFile, SavedMixture, SavedSource, SavedState
from torch_dataloader_utils.cli.options import TIMEOUT_SEC
from torch_dataloader_utils.dataset.manifest_file import MAGIC, parse_manifest
from torch_dataloader_utils.distributed.read_states import read_states
from torch_dataloader_utils.errors import cut
from torch_dataloader_utils.formats.base import KnownFooters
from torch_dataloader_utils.planning import row_ranges
from torch_dataloader_utils.storage.file_object import stored_file
from torch_dataloader_utils.storage.filesystem import Storage
from torch_dataloader_utils.storage.listing import Listing
from torch_dataloader_utils.storage.stored_file import StoredFile

DIGESTS = ("filters", "filter_binding", "format_options")
"""Settings that states record as digests."""

OF_SOURCE = " of source "
"""What the name of a source's setting has before the name of the source."""

OF_A_RANK = ("rank", "rows")
"""Settings that are no difference: which rank saved a state, and the number of rows, which follows from the files."""


@dataclass(frozen=True, slots=True)
class Change:
    """Something that has one value in the first, and another one in the second."""

    name: str
    first: Any
    second: Any


@dataclass(frozen=True, slots=True)
class FileChange:
    """A file that differs, and how: ``"added"``, ``"removed"`` or ``"rewritten"``."""

    path: str
    change: str
    how: str = ""


@dataclass(frozen=True, slots=True)
class Differences:
    """What differs.

    Attributes:
        kind: What was compared: ``"states"`` or ``"manifests"``.
        settings: Settings of the loader, by their names in Python.
        files: Files.
        progress: How far the epoch has come.
        notes: What could not be compared, in words.
    """

    kind: str
    settings: tuple[Change, ...]
    files: tuple[FileChange, ...]
    progress: tuple[Change, ...]
    notes: tuple[str, ...]


def compare(first: str, second: str, options: Mapping[str, Any] | None, key: str | None) -> Differences:
    """Compare two states, or two manifests, that were saved in files, directories or at URLs.

    Raises:
        ValueError: If one is a manifest and the other is not.
    """
    one, another = (_manifest(url, options) for url in (first, second))
    if one is not None and another is not None:
        return _of_manifests(one, another)
    for url, manifest, other in ((first, one, second), (second, another, first)):
        if manifest is not None:
            raise ValueError(f"{url} is a manifest, and {other} is not: compare two states, or two manifests")
    before, after = (
        parse_states(read_states(url, options, key=key, storage_timeout=TIMEOUT_SEC)) for url in (first, second)
    )
    return _of_states(before, after)


# Manifests -----------------------------------------------------------------------------------------------------------


def _manifest(url: str, options: Mapping[str, Any] | None) -> tuple[Listing, KnownFooters] | None:
    """Return the manifest at a path or URL; None if something else is there."""
    storage, [location] = Storage.for_urls([url], options, timeout_sec=TIMEOUT_SEC)
    with storage.errors(location):
        if storage.call("info", location)["type"] == "directory":
            return None
    file = stored_file(storage, location)
    if storage.read(file, 0, min(file.size, len(MAGIC))) != MAGIC:
        return None
    return parse_manifest(storage.read(file, 0, file.size))


def _of_manifests(first: tuple[Listing, KnownFooters], second: tuple[Listing, KnownFooters]) -> Differences:
    before, after = ({file.path: file for file in listing.files} for listing, _ in (first, second))
    footers, others = first[1].footers, second[1].footers
    changed = {
        path: how
        for path in before.keys() & after.keys()
        if (how := _how_rewritten(before[path], after[path], footers.get(path) == others.get(path)))
    }
    settings = [Change("path", first[0].root, second[0].root)] if first[0].root != second[0].root else []
    described = first[1].metadata_file != second[1].metadata_file
    notes = ("the `_metadata` files differ, which describe the files",) if described and not changed else ()
    return Differences("manifests", tuple(settings), tuple(_file_changes(before, after, changed)), (), notes)


def _how_rewritten(before: StoredFile, after: StoredFile, has_same_footer: bool) -> str | None:  # noqa: FBT001
    """Return in words how a file differs between two manifests; None if it does not."""
    if before.size != after.size:
        return f"had {before.size:,} bytes, has {after.size:,}"
    if not has_same_footer:
        return "has the same size and another footer"
    if before.etag is not None and after.etag is not None and before.etag != after.etag:
        return "has the same size and another etag"
    return None


# States --------------------------------------------------------------------------------------------------------------


def _of_states(before: Sequence[SavedState], after: Sequence[SavedState]) -> Differences:
    first, second = before[0], after[0]
    settings = [*_settings(first, second), *_requests(first, second)]
    if first.mixture is not None and second.mixture is not None:
        settings += _settings_of_mixtures(first.mixture, second.mixture)
        files, notes = _files_of_mixtures(first.mixture, second.mixture)
    elif first.mixture is None and second.mixture is None:
        files, notes = _files(first, second, "the files")
    else:
        files, notes = [], ["one state is of a mixture and the other of a single dataset: files are not compared"]
    return Differences("states", tuple(settings), tuple(files), tuple(_progress(before, after)), tuple(notes))


def _files(
    first: SavedState | SavedSource, second: SavedState | SavedSource, named: str
) -> tuple[list[FileChange], list[str]]:
    """Return the files that differ, and what could not be compared."""
    if first.files is not None and second.files is not None:
        return list(_files_of_states(first, second)), []
    if first.fingerprint == second.fingerprint:
        return [], []
    return [], [f"{named} differ (fingerprints); which ones is not known: states list at most 10,000 files"]


def _requests(first: SavedState, second: SavedState) -> Iterator[Change]:
    """Yield how what was asked for differs once a loader was made: rows to exclude, and steps to skip."""
    pairs = {
        "exclude": (_excluded(first.excluded), _excluded(second.excluded)),
        "skip_steps": (_skipped(first), _skipped(second)),
        "restore_skipped": tuple(state.skips is not None and state.skips.restores for state in (first, second)),
    }
    for name, (one, other) in pairs.items():
        if one != other:
            yield Change(name, one, other)


def _excluded(excluded: SavedExclusions) -> str | None:
    """Return what is excluded: rows by their numbers among all rows, and expressions, each with its first epoch."""
    parts = []
    for epoch, numbers in excluded.rows:
        bounds = np.frombuffer(numbers, "<i8").tolist()
        windows = zip(bounds[::2], bounds[1::2], strict=True)
        parts.append(f"rows {row_ranges.in_words(windows)} from epoch {epoch} on")
    parts += [f"{expression.text} from epoch {expression.epoch} on" for expression in excluded.expressions]
    return "; ".join(parts) or None


def _skipped(state: SavedState) -> str | None:
    return None if state.skips is None else row_ranges.in_words(state.skips.steps) or None


def _settings_of_mixtures(first: SavedMixture, second: SavedMixture) -> Iterator[Change]:
    names = [[source.name for source in mixture.sources] for mixture in (first, second)]
    pairs: dict[str, tuple[Any, Any]] = {
        "sources": (names[0], names[1]),
        "weights": (weights_of(first), weights_of(second)),
        "rows_per_epoch": (first.rows_per_epoch, second.rows_per_epoch),
    }
    for before, after in _both(first, second):
        settings = {name: (value, after.settings[name]) for name, value in before.settings.items() if name != "rows"}
        settings["path"] = before.root, after.root
        pairs |= {f"{name}{OF_SOURCE}{before.name!r}": values for name, values in settings.items()}
    for name, (one, other) in pairs.items():
        if one != other:
            yield Change(name, one, other)


def _files_of_mixtures(first: SavedMixture, second: SavedMixture) -> tuple[list[FileChange], list[str]]:
    """Return the files that differ, each with its source before its path, and what could not be compared."""
    files, notes = list[FileChange](), list[str]()
    for before, after in _both(first, second):
        changed, missing = _files(before, after, f"the files of source {before.name!r}")
        files += [replace(change, path=f"{before.name}: {change.path}") for change in changed]
        notes += missing
    return files, notes


def _both(first: SavedMixture, second: SavedMixture) -> Iterator[tuple[SavedSource, SavedSource]]:
    """Yield each source that both mixtures have."""
    others = {source.name: source for source in second.sources}
    return ((source, others[source.name]) for source in first.sources if source.name in others)


def _settings(first: SavedState, second: SavedState) -> Iterator[Change]:
    pairs = {name: (value, second.settings[name]) for name, value in first.settings.items() if name not in OF_A_RANK}
    pairs |= {"path": (first.root, second.root)}
    if None not in (first.drop_last, second.drop_last):  # states of earlier releases hold neither of these
        pairs |= {name: (getattr(first, name), getattr(second, name)) for name in ("batch_size", "drop_last")}
    if not any(state.has_unequal_batches and state.batching is None for state in (first, second)):  # nor this
        pairs["batching"] = (first.batching, second.batching)
    for name, (one, other) in pairs.items():
        if one != other:
            yield Change(name, one, other)


def _files_of_states(first: SavedState | SavedSource, second: SavedState | SavedSource) -> Iterator[FileChange]:
    before, after = ({file.path: _counted(file, saved) for file in saved.files or ()} for saved in (first, second))
    both = before.keys() & after.keys()
    changed = {path: how for path in both if (how := how_changed(before[path], after[path]))}
    return _file_changes(before, after, changed)


def _counted(file: SavedFile, saved: SavedState | SavedSource) -> SavedFile:
    """Return a file of a state without a number of rows if that is a number of bytes."""
    return file if unit_of(saved.settings) == "rows" else replace(file, rows=None)


def _file_changes(
    before: Mapping[str, Any], after: Mapping[str, Any], changed: Mapping[str, str]
) -> Iterator[FileChange]:
    """Yield the files that differ, sorted by path."""
    for path in sorted({*before, *after}):
        if path not in before:
            yield FileChange(path, "added", _rows(after[path]))
        elif path not in after:
            yield FileChange(path, "removed", _rows(before[path]))
        elif path in changed:
            yield FileChange(path, "rewritten", changed[path])


def _rows(file: Any) -> str:
    """Return how large a file is, in words."""
    rows = getattr(file, "rows", None)
    return f"{file.size:,} bytes" if rows is None else f"{rows:,} rows"


def _progress(before: Sequence[SavedState], after: Sequence[SavedState]) -> Iterator[Change]:
    first, second = audit_states(before), audit_states(after)
    pairs: dict[str, tuple[Any, Any]] = {
        "epoch": (first.epoch, second.epoch),
        "step": (first.batches, second.batches),
        **_delivered(first, second),
        "ranks whose states are there": ([rank.rank for rank in first.ranks], [rank.rank for rank in second.ranks]),
    }
    batches = [{rank.rank: rank.batches for rank in found.ranks} for found in (first, second)]
    if len(batches[0]) > 1:
        both = sorted(batches[0].keys() & batches[1].keys())
        pairs |= {f"batches of rank {rank}": (batches[0][rank], batches[1][rank]) for rank in both}
    for name, (one, other) in pairs.items():
        if one != other:
            yield Change(name, one, other)


def _delivered(first: Audit, second: Audit) -> dict[str, tuple[int | None, int | None]]:
    """Return what is delivered, by what is counted: text whose rows are not counted has bytes."""
    one, other = (found.total.done + found.total.under_way for found in (first, second))
    if first.unit == second.unit:
        return {f"{first.unit} delivered": (one, other)}
    return {f"{first.unit} delivered": (one, None), f"{second.unit} delivered": (None, other)}


def in_words(change: Change) -> tuple[str, str]:
    """Return both values of a setting as text."""
    if change.name.partition(OF_SOURCE)[0] in DIGESTS:
        return tuple("none" if value is None else f"digest {value}" for value in (change.first, change.second))  # type: ignore[return-value]
    first, second = (_shown(value) for value in (change.first, change.second))
    return first, second


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    is_count = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:,}" if is_count else cut(str(value))
