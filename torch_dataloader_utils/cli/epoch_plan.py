"""What an epoch would look like, computed from footers alone: shards, balance, steps, bytes, memory."""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from torch_dataloader_utils.checkpoint.progress import Progress
from torch_dataloader_utils.cli.memory_bound import memory_bound
from torch_dataloader_utils.cli.options import TIMEOUT_SEC
from torch_dataloader_utils.cli.written import write_file
from torch_dataloader_utils.dataset.discovery import check_columns
from torch_dataloader_utils.dataset.manifest_file import dump_opened
from torch_dataloader_utils.dataset.options import LoaderOptions
from torch_dataloader_utils.dataset.structured import StructuredDataset
from torch_dataloader_utils.formats.opened_files import OpenedFiles, files_of
from torch_dataloader_utils.formats.read_cache import FooterStore
from torch_dataloader_utils.planning.plan import Plan, ShardSlice
from torch_dataloader_utils.planning.planner import EpochPlanner
from torch_dataloader_utils.planning.topology import Topology

BLOCK_BYTES = 8 * 2**20
BLOCKS_OF_A_WORKER = 5
"""Shared memory of a worker: `prefetch_factor`, 2, and three blocks more, of 8 MiB or of one batch."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The smallest, the median and the largest of some numbers."""

    least: int
    median: int
    most: int

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Sizes:
        """Return the sizes of some numbers; all 0 for none."""
        return cls(min(numbers), int(median(numbers)), max(numbers)) if numbers else cls(0, 0, 0)


@dataclass(frozen=True, slots=True)
class FilesSummary:
    """The files, by their footers.

    Attributes:
        root: The directory that the paths are relative to.
        format: The format.
        files: Number of files.
        row_groups: Number of row groups.
        rows: Number of rows; None if they are not counted. Then shards, ranks and workers have bytes in place of rows.
        expected_rows: An estimate of it where they are not counted; else the same.
        stored_bytes: Bytes of all files in the storage.
        read_bytes: Bytes of the delivered columns in the storage; None where the footers do not tell.
        decoded_bytes: These in memory, of strings at least what the footers say; None where they do not tell.
        row_group_rows: Rows of a row group, estimated where rows are not counted.
        row_group_bytes: Decoded bytes of a row group; those of the footers, of all columns, where `decoded_bytes` is
            None.
    """

    root: str
    format: str
    files: int
    row_groups: int
    rows: int | None
    expected_rows: int
    stored_bytes: int
    read_bytes: int | None
    decoded_bytes: int | None
    row_group_rows: Sizes
    row_group_bytes: Sizes

    @property
    def has_row_groups(self) -> bool:
        """Whether the files have row groups of their own; those of text are ranges of lines."""
        return self.format in ("parquet", "orc")

    @property
    def unit(self) -> str:
        """What shards, ranks and workers have: rows, or bytes of text whose rows are not counted."""
        return "bytes" if self.rows is None else "rows"

    @property
    def row_bytes(self) -> float:
        """Decoded bytes of a row, on average."""
        return self.bytes / max(1, self.expected_rows)

    @property
    def bytes(self) -> int:
        """Decoded bytes, or what comes nearest."""
        return self.stored_bytes if self.decoded_bytes is None else self.decoded_bytes


@dataclass(frozen=True, slots=True)
class RankSummary:
    """What a rank reads. `steps` is None where only reading tells; `worker_rows` has the rows of each worker."""

    rank: int
    shards: int
    rows: int
    steps: int | None
    worker_rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MemoryBound:
    """The most bytes that a rank holds, with all of its workers.

    Attributes:
        decoded: Rows that are read, shuffled, and not yet delivered.
        shared: The shared memory of its workers.
        rank: Both.
    """

    decoded: int
    shared: int
    rank: int


@dataclass(frozen=True, slots=True)
class EpochSummary:
    """An epoch as planned.

    Attributes:
        options: The settings that the plan was made with, by their names in Python.
        shards: Number of shards.
        shard_rows: Rows of a shard.
        shuffled_together: Number of row groups whose rows are shuffled together; None without row-level shuffling.
        most_rounds: Rounds of the shard that has the most.
        short_batches: Batches of a rank that are shorter than the batch size; None where only reading tells.
        rows_dropped: Rows that no rank reads, so that all make as many steps.
        rows_repeated: Rows that are read twice for the same reason.
    """

    files: FilesSummary
    options: Mapping[str, Any]
    shards: int
    shard_rows: Sizes
    shuffled_together: Sizes | None
    most_rounds: int
    ranks: tuple[RankSummary, ...]
    short_batches: int | None
    rows_dropped: int
    rows_repeated: int
    memory: MemoryBound


@dataclass(frozen=True)
class PlannedEpoch:
    """The files, the options, and the plan that they make."""

    opened: OpenedFiles
    options: LoaderOptions
    plan: Plan

    @property
    def topology(self) -> Topology:
        """The ranks and workers."""
        return self.options.topology

    def streams(self, rank: int) -> tuple[tuple[ShardSlice, ...], ...]:
        """Return the slices of each worker of a rank, those of its virtual ranks and workers one after the other."""
        topology = replace(self.topology, rank=rank)
        turns = topology.streams_per_turn
        own = topology.own_streams(self.plan)
        by_turn = [sum(own[first : first + turns], ()) for first in range(0, len(own), turns)]
        return tuple(sum(by_turn[worker :: topology.processes], ()) for worker in range(topology.processes))


def plan_epoch(parameters: Mapping[str, Any]) -> PlannedEpoch:
    """Open files and plan their first epoch, with parameters of ``create_dataloader``. Reads footers alone."""
    signature = inspect.signature(StructuredDataset.create_dataloader).parameters
    defaults = {name: one.default for name, one in signature.items() if one.kind is not one.VAR_KEYWORD}
    given = {**defaults, "dataloader_kwargs": {}, "storage_timeout": TIMEOUT_SEC, **parameters}
    options = LoaderOptions.parse(given, signature)
    opened = files_of(options.open_files(), "this")
    check_columns(opened, options.read_options(opened.schema))
    planner = EpochPlanner(opened.manifest, options.plan, opened.selection, None)
    return PlannedEpoch(opened, options, planner.plan(0, options.topology))


def summarise(planned: PlannedEpoch) -> EpochSummary:
    """Return what an epoch looks like."""
    files, plan, options = _files(planned.opened), planned.plan, planned.options
    shards = [part.shard for part in plan.slices]
    together = None
    if options.plan.shuffles_rows:
        starts = _row_group_starts(planned.opened)
        together = Sizes.of([_row_groups_of(shard.splits, starts) for shard in shards])
    ranks = tuple(_rank(planned, rank) for rank in range(planned.topology.num_ranks))
    balanced = plan.balanced
    return EpochSummary(
        files=files,
        options=_shown_options(planned),
        shards=len(shards),
        shard_rows=Sizes.of([shard.rows for shard in shards]),
        shuffled_together=together,
        most_rounds=max((shard.rounds for shard in shards), default=1),
        ranks=ranks,
        short_batches=_short_batches(planned, ranks),
        rows_dropped=sum(part.rows for part in balanced.dropped) if balanced else 0,
        rows_repeated=sum(part.rows for part in balanced.repeated) if balanced else 0,
        memory=_memory(planned, files),
    )


def _shown_options(planned: PlannedEpoch) -> dict[str, Any]:
    options, topology = planned.options, planned.topology
    return {
        "num_ranks": topology.num_ranks,
        "num_workers": topology.num_workers,
        "virtual_ranks": topology.virtual_ranks,
        "virtual_workers": topology.virtual_workers,
        "batch_size": options.batch_size,
        "drop_last": options.drop_last,
        "shuffle": options.plan.shuffle,
        "shuffle_seed": options.plan.shuffle_seed,
        "shuffle_buffer_size": options.plan.shuffle_buffer_size,
        "shuffle_interleave": options.plan.shuffle_interleave,
        "split_bytes": options.plan.split_bytes,
        "uneven_ranks": options.plan.uneven_ranks,
        "read_ahead_bytes": options.read_ahead_bytes,
    }


def _files(opened: OpenedFiles) -> FilesSummary:
    manifest = opened.manifest
    groups = [group for file in manifest.files for group in file.row_groups]
    sizes = _measured(opened)
    return FilesSummary(
        root=manifest.root,
        format=opened.format.name,
        files=len(manifest.files),
        row_groups=len(groups),
        rows=manifest.rows if manifest.counts_rows else None,
        expected_rows=sum(group.expected for group in groups),
        stored_bytes=sum(file.size for file in manifest.files),
        read_bytes=None if sizes is None else sum(stored for stored, _ in sizes),
        decoded_bytes=None if sizes is None else sum(decoded for _, decoded in sizes),
        row_group_rows=Sizes.of([group.expected for group in groups]),
        row_group_bytes=Sizes.of([group.bytes for group in groups] if sizes is None else [size for _, size in sizes]),
    )


def _measured(opened: OpenedFiles) -> list[tuple[int, int]] | None:
    """Return the stored and the decoded bytes of each row group, in the columns that are delivered.

    None where footers were not read, because a `_metadata` file stands in for them.
    """
    if opened.metadata_file is not None:
        return None
    codec = opened.format.codec(opened, FooterStore(opened.footers))
    found = []
    for file in opened.manifest.files:
        measures = codec.layout(file.path).measures()
        for number, group in enumerate(file.row_groups):
            variable = sum(sizes[number] for sizes in measures.variable.values())
            found.append((measures.stored[number], int(group.expected * measures.row_bytes) + variable))
    codec.close()
    return found


def _row_group_starts(opened: OpenedFiles) -> dict[str, list[int]]:
    return {
        file[0].split.path: [group.split.row_offset for group in file if group.split.row_length]
        for file in opened.manifest.row_group_splits
        if file
    }


def _row_groups_of(splits: Sequence[Any], starts: Mapping[str, list[int]]) -> int:
    """Return of how many row groups splits are made."""
    ends = ((starts[split.path], split.row_offset, split.row_offset + split.row_length) for split in splits)
    return sum(bisect_left(of_file, stop) - bisect_left(of_file, start) for of_file, start, stop in ends)


def _rank(planned: PlannedEpoch, rank: int) -> RankSummary:
    streams = planned.streams(rank)
    steps = None
    if planned.opened.unknown_rows is None:
        steps = _progress(planned, rank).batches(planned.options.batch_size, drop_last=planned.options.drop_last)
    rows = tuple(sum(part.rows for part in stream) for stream in streams)
    return RankSummary(rank, sum(map(len, streams)), sum(rows), steps, rows)


def _progress(planned: PlannedEpoch, rank: int) -> Progress:
    topology = replace(planned.topology, rank=rank)
    return Progress.fresh(topology.own_streams(planned.plan), topology.streams_per_turn)


def _short_batches(planned: PlannedEpoch, ranks: Sequence[RankSummary]) -> int | None:
    """Return the most batches of a rank that are shorter than the batch size."""
    if planned.opened.unknown_rows is not None:
        return None
    if planned.options.drop_last:
        return 0
    size = planned.options.batch_size
    whole = (_progress(planned, rank.rank).batches(size, drop_last=True) for rank in ranks)
    return max(rank.steps - full for rank, full in zip(ranks, whole, strict=True) if rank.steps is not None)


def _memory(planned: PlannedEpoch, files: FilesSummary) -> MemoryBound:
    """Return the bound that the guide states, for these files."""
    options, topology = planned.options, planned.topology
    is_mapped = planned.opened.storage.is_local and options.memory_map is not False
    decoded = topology.streams_per_turn * memory_bound(
        planned.plan,
        shuffles_rows=options.plan.shuffles_rows,
        row_bytes=files.row_bytes,
        read_ahead_bytes=options.read_ahead_bytes,
        fetched_row_bytes=0 if is_mapped else files.stored_bytes / max(1, files.expected_rows),
    )
    if not options.plan.shuffles_rows:  # virtual streams of a worker share its budget
        decoded = min(decoded, topology.processes * options.read_ahead_bytes)
    block = max(BLOCK_BYTES, int(options.batch_size * files.row_bytes))
    shared = topology.num_workers * BLOCKS_OF_A_WORKER * block
    return MemoryBound(decoded, shared, decoded + shared)


def save_manifest(planned: PlannedEpoch, path: str, storage_options: Mapping[str, Any] | None) -> int:
    """Write the files and their footers, for ``create_dataloader(manifest=...)``, and return how many bytes they are.

    Raises:
        ValueError: If a file's URL has a query or a user name, which may be secret.
    """
    content = dump_opened(planned.opened)
    write_file(path, content, storage_options)
    return len(content)
