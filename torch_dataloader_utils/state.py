"""Progress to state and back: plain values out, every value checked on the way in. Pure.

A state names what was delivered by content (path, row offset, row length), so that a resume can tell whether today's
plan still holds what the checkpoint speaks of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch_dataloader_utils.errors import CheckpointMismatchError, Difference
from torch_dataloader_utils.model import DESCRIBED, DataFile, Manifest, Piece, Plan, Shard, Split
from torch_dataloader_utils.planning import PLAN_ALGORITHM, PlanOptions
from torch_dataloader_utils.progress import Progress, StreamProgress
from torch_dataloader_utils.ranges import Coverage, merged_row_numbers, row_numbers, splits_of_rows
from torch_dataloader_utils.saved import STATE_VERSION, SavedFile, SavedState

__all__ = ["Run", "dump_state", "restore_progress", "shorten", "touched_files"]

MOST_FILES = 10_000
"""Above this many files a state carries the manifest's fingerprint alone."""

MOST_BYTES = 500_000
"""Above this many bytes of JSON, done ranges are recorded as row numbers of the whole manifest, not written out."""

BYTES_OF_A_RANGE = 80
"""What a range takes in JSON beside its path, at most."""

SHOWN = 5
"""How many paths of each kind a message shows."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a state belongs to: everything that a plan depends on but the epoch.

    Attributes:
        manifest: The data files.
        options: The plan's options.
        filter_digest: Digest of the serialised filter, or None.
        num_workers: Number of worker processes of this rank.
        num_ranks: Number of ranks.
        rank: This rank.
    """

    manifest: Manifest
    options: PlanOptions
    filter_digest: str | None
    num_workers: int
    num_ranks: int
    rank: int

    def settings(self) -> dict[str, Any]:
        """Return what must be equal for a state to be loaded, by the names that users know; the files come apart."""
        return {
            "num_workers": self.num_workers,
            "num_ranks": self.num_ranks,
            "rank": self.rank,
            "shuffle_seed": self.options.shuffle_seed,
            "shuffle": self.options.shuffle,
            "shuffle_buffer_size": self.options.shuffle_buffer_size,
            "split_bytes": self.options.split_bytes,
            "split_rows": self.options.split_rows,
            "rows": self.manifest.rows,
            "filters": self.filter_digest,
            "plan_algorithm": PLAN_ALGORITHM,
        }


def dump_state(run: Run, epoch: int, progress: Progress) -> dict[str, Any]:
    """Return the progress as a state: dictionaries, lists, strings, integers, booleans and None.

    Args:
        run: What the state belongs to.
        epoch: The epoch.
        progress: How far this rank has come in it.

    Returns:
        A new state that shares nothing with anything else. It holds no credentials and survives JSON and
        ``torch.load(..., weights_only=True)``.
    """
    manifest, options = run.manifest, run.options
    done = [shard for stream in progress.streams for shard in stream.done]
    started = [piece for stream in progress.streams for piece in stream.left if piece.start]
    by_number = _is_long(manifest, [*done, *(piece.shard for piece in started)])
    done_ranges: dict[str, Any] = {"completed_shards": []}
    if by_number:
        done_ranges["completed_rows"] = merged_row_numbers(manifest, _splits(done))
    else:
        done_ranges["completed_shards"] = [{"splits": _dump_splits(manifest, shard)} for shard in done]
    return {
        "version": STATE_VERSION,
        "plan_algorithm": PLAN_ALGORITHM,
        "epoch": epoch,
        "batches_delivered": progress.batches_delivered,
        "next_worker": progress.next_stream,
        "_num_workers": run.num_workers,
        "_shuffle_seed": options.shuffle_seed,
        "num_ranks": run.num_ranks,
        "rank": run.rank,
        "plan": {
            "fingerprint": manifest.fingerprint,
            "root": manifest.root,
            "files": len(manifest.files),
            "rows": manifest.rows,
            "split_bytes": options.split_bytes,
            "split_rows": options.split_rows,
            "shuffle": options.shuffle,
            "shuffle_buffer_size": options.shuffle_buffer_size,
            "filter": run.filter_digest,
        },
        "files": [entry.copy() for entry in manifest.entries] if len(manifest.files) <= MOST_FILES else None,
        **done_ranges,
        "in_progress": [_dump_started(manifest, piece, by_number=by_number) for piece in started],
        "base": None,
    }


def restore_progress(saved: SavedState, run: Run, plan_epoch: Callable[[int], Plan]) -> Progress:
    """Return the progress that a state records, placed in today's plan.

    Args:
        saved: The state, parsed.
        run: What it must belong to.
        plan_epoch: Plans an epoch of this run.

    Returns:
        The progress, ready for an iteration that continues.

    Raises:
        CheckpointMismatchError: If the state belongs to another run, or records a range that is no union of this
            rank's splits.
        ValueError: If it records a shard twice, or what no run can have delivered.
    """
    settings = run.settings()
    differences = [
        Difference(name, value, settings[name]) for name, value in saved.settings.items() if value != settings[name]
    ]
    files = _compare_files(saved, run.manifest)
    streams = plan_epoch(saved.epoch).rank_streams(run.rank)
    completed = [split for shard in saved.completed for split in shard.splits]
    coverage = Coverage([*completed, *splits_of_rows(run.manifest, saved.completed_rows)])
    started = {
        shard.splits or tuple(splits_of_rows(run.manifest, shard.rows)): shard.rows_delivered
        for shard in saved.in_progress
    }
    if len(started) < len(saved.in_progress):
        msg = "not a state of this package: it records a shard in progress twice"
        raise ValueError(msg)
    lost = _first_unplaced(coverage, started, streams)
    if differences or files or lost:
        raise _mismatch(differences, files, lost, run.manifest)
    progress = Progress(
        streams=tuple(StreamProgress(stream, tuple(_pieces(stream, coverage, started))) for stream in streams),
        next_stream=saved.next_worker,
        batches_delivered=saved.batches_delivered,
    )
    _require_possible(progress)
    return progress


def touched_files(saved: SavedState, manifest: Manifest) -> list[str]:
    """Return the files whose modification time alone differs from the state's."""
    before = {file.path: file for file in saved.files or ()}

    def is_touched(file: DataFile) -> bool:
        then = before.get(file.path)
        if then is None or then.modified is None or file.modified is None:
            return False
        same_version = file.etag is not None and file.etag == then.etag
        return file.modified != then.modified and not same_version

    return [file.path for file in manifest.files if is_touched(file)]


def shorten(paths: Sequence[str]) -> str:
    """Return a list of paths as a message shows it: the first few, and how many more."""
    more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return ", ".join(paths[:SHOWN]) + more


def _splits(shards: Iterable[Shard]) -> list[Split]:
    return [split for shard in shards for split in shard.splits]


def _is_long(manifest: Manifest, shards: Sequence[Shard]) -> bool:
    """Whether the shards' ranges may take more bytes of JSON than a state has for them when they are written out."""
    room = MOST_BYTES - BYTES_OF_A_RANGE * sum([len(shard.splits) for shard in shards])
    return room < 0 or sum(manifest.written_lengths[split.path] for split in _splits(shards)) > room


def _dump_started(manifest: Manifest, piece: Piece, *, by_number: bool) -> dict[str, Any]:
    if by_number:
        rows = row_numbers(manifest, piece.shard.splits)
        return {"splits": [], "rows": rows, "rows_delivered": piece.start}
    return {"splits": _dump_splits(manifest, piece.shard), "rows_delivered": piece.start}


def _dump_splits(manifest: Manifest, shard: Shard) -> list[dict[str, str | int]]:
    return [
        {
            "path": manifest.full_path(one.path),
            "row_offset": one.row_offset,
            "row_length": one.row_length,
        }
        for one in shard.splits
    ]


def _first_unplaced(
    coverage: Coverage, started: Iterable[tuple[Split, ...]], streams: Sequence[Sequence[Shard]]
) -> tuple[Split, ...] | None:
    """Return the first recorded shard that this rank's streams do not hold, or None."""
    shards = [shard for stream in streams for shard in stream]
    today = {shard.splits for shard in shards}
    for splits in started:
        if splits not in today or any(map(coverage.covers, splits)):
            return splits
    half_done = [shard for shard in shards if 0 < sum(map(coverage.covers, shard.splits)) < len(shard.splits)]
    if half_done:
        return half_done[0].splits
    lost = coverage.without(shards)
    return None if lost is None else (lost,)


def _pieces(stream: Sequence[Shard], coverage: Coverage, started: dict[tuple[Split, ...], int]) -> Iterator[Piece]:
    for shard in stream:
        if not all(map(coverage.covers, shard.splits)):
            yield Piece(shard, started.get(shard.splits, 0))


def _require_possible(progress: Progress) -> None:
    """Raise unless each stream's shards were done in its order, in no more batches than there were rows."""
    for stream in progress.streams:
        left = [piece.shard for piece in stream.pieces]
        if tuple(left) != stream.shards[len(stream.shards) - len(left) :] or any(p.start for p in stream.pieces[1:]):
            msg = "not a state of this package: a worker's shards are done in their order, and these are not"
            raise ValueError(msg)
    rows = sum(shard.rows for stream in progress.streams for shard in stream.shards) - progress.rows_left
    if progress.batches_delivered > rows:
        msg = f"not a state of this package: it records {progress.batches_delivered} batches of {rows} rows"
        raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class _FileChanges:
    """How the data files differ from those of a checkpoint, by relative path."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    fingerprints: tuple[str, str] | None = None
    described: tuple[bool, bool] = (False, False)  # by `_metadata`: then, and now

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed or self.fingerprints)


def _compare_files(saved: SavedState, manifest: Manifest) -> _FileChanges:
    fingerprints = None
    if saved.fingerprint != manifest.fingerprint:
        fingerprints = (saved.fingerprint, manifest.fingerprint)
    if saved.files is None:
        return _FileChanges(fingerprints=fingerprints)
    before = {file.path: file for file in saved.files}
    now = {file.path: file for file in manifest.files}
    return _FileChanges(
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
    return (before.size, before.digest) != (now.size, now.digest) or etags


ADVICE = {
    "rank": "load the state that this rank saved (distributed.own_state picks it from a gathered list)",
    "plan_algorithm": "finish the epoch with the release that saved the checkpoint",
    "filters": "use the filter that the checkpoint was saved with (a new pyarrow may also write it differently)",
}


def _mismatch(
    differences: Sequence[Difference], files: _FileChanges, lost: tuple[Split, ...] | None, manifest: Manifest
) -> CheckpointMismatchError:
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
        shown = "; ".join(
            f"{manifest.full_path(s.path)} rows {s.row_offset} to {s.row_offset + s.row_length}" for s in lost[:SHOWN]
        )
        lines.append(f"  the shard [{shown}] of the checkpoint is not in this rank's plan of today")
    lines.append("What to do: " + "; or ".join([*_advice(differences, files), "begin the epoch anew without a state"]))
    return CheckpointMismatchError(
        "\n".join(lines),
        differences=tuple(differences),
        files_added=files.added,
        files_removed=files.removed,
        files_changed=files.changed,
        shard=None if lost is None else _dump_splits(manifest, Shard(lost)),
    )


def _advice(differences: Sequence[Difference], files: _FileChanges) -> Iterator[str]:
    settings = [difference for difference in differences if difference.name not in (*ADVICE, "rows")]
    if settings:
        wanted = ", ".join(f"{difference.name}={difference.checkpoint!r}" for difference in settings)
        yield f"create the loader with {wanted}"
    yield from (ADVICE[difference.name] for difference in differences if difference.name in ADVICE)
    if files:
        yield "bring the files back to what they were"
