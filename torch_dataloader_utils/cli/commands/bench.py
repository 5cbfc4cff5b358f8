"""Measure how fast the loader reads these files, beside Arrow alone, and say which setting to use.

Every number of workers is measured with every batch size, in turns with Arrow alone, which decodes the same columns.
Files that are too large for the time are read in part.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch_dataloader_utils.cli import options, setting_options
from torch_dataloader_utils.cli.report import Block, Cell, Facts, Line, Report, Table, Text, count, plural, rate, size
from torch_dataloader_utils.cli.status_line import status_line

if TYPE_CHECKING:
    from torch_dataloader_utils.cli.bench import Bench, Measured


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the files, the settings to measure, and how long to measure them."""
    options.add_path(parser)
    options.add_format(parser)
    options.add_columns(parser)
    setting_options.add_shuffle(parser)
    parser.add_argument(
        "--workers",
        type=setting_options.counts,
        metavar="N,...",
        help="numbers of worker processes (default: 0,2,4 or fewer)",
    )
    parser.add_argument(
        "--batch-sizes", type=setting_options.sizes, metavar="N,...", help="rows in a batch (default: 256,1024,4096)"
    )
    parser.add_argument(
        "--seconds", type=setting_options.seconds, metavar="S", help="how long each measurement runs (default: 1)"
    )
    parser.add_argument("--rounds", type=options.positive, metavar="N", help="how often each is repeated (default: 3)")
    parser.add_argument(
        "--output-format",
        choices=setting_options.OUTPUT_FORMATS,
        default="torch",
        help="what a batch is (default: torch)",
    )
    options.add_storage_option(parser)


def run(arguments: argparse.Namespace) -> Report:
    """Measure."""
    from torch_dataloader_utils.cli.bench import BenchOptions, bench

    given = {name: getattr(arguments, name) for name in ("workers", "batch_sizes", "seconds", "rounds")}
    wanted = BenchOptions(**{name: value for name, value in given.items() if value is not None})
    with status_line(f"tdu bench, about {wanted.announced_seconds:.0f} s") as show:
        found = bench(
            arguments.path,
            wanted,
            progress=show,
            columns=arguments.columns,
            format=arguments.format,
            partitioning=arguments.partitioning,
            output_format=arguments.output_format,
            storage_options=options.storage_options(arguments),
            **setting_options.shuffle(arguments),
        )
    return Report(found, list(_blocks(found)))


def _blocks(found: Bench) -> Iterator[Block]:
    rows = "rows not counted" if found.rows is None else plural(found.rows, "row")
    decoded = "" if found.decoded_row_bytes is None else f", {found.decoded_row_bytes:.1f} B decoded"
    facts = [
        ("files", f"{plural(found.files, 'file')} in {found.root}, {rows}"),
        ("columns", plural(len(found.columns), "column")),
        ("a row", f"{found.stored_row_bytes:.1f} B stored{decoded}"),
        ("opened in", _time(found.open_s)),
    ]
    yield Facts(facts)
    columns = ["workers", "batch", "rows/s", "from - to", "decoded/s", "stored/s", "first batch", "of raw"]
    rows_of_table: list[list[Text]] = [] if found.raw is None else [["raw Arrow", "", *_figures(found.raw)]]
    for one in found.measured:
        assert one.setting is not None  # noqa: S101 - Arrow alone is not among them
        is_advised = one.setting == found.advice.setting
        texts = [count(one.setting.workers), count(one.setting.batch_size), *_figures(one)]
        rows_of_table.append([Cell(text, "good" if is_advised else "plain") for text in texts])
    note = (
        f"Medians of {plural(found.rounds, 'round')}. Rates do not count the time to the first batch. Of raw: a part "
    )
    note += "of raw Arrow's rate."
    yield Table(columns, rows_of_table, left=frozenset(["workers"]), note=note)
    advised = found.advice.setting
    yield Line(f"Advice: num_workers={advised.workers}, batch_size={advised.batch_size}", "good")
    yield Line(f"{found.advice.reason}.")
    yield from (Line(note, "warning") for note in found.notes)


def _figures(one: Measured) -> list[str]:
    rates = one.rows_per_s
    return [
        count(round(rates.median)),
        f"{rate(rates.low)} - {rate(rates.high)}",
        "" if one.decoded_bytes_per_s is None else size(one.decoded_bytes_per_s),
        size(one.stored_bytes_per_s),
        _time(one.first_batch_s.median),
        "" if one.of_raw is None else f"{one.of_raw.median:.2f}",
    ]


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
