"""Say how well the labels of a column are mixed for some shuffle buffers, and what each buffer costs.

The order of rows follows from the files and the options, so only the label column is read, once. Of a batch of so many
rows the effective rows are how many rows drawn at random have as much variety of labels: all of them for a uniform
shuffle, one if each batch has a single label.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch_dataloader_utils.cli import options, setting_options
from torch_dataloader_utils.cli.report import Block, Cell, Facts, Line, Report, Table, count, plural, rate, size
from torch_dataloader_utils.cli.status_line import status_line
from torch_dataloader_utils.cli.written import require_writable

if TYPE_CHECKING:
    from torch_dataloader_utils.cli.mixing import Mixing

BAR = 10
MOST_SHOWN = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the files, the label, and what the training does with them."""
    options.add_path(parser)
    parser.add_argument("--label", required=True, metavar="COLUMN", help="the column whose values are to be mixed")
    parser.add_argument(
        "--buffers",
        type=setting_options.sizes,
        metavar="ROWS,...",
        help="values of shuffle_buffer_size to compare",
    )
    parser.add_argument("--batch-size", type=options.positive, default=1024, metavar="N", help="default: 1024")
    parser.add_argument("--ranks", type=options.ranks, default=1, metavar="N", help="default: 1")
    parser.add_argument("--workers", type=options.workers, default=0, metavar="N", help="of each rank (default: 0)")
    parser.add_argument(
        "--interleave", type=options.positive, default=8, metavar="N", help="shuffle_interleave (default: 8)"
    )
    parser.add_argument("--split-bytes", default="128MiB", metavar="BYTES", help="bytes of a shard (default: 128MiB)")
    parser.add_argument(
        "--within",
        type=setting_options.percent,
        default=10,
        metavar="%",
        help="how near to a uniform shuffle (default: 10)",
    )
    parser.add_argument(
        "--measure", type=setting_options.seconds, metavar="S", help="also measure each rate, for S seconds"
    )
    parser.add_argument("--plot", type=setting_options.svg, metavar="FILE", help="write a picture, as SVG")
    options.add_format(parser)
    options.add_columns(parser)
    options.add_storage_option(parser)


def run(arguments: argparse.Namespace) -> Report:
    """Compare the orders."""
    from torch_dataloader_utils.cli.mixing import MixingOptions, mixing
    from torch_dataloader_utils.cli.mixing_plot import draw_mixing

    require_writable(arguments.plot, options.storage_options(arguments))
    wanted = MixingOptions(
        batch_size=arguments.batch_size,
        ranks=arguments.ranks,
        workers=arguments.workers,
        buffer_sizes=arguments.buffers,
        within=arguments.within / 100,
        seconds=arguments.measure,
    )
    with status_line("tdu mixing") as show:
        found = mixing(
            arguments.path,
            arguments.label,
            wanted,
            columns=arguments.columns,
            progress=show,
            format=arguments.format,
            partitioning=arguments.partitioning,
            shuffle_interleave=arguments.interleave,
            split_bytes=arguments.split_bytes,
            storage_options=options.storage_options(arguments),
        )
    blocks = list(_blocks(found))
    if arguments.plot is not None:
        draw_mixing(found, arguments.plot, options.storage_options(arguments))
        blocks.append(Line(f"Picture: {arguments.plot}"))
    return Report(found, blocks)


def _blocks(found: Mixing) -> Iterator[Block]:
    wanted = found.options
    shown = ", ".join(f"{name} ({share / found.rows:.1%})" for name, share in found.labels[:MOST_SHOWN])
    more = f", and {len(found.labels) - MOST_SHOWN} more" if len(found.labels) > MOST_SHOWN else ""
    facts = [
        ("files", f"{plural(found.files, 'file')} in {found.root}, {plural(found.rows, 'row')}"),
        ("row groups", plural(found.row_groups, "row group")),
        ("labels", f"{found.column}: {shown}{more}"),
        *([("", found.described)] if found.described else []),
        (
            "batches",
            f"{count(wanted.batch_size)} rows; {plural(wanted.ranks, 'rank')} with {plural(wanted.workers, 'worker')}",
        ),
    ]
    yield Facts(facts)
    columns = ["order", "together", "effective rows", "of a batch", "memory"]
    rows = []
    for number, one in enumerate(found.orders):
        texts = [
            str(one.order),
            count(one.rows_together) if one.rows_together else "",
            f"{one.mixing.effective_rows:,.1f}",
            f"{_bar(one.effective_part)} {one.effective_part:6.1%}",
            size(one.memory_bytes),
            *_speed(one.rows_per_s, found.orders[0].rows_per_s),
        ]
        rows.append([Cell(text, "good") if number == found.advised else text for text in texts])
    note = "Effective rows: as many rows drawn at random have as much variety of labels as a batch has. Together: rows "
    note += "that are shuffled together. Memory: of the rows that a rank holds."
    columns += ["rows/s"] if wanted.seconds is not None else []
    yield Table(columns, rows, left=frozenset(["order", "of a batch"]), note=note)
    yield Line(f"Advice: {found.advice}", "good" if found.advised is not None else "warning")


def _speed(rows_per_s: float | None, in_file_order: float | None) -> list[str]:
    """Return a rate, also as a part of that in file order, if both were measured."""
    if rows_per_s is None or in_file_order is None:
        return []
    return [f"{rate(rows_per_s)} ({rows_per_s / in_file_order:.0%})"]


def _bar(part: float) -> str:
    """Return a bar of a part of one."""
    filled = round(BAR * min(1.0, part))
    return "█" * filled + "░" * (BAR - filled)
