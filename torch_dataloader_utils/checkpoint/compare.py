"""How a checkpoint differs from the run that loads it, and the error that says so. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch_dataloader_utils.checkpoint.saved_state import SavedFile, SavedState, dump_splits
from torch_dataloader_utils.errors import CheckpointMismatchError, Difference
from torch_dataloader_utils.planning.manifest import DESCRIBED, TEXT, DataFile, Manifest, Split

__all__ = ["TOPOLOGY", "FileChanges", "compare_files", "mismatch", "shorten", "touched_files"]


SHOWN = 5
"""How many paths of each kind a message shows."""


TOPOLOGY = ("num_workers", "num_ranks", "rank", "virtual_ranks", "virtual_workers", "uneven_ranks", "global_batch_size")
"""Settings that an elastic resume may change."""


def touched_files(saved: SavedState, manifest: Manifest) -> list[str]:
    """Return the files whose modification time alone differs from the state's."""
    before = {file.path: file for file in saved.files or ()}

    def is_touched(file: DataFile) -> bool:
        then = before.get(file.path)
        if then is None or then.modified is None or file.modified is None:
            return False
        same_version = file.etag is not None and file.etag == then.etag
        return file.modified != then.modified and not same_version and not _differs(then, file)

    return [file.path for file in manifest.files if is_touched(file)]


def shorten(paths: Sequence[str]) -> str:
    """Return a list of paths as a message shows it: the first few, and how many more."""
    more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return ", ".join(paths[:SHOWN]) + more


@dataclass(frozen=True, slots=True)
class FileChanges:
    """How the data files differ from those of a checkpoint, by relative path."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    fingerprints: tuple[str, str] | None = None
    described: tuple[bool, bool] = (False, False)  # by `_metadata`: then, and now

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed or self.fingerprints)


def compare_files(saved: SavedState, manifest: Manifest) -> FileChanges:
    """Return how today's files differ from those that a state was saved on."""
    fingerprints = None
    if saved.fingerprint != manifest.fingerprint:
        fingerprints = (saved.fingerprint, manifest.fingerprint)
    if saved.files is None:
        return FileChanges(fingerprints=fingerprints)
    before = {file.path: file for file in saved.files}
    now = {file.path: file for file in manifest.files}
    return FileChanges(
        added=tuple(path for path in now if path not in before),
        removed=tuple(path for path in before if path not in now),
        changed=tuple(path for path in now if path in before and _differs(before[path], now[path])),
        fingerprints=fingerprints,
        described=(any(map(_is_described, saved.files)), any(map(_is_described, manifest.files))),
    )


def _is_described(file: SavedFile | DataFile) -> bool:
    return file.digest.startswith(DESCRIBED)


def _differs(before: SavedFile, now: DataFile) -> bool:
    etags = before.etag is not None and now.etag is not None and before.etag != now.etag
    return (before.size, before.digest) != (now.size, now.digest) or etags or _is_rewritten_text(before, now)


def _is_rewritten_text(before: SavedFile, now: DataFile) -> bool:
    """Whether a file without a footer was written anew, as far as its modification time tells."""
    same_version = now.etag is not None and before.etag == now.etag
    times = before.modified is not None and now.modified is not None and before.modified != now.modified
    return now.digest.startswith(TEXT) and times and not same_version


ADVICE = {
    "rank": "load the state that this rank saved (distributed.own_state picks it from a gathered list)",
    "plan_algorithm": "finish the epoch with the release that saved the checkpoint",
    "split_strategy": "use the split strategy that the checkpoint was saved with: it has to return the same shards",
    "format_options": "use the format_options and count_rows that the checkpoint was saved with",
    "filters": "use the filter that the checkpoint was saved with (a new pyarrow may also write it differently)",
    "global_batch_size": "use the batch_size that, times the number of ranks, gives the checkpoint's",
}


def mismatch(
    differences: Sequence[Difference], files: FileChanges, lost: tuple[Split, ...] | None, manifest: Manifest
) -> CheckpointMismatchError:
    """Return the error that says all of it, and what to do.

    Args:
        differences: Settings that differ.
        files: Files that differ.
        lost: Row ranges that the checkpoint records and today's plan does not hold, or None.
        manifest: Today's files.
    """
    lines = ["the checkpoint was taken under another plan than this run's; nothing was changed:"]
    lines += [f"  - {difference}" for difference in differences]
    for verb, paths in (("added", files.added), ("removed", files.removed), ("changed", files.changed)):
        if paths:
            lines.append(f"  - files {verb} since the checkpoint: {shorten(paths)}")
    if files.changed and files.described == (True, False):
        lines.append("  - `_metadata` described the files then and does not now, so that they cannot be compared")
    elif files.changed and files.described == (False, True):
        lines.append("  - `_metadata` describes the files now and did not then, so that they cannot be compared")
    if files.fingerprints and not (files.added or files.removed or files.changed):
        before, now = files.fingerprints
        lines.append(f"  - the file list changed: checkpoint={before!r}, current={now!r} (fingerprints)")
    if lost is not None:
        unit = "rows" if manifest.counts_rows else "bytes"
        shown = "; ".join(
            f"{manifest.full_path(s.path)} {unit} {s.row_offset} to {s.row_offset + s.row_length}" for s in lost[:SHOWN]
        )
        lines.append(f"  the shard [{shown}] of the checkpoint is not in this rank's plan of today")
    lines.append("What to do: " + "; or ".join([*_advice(differences, files), "begin the epoch anew without a state"]))
    return CheckpointMismatchError(
        "\n".join(lines),
        differences=tuple(differences),
        files_added=files.added,
        files_removed=files.removed,
        files_changed=files.changed,
        shard=None if lost is None else dump_splits(manifest, lost),
    )


def _advice(differences: Sequence[Difference], files: FileChanges) -> Iterator[str]:
    settings = [difference for difference in differences if difference.name not in (*ADVICE, "rows")]
    if settings:
        wanted = ", ".join(f"{difference.name}={difference.checkpoint!r}" for difference in settings)
        yield f"create the loader with {wanted}"
    yield from (ADVICE[difference.name] for difference in differences if difference.name in ADVICE)
    if files:
        yield "bring the files back to what they were"
    settled = files.described[0] == files.described[1]
    if files and settled and all(difference.name in (*TOPOLOGY, "rows") for difference in differences):
        yield "load_state_dict(states, strict=False, on_changed_files='continue') with the states of all ranks"
    elif not files and any(difference.name in TOPOLOGY for difference in differences):
        others = [difference for difference in differences if difference.name not in TOPOLOGY]
        under = "".join(f", {difference.name}={difference.checkpoint!r}" for difference in others)
        yield f"load_state_dict(states, strict=False) with the states of all ranks{under}: it plans what is left anew"
