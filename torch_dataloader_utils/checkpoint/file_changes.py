"""How data files differ from those that a state records. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from torch_dataloader_utils.checkpoint.mixture_run import MixtureRun, SourceRun
from torch_dataloader_utils.checkpoint.run import Run
from torch_dataloader_utils.checkpoint.saved_state import BINDING, SavedFile, SavedMixture, SavedSource, SavedState
from torch_dataloader_utils.errors import shown
from torch_dataloader_utils.planning.manifest import DESCRIBED, TEXT, DataFile, Manifest

NOT_COMPARED = "cannot be compared: `_metadata` described it then or does now, and not at both times"
"""How a file differs if its digest is one of a `_metadata` file's entries, and the other one that of its footer."""


@dataclass(frozen=True, slots=True)
class FileChanges:
    """How the data files differ from those of a checkpoint, by relative path.

    Changed files have another size, digest or etag. `fingerprints` are the manifest's in the checkpoint and now, where
    they differ. `described` says whether a `_metadata` file described the files then, and whether one does now.
    Rebound files are unchanged, but the filter's columns are other ones in them; this alone is no change of files.
    """

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    fingerprints: tuple[str, str] | None = None
    described: tuple[bool, bool] = (False, False)
    rebound: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed or self.fingerprints)


def compare_files(saved: SavedState, run: Run) -> FileChanges:
    """Return how the files differ from those of a state, and in which of them the filter's columns are others.

    Those of a mixture have the name of their source before their path.
    """
    if saved.mixture is not None and run.mixture is not None:
        return _compare_files_of_sources(saved.mixture, run.mixture)
    changes = compare_manifests(saved, run.manifest)
    return replace(changes, rebound=tuple(_rebound(saved, run, {*changes.changed})))


def _compare_files_of_sources(saved: SavedMixture, run: MixtureRun) -> FileChanges:
    own = {source.name: source for source in run.sources}
    changes = {source.name: _compare_source(source, own.get(source.name)) for source in saved.sources}
    different = [(name, change.fingerprints) for name, change in changes.items() if change.fingerprints is not None]
    before, after = ("; ".join(f"{name}: {pair[side]}" for name, pair in different) for side in (0, 1))
    described = [change.described for change in changes.values()]

    def prefixed(kind: str) -> tuple[str, ...]:
        return tuple(f"{name}/{path}" for name, change in changes.items() for path in getattr(change, kind))

    return FileChanges(
        added=prefixed("added"),
        removed=prefixed("removed"),
        changed=prefixed("changed"),
        fingerprints=(before, after) if different else None,
        described=(any(then for then, _ in described), any(now for _, now in described)),
        rebound=prefixed("rebound"),
    )


def _compare_source(saved: SavedSource, run: SourceRun | None) -> FileChanges:
    """Return how a source's files differ. If it is gone, all of them are."""
    if run is None:
        removed = tuple(file.path for file in saved.files or ())
        return FileChanges(removed=removed, fingerprints=(saved.fingerprint, "gone"))
    changes = compare_manifests(saved, run.manifest)
    return replace(changes, rebound=tuple(_rebound(saved, run, {*changes.changed})))


class ListedFiles(Protocol):
    """A state, or a source in a state: the files that it lists, or None, and their fingerprint."""

    @property
    def files(self) -> tuple[SavedFile, ...] | None:
        """The files."""

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the manifest."""


def compare_manifests(saved: ListedFiles, manifest: Manifest) -> FileChanges:
    """Return how files differ from those of a state."""
    fingerprints = None if saved.fingerprint == manifest.fingerprint else (saved.fingerprint, manifest.fingerprint)
    if saved.files is None:
        return FileChanges(fingerprints=fingerprints)
    before = {file.path: file for file in saved.files}
    now = {file.path: file for file in manifest.files}
    changed = tuple(path for path in now if path in before and _differs(before[path], now[path]))
    return FileChanges(
        added=tuple(path for path in now if path not in before),
        removed=tuple(path for path in before if path not in now),
        changed=changed,
        fingerprints=fingerprints,
        described=(any(map(_is_described, saved.files)), any(map(_is_described, manifest.files))),
    )


def _rebound(saved: SavedState | SavedSource, run: Run | SourceRun, changed: Collection[str]) -> Iterator[str]:
    """Yield the unchanged files in which the columns of the same filter are others, or have other values."""
    same_filter = saved.settings["filters"] == run.filter_digest
    if saved.filter_bindings is None or run.filter_bindings is None or not same_filter:
        return
    before = _bindings((file.path for file in saved.files or ()), saved.filter_bindings)
    for path, binding in _bindings((file.path for file in run.manifest.files), run.filter_bindings).items():
        if path not in changed and before.get(path, binding) != binding:
            yield path


def _bindings(paths: Iterable[str], bindings: str) -> dict[str, str]:
    return {path: bindings[BINDING * number : BINDING * (number + 1)] for number, path in enumerate(paths)}


def touched_files(saved: SavedState, run: Run) -> list[str]:
    """Return the files of which only the modification time differs from the state's."""
    if saved.mixture is None or run.mixture is None:
        return touched_in(saved, run.manifest)
    own = {source.name: source.manifest for source in run.mixture.sources}
    sources = [source for source in saved.mixture.sources if source.name in own]
    return [f"{source.name}/{path}" for source in sources for path in touched_in(source, own[source.name])]


def touched_in(saved: ListedFiles, manifest: Manifest) -> list[str]:
    """Return the same of the files that a state, or a source in one, lists."""
    before = {file.path: file for file in saved.files or ()}
    both = [(before[file.path], file) for file in manifest.files if file.path in before]
    return [now.path for then, now in both if _is_modified(then, now) and not _differs(then, now)]


def _is_described(file: SavedFile | DataFile) -> bool:
    return file.digest.startswith(DESCRIBED)


def how_changed(before: SavedFile, now: SavedFile | DataFile) -> str | None:
    """Return in words how a file differs from that of a state; None if it does not."""
    if before.size != now.size:
        return f"had {before.size:,} bytes, has {now.size:,}"
    if before.digest != now.digest:
        return NOT_COMPARED if _is_described(before) != _is_described(now) else "has the same size and other content"
    if before.etag is not None and now.etag is not None and before.etag != now.etag:
        return f"was etag {shown(before.etag)}, is {shown(now.etag)}"
    # The digest of text covers its first and last bytes alone, so that a new modification time counts as a change.
    if now.digest.startswith(TEXT) and _is_modified(before, now):
        return "has the same size, and was written since"
    return None


def _differs(before: SavedFile, now: DataFile) -> bool:
    return how_changed(before, now) is not None


def _is_modified(before: SavedFile, now: SavedFile | DataFile) -> bool:
    """Whether the modification times differ, as far as both are known, and no equal etags show the same version."""
    same_version = now.etag is not None and before.etag == now.etag
    times = before.modified is not None and now.modified is not None and before.modified != now.modified
    return times and not same_version
