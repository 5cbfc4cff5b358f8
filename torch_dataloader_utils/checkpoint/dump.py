"""Progress to a state of plain values. Pure.

A state names what was delivered by content (path, row offset, row length), so that a resume can tell whether its plan
still has what the state records.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch_dataloader_utils.checkpoint.checksum import baseline_digest, checksum_of, numbers_digest
from torch_dataloader_utils.checkpoint.epoch_record import EpochRecord
from torch_dataloader_utils.checkpoint.progress import Progress
from torch_dataloader_utils.checkpoint.run import Run
from torch_dataloader_utils.checkpoint.saved_exclusions import dump_exclusions
from torch_dataloader_utils.checkpoint.saved_state import STATE_VERSION, dump_splits, lists_files
from torch_dataloader_utils.checkpoint.skipped_steps import Mark
from torch_dataloader_utils.planning.manifest import Manifest, Split
from torch_dataloader_utils.planning.plan import TO_THE_END, DeliveredBaseline, Shard, ShardSlice, SkippedRows
from torch_dataloader_utils.planning.row_hash import RowHash
from torch_dataloader_utils.planning.row_ranges import (
    Windows,
    known_size_of,
    merged,
    merged_row_numbers,
    row_numbers,
)

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
    known: dict[str, bytes] = {}
    unfinished = record.unfinished_rows(progress)
    if record.has_many(progress):
        done, partial, repeated = _delivered(record.delivered_parts(progress))
        numbers = record.completed_rows(progress, done)
        in_progress = _dump_parts(manifest, partial, repeated, unfinished, by_number=True)
        rows = {"completed_shards": [], "completed_rows": numbers.tolist(), "in_progress": in_progress}
        known["completed_rows"] = numbers_digest(numbers)
    else:
        rows = _dump_rows(manifest, _slices(progress), unfinished)
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
        **_dump_files(run, record),
        **rows,
        **_dump_skips(manifest, progress, record),
        "excluded": dump_exclusions(manifest, run.exclusions, progress.removed.delivered),
        **_dump_hashes(run, progress),
        "base": None if progress.baseline is None else _dump_baseline(manifest, progress.baseline, record),
        "refused_by_dcp": _refused_by_dcp(),
    }
    if state["files"] is not None:
        known["files"] = manifest.entries_digest
    if state["base"] is not None:
        known["base"] = baseline_digest(state["base"], record.baseline_digest)
    return state | {"checksum": checksum_of(state, known)}


def _dump_files(run: Run, record: EpochRecord) -> dict[str, Any]:
    """Return the files, each once: a mixture's by source."""
    listed = lists_files(run.manifest)
    if run.mixture is not None:
        rows = {"carried": run.mixture.carried, "earlier": run.mixture.earlier}
        dumped = record.taken_rows(lambda: {name: _dump_taken(run.manifest, taken) for name, taken in rows.items()})
        return {"files": None, "mixture": run.mixture.dump(lists_files=listed) | dumped}
    return {"files": [entry.copy() for entry in run.manifest.entries] if listed else None}


def _dump_taken(manifest: Manifest, taken: DeliveredBaseline) -> dict[str, Any]:
    by_number = _is_long(manifest, [partial.shard for partial in taken.partial])
    return {
        "completed_rows": merged_row_numbers(manifest, taken.done),
        "in_progress": [_dump_partial(manifest, part.shard, part.windows, by_number) for part in taken.partial],
    }


def _refused_by_dcp() -> dict[str, Any]:
    """Return what makes ``torch.distributed.checkpoint`` refuse a state when it is saved, not only when it is loaded.

    It saves dictionaries by the dotted names of their values, and keeps one value for each name, whichever rank has it:
    no rank could load such a state. It refuses a name that is there twice, with a message that has the name in it.
    """
    return {"use distributed": {"CheckpointEntry": None}, "use distributed.CheckpointEntry": None}


def _dump_rows(
    manifest: Manifest, slices: Iterable[ShardSlice], known: Mapping[Shard, list[int]] | None = None
) -> dict[str, Any]:
    """Return the rows of slices as states record them, by path or by row number.

    `known` are the row numbers of some shards.
    """
    done, partial, repeated = _delivered(slices)
    by_number = _is_long(manifest, [*done, *partial])
    rows: dict[str, Any] = {"completed_shards": []}
    if by_number:
        rows["completed_rows"] = merged_row_numbers(manifest, _splits(done))
    else:
        rows["completed_shards"] = [{"splits": dump_splits(manifest, shard.splits)} for shard in done]
    return rows | {"in_progress": _dump_parts(manifest, partial, repeated, known, by_number=by_number)}


def _dump_parts(
    manifest: Manifest,
    partial: Mapping[Shard, Windows],
    repeated: Mapping[Shard, Windows],
    known: Mapping[Shard, list[int]] | None,
    *,
    by_number: bool,
) -> list[dict[str, Any]]:
    parts = [_dump_partial(manifest, *shard, by_number, known) for shard in partial.items()]
    return parts + [_dump_partial(manifest, *shard, by_number, known) | {"repeats": True} for shard in repeated.items()]


def _dump_skips(manifest: Manifest, progress: Progress, record: EpochRecord) -> dict[str, Any]:
    """Return the entry of skipped steps, if there are any: the steps, and the rows that are not delivered so far."""
    if not (progress.skip_requests or progress.skips or progress.restores):
        return {}

    def rows() -> dict[str, Any]:
        groups = progress.restorable_left if progress.restores else progress.skipped
        dropped = progress.carried_dropped if progress.restores else ()
        return _dump_rows(manifest, [*dropped, *(part for group in groups for slices in group for part in slices)])

    restored = progress.restored
    skipped = {
        "steps": [list(steps) for steps in progress.skip_requests],
        "marks": [[_dump_mark(skip.begin), _dump_mark(skip.end)] for skip in progress.skips],
        "restores": progress.restores,
        "restored": None
        if restored is None
        else {
            "number": restored.number,
            "next_worker": restored.next_turn,
            "places": [list(stream.place) for stream in restored.streams],
        },
        **record.skipped_rows(progress, rows),
    }
    return {"skipped": skipped}


def _dump_mark(mark: Mark) -> dict[str, Any]:
    return {"step": mark.step, "next_worker": mark.turn, "places": [list(place) for place in mark.places]}


def _dump_hashes(run: Run, progress: Progress) -> dict[str, Any]:
    """Return the entry of the hashes of delivered rows, if they are known."""
    if progress.hashes is None:
        return {}
    return {"delivered_hash": dump_hashes(zip(run.topology.own_ranks, progress.hashes, strict=True))}


def dump_hashes(hashes: Iterable[tuple[int, RowHash]]) -> list[dict[str, Any]]:
    """Return the hashes of planned ranks' rows as states and metrics show them."""
    return [{"rank": rank, "rows": own.rows, "hash": own.digest} for rank, own in hashes]


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
            repeated[part.shard].append(part.window)
        elif part.is_whole:
            done.append(part.shard)
        else:
            parts[part.shard].append(part.window)
    partial = {shard: merged(windows) for shard, windows in parts.items()}
    done += [shard for shard, windows in partial.items() if _is_whole(shard, windows)]
    partial = {shard: windows for shard, windows in partial.items() if not _is_whole(shard, windows)}
    return done, partial, {shard: merged(windows) for shard, windows in repeated.items()}


def _is_whole(shard: Shard, windows: Windows) -> bool:
    return windows == ((0, shard.end),) and not shard.missing


def _splits(shards: Iterable[Shard]) -> list[Split]:
    return [split for shard in shards for split in shard.splits]


def _is_long(manifest: Manifest, shards: Sequence[Shard]) -> bool:
    """Whether the shards' ranges may need more bytes of JSON than a state has for ranges by path."""
    most = MOST_BYTES - BYTES_OF_A_RANGE * sum([len(shard.splits) for shard in shards])
    lengths = manifest.written_lengths
    return most < 0 or sum(lengths.get(split.path, 0) for split in _splits(shards)) > most


def _dump_partial(
    manifest: Manifest,
    shard: Shard,
    windows: Windows,
    by_number: bool,  # noqa: FBT001
    known: Mapping[Shard, list[int]] | None = None,
) -> dict[str, Any]:
    entry: dict[str, Any] = {"splits": []}
    if by_number and not shard.missing:  # the files of a missing split may be gone, and with them its row numbers
        numbers = None if known is None else known.get(shard)
        entry["rows"] = row_numbers(manifest, shard.splits) if numbers is None else numbers.copy()
    else:
        entry["splits"] = dump_splits(manifest, shard.splits)
    entry["rows_delivered"] = known_size_of(windows)
    if windows != ((0, entry["rows_delivered"]),):
        entry["windows"] = [[start, None if stop == TO_THE_END else stop] for start, stop in windows]
    if shard.rounds > 1:
        entry["rounds"] = shard.rounds
    if shard.missing:
        entry["absent"] = list(shard.missing)
    return entry


def _dump_baseline(manifest: Manifest, baseline: DeliveredBaseline, record: EpochRecord) -> dict[str, Any]:
    by_number = _is_long(manifest, [partial.shard for partial in baseline.partial])
    skipped = {} if baseline.skipped is None else {"skipped": _dump_skipped_rows(manifest, baseline.skipped)}
    hashes = {"delivered_hash": list(map(dump_hashes, baseline.hashes))} if baseline.hashes else {}
    gone = {"gone": baseline.gone} if baseline.gone else {}
    return (
        skipped
        | hashes
        | gone
        | {
            "batches_delivered": baseline.batches,
            "completed_rows": record.baseline_rows.copy(),
            "in_progress": [_dump_partial(manifest, part.shard, part.windows, by_number) for part in baseline.partial],
            "left_out": list(baseline.left_out),
        }
    )


def _dump_skipped_rows(manifest: Manifest, skipped: SkippedRows) -> dict[str, Any]:
    by_number = _is_long(manifest, [partial.shard for partial in skipped.partial])
    return {
        "steps": [list(steps) for steps in skipped.steps],
        "restores": skipped.restores,
        "completed_rows": merged_row_numbers(manifest, skipped.whole),
        "in_progress": [_dump_partial(manifest, part.shard, part.windows, by_number) for part in skipped.partial],
    }
