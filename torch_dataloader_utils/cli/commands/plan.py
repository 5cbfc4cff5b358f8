"""Show what an epoch would look like: files, row groups, shards, who reads how much, steps, memory, and advice.

Reads the footers of the files, and none of their rows.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from torch_dataloader_utils.cli.options import (
    add_columns,
    add_format,
    add_path,
    add_storage_option,
    dataset_parameters,
    positive,
    ranks,
    storage_options,
    workers,
)
from torch_dataloader_utils.cli.report import Block, Cell, Facts, Line, Report, Table, Text, count, plain, plural, size
from torch_dataloader_utils.cli.setting_options import add_shuffle, shuffle, svg
from torch_dataloader_utils.cli.written import require_writable

if TYPE_CHECKING:
    from torch_dataloader_utils.cli.advice import Advice
    from torch_dataloader_utils.cli.epoch_plan import EpochSummary, FilesSummary, RankSummary, Sizes

MOST_RANKS = 16
"""Ranks that the text shows; JSON has them all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the dataset, the settings of a loader, and where to save what was found."""
    add_path(parser)
    add_format(parser)
    parser.add_argument("--count-rows", action="store_true", help="read text files once, and count their rows")
    add_columns(parser)
    add_storage_option(parser)
    parser.add_argument("--ranks", type=ranks, default=1, metavar="N", help="number of ranks (default: 1)")
    parser.add_argument("--workers", type=workers, metavar="N", help="worker processes of each rank")
    parser.add_argument("--virtual-ranks", type=ranks, metavar="N", help="ranks of a virtual topology")
    parser.add_argument("--virtual-workers", type=ranks, metavar="N", help="workers of each virtual rank")
    parser.add_argument("--batch-size", type=positive, metavar="ROWS", help="rows in a batch of a rank (default: 1024)")
    parser.add_argument("--drop-last", action="store_true", help="leave out short batches")
    add_shuffle(parser)
    parser.add_argument("--interleave", type=positive, metavar="N", help="row groups that share a buffer (default: 8)")
    parser.add_argument("--split-bytes", metavar="BYTES", help="bytes of a shard, such as 64MiB (default: 128MiB)")
    parser.add_argument(
        "--uneven", choices=["allow", "drop", "pad"], default="allow", help="rows that do not divide (default: allow)"
    )
    parser.add_argument("--plot", type=svg, metavar="FILE", help="write a picture, as SVG, of who reads what")
    parser.add_argument("--save", metavar="FILE", help="write a manifest, for create_dataloader(manifest=...)")


def loader_parameters(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what ``create_dataloader`` takes of these arguments."""
    given = {
        "num_workers": arguments.workers,
        "batch_size": arguments.batch_size,
        "virtual_ranks": arguments.virtual_ranks,
        "virtual_workers": arguments.virtual_workers,
        "shuffle_interleave": arguments.interleave,
        "split_bytes": arguments.split_bytes,
    }
    fixed = {"num_ranks": arguments.ranks, "rank": 0, "uneven_ranks": arguments.uneven}
    flags = {"drop_last": arguments.drop_last, "count_rows": arguments.count_rows}
    asked = {name: value for name, value in (given | shuffle(arguments)).items() if value is not None}
    return dataset_parameters(arguments) | fixed | flags | asked


def run(arguments: argparse.Namespace) -> Report:
    """Plan an epoch."""
    from torch_dataloader_utils.cli.advice import advise
    from torch_dataloader_utils.cli.epoch_plan import plan_epoch, summarise

    for path in (arguments.save, arguments.plot):
        require_writable(path, storage_options(arguments))
    planned = plan_epoch(loader_parameters(arguments))
    summary = summarise(planned)
    advice = advise(summary, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    written: list[Block] = []
    if arguments.save is not None:
        from torch_dataloader_utils.cli.epoch_plan import save_manifest

        written_bytes = save_manifest(planned, arguments.save, storage_options(arguments))
        written.append(Line(f"Manifest: {arguments.save}, {size(written_bytes)}"))
    if arguments.plot is not None:
        from torch_dataloader_utils.cli.plan_plot import draw_plan

        draw_plan(planned, arguments.plot, storage_options(arguments))
        written.append(Line(f"Picture: {arguments.plot}"))
    value = plain(summary) | {"advice": plain(advice)}
    return Report(value, [*_blocks(summary), *_advice(advice), *written])


def _blocks(summary: EpochSummary) -> list[Block]:
    return [
        Facts(_file_facts(summary.files), summary.files.root),
        Facts(_epoch_facts(summary), "Epoch"),
        _ranks(summary),
    ]


def _file_facts(files: FilesSummary) -> list[tuple[str, Text]]:
    rows = f"not counted, about {count(files.expected_rows)}" if files.rows is None else count(files.rows)
    facts: list[tuple[str, Text]] = [
        ("files", f"{count(files.files)} ({files.format}), {size(files.stored_bytes)}"),
        ("rows", rows),
        (
            "row groups",
            f"{count(files.row_groups)} of {_range(files.row_group_rows)} rows, {_bytes(files.row_group_bytes)}",
        ),
    ]
    if files.read_bytes is not None and files.decoded_bytes is not None:
        text = f"{size(files.read_bytes)} read, {size(files.decoded_bytes)} in memory"
        facts.append(("an epoch", f"{text} (the delivered columns)"))
    return facts


def _epoch_facts(summary: EpochSummary) -> list[tuple[str, Text]]:
    options, memory = summary.options, summary.memory
    steps = [rank.steps for rank in summary.ranks if rank.steps is not None]
    facts: list[tuple[str, Text]] = [
        ("read by", f"{plural(len(summary.ranks), 'rank')} × {plural(options['num_workers'], 'worker')}"),
        ("order", _order(summary)),
        ("shards", f"{count(summary.shards)} of {_range(summary.shard_rows)} {summary.files.unit}"),
        ("steps of a rank", _of(steps) if steps else "only reading tells"),
    ]
    if options["virtual_ranks"]:
        facts.insert(1, ("planned for", f"{options['virtual_ranks']} × {options['virtual_workers']} virtual workers"))
    if summary.short_batches:
        facts.append(("short batches", f"at most {count(summary.short_batches)} of a rank"))
    if options["uneven_ranks"] != "allow":
        verb, rows = (
            ("left out", summary.rows_dropped)
            if options["uneven_ranks"] == "drop"
            else ("repeated", summary.rows_repeated)
        )
        facts.append(("uneven rows", f"{count(rows)} {verb}"))
    whole = f"{size(memory.rank)} a rank"
    if memory.shared:
        whole += f": {size(memory.decoded)} of rows, {size(memory.shared)} of shared memory"
    return [*facts, ("memory, at most", whole)]


def _order(summary: EpochSummary) -> str:
    options = summary.options
    if not options["shuffle"]:
        return "as in the files"
    if options["shuffle_buffer_size"] is None:
        return "shards shuffled"
    return f"rows shuffled, {count(options['shuffle_buffer_size'])} together"


def _ranks(summary: EpochSummary) -> Table:
    rows = [_rank_row(rank, summary) for rank in summary.ranks[:MOST_RANKS]]
    left = len(summary.ranks) - len(rows)
    note = f"and {plural(left, 'rank')} more: --json has all" if left else ""
    unit = summary.files.unit
    return Table(["rank", "shards", unit, "of all", "steps", f"{unit} of a worker"], rows, "Balance", note=note)


def _rank_row(rank: RankSummary, summary: EpochSummary) -> list[str | Cell]:
    total = max(1, sum(other.rows for other in summary.ranks))
    share = f"{100 * rank.rows / total:.2f} %"
    workers: str | Cell = _of(rank.worker_rows)
    if 0 in rank.worker_rows:
        idle = rank.worker_rows.count(0)
        workers = Cell(f"{_of(rank.worker_rows)}, {count(idle)} idle", "warning")
    steps = "?" if rank.steps is None else count(rank.steps)
    return [count(rank.rank), count(rank.shards), count(rank.rows), share, steps, workers]


def _advice(advice: list[Advice]) -> list[Block]:
    if not advice:
        return [Line("Advice: none. Files and settings fit each other.", "good")]
    pairs = [((one.about, Cell(one.text, "warning")), ("", Cell(one.reason, "dim"))) for one in advice]
    return [Facts([fact for pair in pairs for fact in pair], "Advice")]


def _range(sizes: Sizes) -> str:
    return count(sizes.least) if sizes.least == sizes.most else f"{count(sizes.least)} to {count(sizes.most)}"


def _bytes(sizes: Sizes) -> str:
    least, most = size(sizes.least), size(sizes.most)
    return most if least == most else f"{least} to {most}"


def _of(numbers: list[int] | tuple[int, ...]) -> str:
    least, most = min(numbers), max(numbers)
    return count(most) if least == most else f"{count(least)} to {count(most)}"
