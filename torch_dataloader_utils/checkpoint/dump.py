"""Progress to a state of plain values. Pure.

A state names what was delivered by content (path, row offset, row length), so that a resume can tell whether its plan
still has what the state records.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from torch_dataloader_utils.checkpoint.checksum import baseline_digest, checksum_of, numbers_digest
from torch_dataloader_utils.checkpoint.epoch_record import EpochRecord
from torch_dataloader_utils.checkpoint.progress import Progress
from torch_dataloader_utils.checkpoint.run import Run
from torch_dataloader_utils.checkpoint.saved_state import STATE_VERSION, dump_splits, lists_files
from torch_dataloader_utils.planning.manifest import Manifest, Split
from torch_dataloader_utils.planning.plan import DeliveredBaseline, Shard, ShardSlice
from torch_dataloader_utils.planning.row_ranges import Windows, merged, merged_row_numbers, row_numbers, size_of

MOST_BYTES = 500_000
"""Above this many bytes of JSON, ranges are recorded as row numbers of the whole manifest, not by path."""

BYTES_OF_A_RANGE = 80
"""The most bytes of JSON that a range needs in addition to its path."""


def dump_state(
    run: Run, epoch: int, progress: Progress, plan_digest: str | None = None, record: EpochRecord | None = None
) -> dict[str, Any]:
    """Return this rank's progress as a state: dictionaries, lists, strings, integers, booleans and None.

    The plan's digest is there to compare the states of several ranks. `record` is what was prepared for all states of
    the epoch. The state shares no object with other states. It has no credentials, and survives JSON and
    ``torch.load(..., weights_only=True)``.
    """
    manifest = run.manifest
    record = record or EpochRecord(manifest, progress)
    has_many = record.has_many(progress)
    done, partial, repeated = _delivered(record.delivered_parts(progress) if has_many else _slices(progress))
    by_number = has_many or _is_long(manifest, [*done, *partial])
    done_ranges: dict[str, Any] = {"completed_shards": []}
    known: dict[str, bytes] = {}
    if has_many:
        numbers = record.completed_rows(progress, done)
        done_ranges["completed_rows"] = numbers.tolist()
        known["completed_rows"] = numbers_digest(numbers)
    elif by_number:
        done_ranges["completed_rows"] = merged_row_numbers(manifest, _splits(done))
    else:
        done_ranges["completed_shards"] = [{"splits": dump_splits(manifest, shard.splits)} for shard in done]
    in_progress = [_dump_partial(manifest, *shard, by_number) for shard in partial.items()]
    in_progress += [_dump_partial(manifest, *shard, by_number) | {"repeats": True} for shard in repeated.items()]
    state = {
        "version": STATE_VERSION,
        "plan_algorithm": run.plan_algorithm,
        "epoch": epoch,
        "batches_delivered": progress.batches_delivered,
        "next_worker": progress.next_turn,
        "batch_size": run.batch_size,
        "drop_last": run.drop_last,
        "_num_workers": run.topology.num_workers,
        "_shuffle_seed": run.options.shuffle_seed,
        "num_ranks": run.topology.num_ranks,
        "rank": run.topology.rank,
        "plan": run.plan(),
        "plan_digest": plan_digest,
        "files": [entry.copy() for entry in manifest.entries] if lists_files(manifest) else None,
        **done_ranges,
        "in_progress": in_progress,
        "base": None if progress.baseline is None else _dump_baseline(manifest, progress.baseline, record),
        "refused_by_dcp": _refused_by_dcp(),
    }
    if state["files"] is not None:
        known["files"] = manifest.entries_digest
    if state["base"] is not None:
        known["base"] = baseline_digest(state["base"], record.baseline_digest)
    return state | {"checksum": checksum_of(state, known)}


def _refused_by_dcp() -> dict[str, Any]:
    """Return what makes ``torch.distributed.checkpoint`` refuse a state when it is saved, not only when it is loaded.

    It saves dictionaries by the dotted names of their values, and keeps one value for each name, whichever rank has it:
    no rank could load such a state. It refuses a name that is there twice, with a message that has the name in it.
    """
    return {"use distributed": {"CheckpointEntry": None}, "use distributed.CheckpointEntry": None}


def _slices(progress: Progress) -> list[ShardSlice]:
    """Return all delivered slices."""
    return [part for stream in progress.streams for part in stream.done]


def _delivered(
    slices: Iterable[ShardSlice],
) -> tuple[list[Shard], dict[Shard, Windows], dict[Shard, Windows]]:
    """Return what slices deliver: whole shards, windows of other shards, and windows of repeated rows.

    Another slice delivers the repeated rows as well, and they count there.
    """
    done: list[Shard] = []
    parts: dict[Shard, list[tuple[int, int]]] = defaultdict(list)
    repeated: dict[Shard, list[tuple[int, int]]] = defaultdict(list)
    for part in slices:
        if part.repeats:
            repeated[part.shard].append((part.start, part.stop))
        elif part.is_whole:
            done.append(part.shard)
        else:
            parts[part.shard].append((part.start, part.stop))
    partial = {shard: merged(windows) for shard, windows in parts.items()}
    done += [shard for shard, windows in partial.items() if _is_whole(shard, windows)]
    partial = {shard: windows for shard, windows in partial.items() if not _is_whole(shard, windows)}
    return done, partial, {shard: merged(windows) for shard, windows in repeated.items()}


def _is_whole(shard: Shard, windows: Windows) -> bool:
    return windows == ((0, shard.rows),) and not shard.missing


def _splits(shards: Iterable[Shard]) -> list[Split]:
    return [split for shard in shards for split in shard.splits]


def _is_long(manifest: Manifest, shards: Sequence[Shard]) -> bool:
    """Whether the shards' ranges may need more bytes of JSON than a state has for ranges by path."""
    most = MOST_BYTES - BYTES_OF_A_RANGE * sum([len(shard.splits) for shard in shards])
    lengths = manifest.written_lengths
    return most < 0 or sum(lengths.get(split.path, 0) for split in _splits(shards)) > most


def _dump_partial(manifest: Manifest, shard: Shard, windows: Windows, by_number: bool) -> dict[str, Any]:  # noqa: FBT001
    entry: dict[str, Any] = {"splits": []}
    if by_number and not shard.missing:  # the files of a missing split may be gone, and with them its row numbers
        entry["rows"] = row_numbers(manifest, shard.splits)
    else:
        entry["splits"] = dump_splits(manifest, shard.splits)
    entry["rows_delivered"] = size_of(windows)
    if windows != ((0, entry["rows_delivered"]),):
        entry["windows"] = [list(window) for window in windows]
    if shard.rounds > 1:
        entry["rounds"] = shard.rounds
    if shard.missing:
        entry["absent"] = list(shard.missing)
    return entry


def _dump_baseline(manifest: Manifest, baseline: DeliveredBaseline, record: EpochRecord) -> dict[str, Any]:
    by_number = _is_long(manifest, [partial.shard for partial in baseline.partial])
    return {
        "batches_delivered": baseline.batches,
        "completed_rows": record.baseline_rows.copy(),
        "in_progress": [_dump_partial(manifest, part.shard, part.windows, by_number) for part in baseline.partial],
        "left_out": list(baseline.left_out),
    }
