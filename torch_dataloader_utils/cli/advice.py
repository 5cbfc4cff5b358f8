"""What a planned epoch suggests to change, each with its reason in numbers. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch_dataloader_utils.cli.epoch_plan import EpochSummary
from torch_dataloader_utils.cli.report import count, plural, size
from torch_dataloader_utils.reading.sequential import budget_for_whole

SHARDS_PER_WORKER = 4
"""With as many shards for each worker, all workers end at about the same time."""

WELL_MIXED = 16
"""Row groups whose rows are shuffled together, from which on a batch of sorted files is mixed well."""

MANY_ROW_GROUPS = 100
FEW_ROWS = 1_000
FEW_BYTES = 64 * 1024
"""Many row groups with fewer rows and fewer bytes cost more to open than to read."""

MANY_SHORT = 0.1
"""The share of short batches from which on they are worth a word."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What to change, and why.

    Attributes:
        about: The subject, in one or two words.
        text: What to change.
        reason: The numbers that it follows from.
    """

    about: str
    text: str
    reason: str


def advise(summary: EpochSummary, machine_bytes: int | None = None) -> list[Advice]:
    """Return what to change; `machine_bytes` is the memory of this machine."""
    found = [*_workers(summary), *_ranks(summary), *_shuffling(summary), *_row_groups(summary), *_batches(summary)]
    return found + list(_memory(summary, machine_bytes))


def _workers(summary: EpochSummary) -> Iterator[Advice]:
    """Advise where workers have nothing, or unequal amounts, to read."""
    workers = [rows for rank in summary.ranks for rows in rank.worker_rows]
    streams, groups = len(workers), summary.files.row_groups
    if streams == 1:
        return
    what = f"{plural(streams, 'process', 'processes')} that read ({_grid(summary)})"
    idle = workers.count(0)
    target = summary.files.expected_rows // (streams * SHARDS_PER_WORKER)
    smaller = "use fewer workers"
    if _may_be_as_small(summary, target):
        smaller = f"write row groups of about {count(target)} rows, or {smaller}"
    if idle:
        reason = f"{plural(groups, 'row group')} for {what}: {count(idle)} of them have nothing to read"
        yield Advice("workers", smaller, reason)
    elif groups < streams * SHARDS_PER_WORKER and max(workers) > 1.1 * sum(workers) / streams:
        share = max(workers) * streams / sum(workers)
        reason = f"{plural(groups, 'row group')} for {what}; the busiest reads {share:.2f} times the mean"
        yield Advice("workers", smaller, reason)


def _grid(summary: EpochSummary) -> str:
    workers = summary.options["num_workers"]
    ranks = plural(len(summary.ranks), "rank")
    return f"{ranks} × {plural(workers, 'worker')}" if workers else f"{ranks} without workers"


def _ranks(summary: EpochSummary) -> Iterator[Advice]:
    """Advise where ranks make different numbers of steps."""
    steps = [rank.steps for rank in summary.ranks if rank.steps is not None]
    if not steps:
        if len(summary.ranks) > 1:
            text = "stop the ranks together with distributed.in_step(loader), or count the rows (--count-rows)"
            yield Advice("ranks", text, "only reading tells how many steps each rank makes")
    elif min(steps) < max(steps):
        text = "use --uneven drop, or --uneven pad: then all ranks make as many steps"
        reason = f"ranks make {count(min(steps))} to {count(max(steps))} steps, and a DDP loop waits for all of them"
        yield Advice("ranks", text, reason)


def _shuffling(summary: EpochSummary) -> Iterator[Advice]:
    """Advise where rows of few row groups are shuffled together."""
    options, groups = summary.options, summary.files.row_groups
    buffer, rows = options["shuffle_buffer_size"], summary.files.row_group_rows
    if not options["shuffle"]:
        return
    if buffer is None:
        if options["batch_size"] < rows.most:
            text = "use --buffer if files are sorted, such as by label: it shuffles rows"
            reason = f"only shards come in random order; a batch of {count(options['batch_size'])} rows is from one "
            reason += f"row group of {count(rows.median)}"
            yield Advice("shuffling", text, reason)
        return
    assert summary.shuffled_together is not None  # noqa: S101 - rows are shuffled
    together = summary.shuffled_together.median
    if together < min(WELL_MIXED, groups):
        target = max(1, buffer // WELL_MIXED)
        yield Advice("shuffling", *_mix_more(summary, together, target))
    largest = summary.shard_rows.most
    if summary.most_rounds == 1 and largest < buffer // 2 and summary.shards > 1:
        text = "use fewer workers, or a larger --split-bytes, if rows are to mix more widely"
        reason = f"shards have at most {count(largest)} rows, not the {count(buffer)} of the buffer, so that each of "
        reason += f"{plural(sum(len(rank.worker_rows) for rank in summary.ranks), 'process', 'processes')} gets one"
        yield Advice("shuffling", text, reason)


def _mix_more(summary: EpochSummary, together: int, target: int) -> tuple[str, str]:
    """Return what to change, and why, where rows of few row groups are shuffled together."""
    options, rows = summary.options, summary.files.row_group_rows
    reason = (
        f"rows of about {plural(together, 'row group')} are shuffled together; row groups have {count(rows.median)} "
    )
    reason += f"rows, the buffer {count(options['shuffle_buffer_size'])}"
    text = "use a larger --buffer"
    if _may_be_as_small(summary, target):
        text = f"write row groups of at most {count(target)} rows, or {text}"
    if summary.most_rounds > 1:
        text += f", or a larger --interleave than {options['shuffle_interleave']}"
    return text, reason


def _may_be_as_small(summary: EpochSummary, rows: int) -> bool:
    """Whether row groups can be written with so few rows, and still cost less to open than to read."""
    files = summary.files
    return files.has_row_groups and (rows >= FEW_ROWS or rows * files.row_bytes >= FEW_BYTES)


def _row_groups(summary: EpochSummary) -> Iterator[Advice]:
    """Advise where row groups are too large to be read whole, or too small."""
    files, ahead = summary.files, summary.options["read_ahead_bytes"]
    if not files.has_row_groups:
        return
    least = budget_for_whole(files.row_group_bytes.most)
    if least > ahead:
        text = f"write smaller row groups, or pass read_ahead_bytes of {size(least)} or more"
        reason = f"the largest row group takes {size(files.row_group_bytes.most)}, more than 4/9 of read_ahead_bytes "
        yield Advice("row groups", text, f"{reason}({size(ahead)}): it is read in parts, which is slower")
    is_small = files.row_group_rows.median < FEW_ROWS and files.row_group_bytes.median < FEW_BYTES
    if files.row_groups >= MANY_ROW_GROUPS and is_small:
        text = f"write row groups of {count(FEW_ROWS)} to {count(100 * FEW_ROWS)} rows"
        reason = f"half of the row groups have at most {plural(files.row_group_rows.median, 'row')} "
        yield Advice(
            "row groups", text, f"{reason}({size(files.row_group_bytes.median)}): opening costs more than reading"
        )


def _batches(summary: EpochSummary) -> Iterator[Advice]:
    """Advise where many batches are short."""
    steps = max((rank.steps or 0 for rank in summary.ranks), default=0)
    if summary.short_batches and steps > 1 and summary.short_batches > MANY_SHORT * steps:
        text = "use fewer workers, or a smaller --batch-size"
        reason = (
            f"{count(summary.short_batches)} of {count(steps)} batches of a rank are short: each worker ends with one"
        )
        yield Advice("batches", text, reason)


def _memory(summary: EpochSummary, machine_bytes: int | None) -> Iterator[Advice]:
    """Advise where a rank may need more than half of the memory of this machine."""
    bound = summary.memory.rank
    if machine_bytes is not None and bound > machine_bytes // 2:
        text = (
            "use fewer workers, or a smaller --buffer"
            if summary.options["shuffle_buffer_size"]
            else "use fewer workers"
        )
        yield Advice("memory", text, f"a rank may hold {size(bound)}; this machine has {size(machine_bytes)}")
