"""Show which rows go into a step: by file, and the numbers of the rows in it.

Computed from the plan. No rows are read, unless --scan is given.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch_dataloader_utils.cli.option_names import in_options
from torch_dataloader_utils.cli.options import add_checkpoint, add_dataset_of_checkpoint, not_negative
from torch_dataloader_utils.cli.parser import options_of
from torch_dataloader_utils.cli.report import Block, Facts, Line, Report, Table, Text, count, size
from torch_dataloader_utils.errors import LedgerUnknownError

if TYPE_CHECKING:
    from torch_dataloader_utils.cli.checkpoint_dataset import CheckpointDataset
    from torch_dataloader_utils.planning.ledger.row_steps import Rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoint, the step, and the rank."""
    add_checkpoint(parser)
    parser.add_argument("step", metavar="STEP", type=not_negative, help="the step of a rank, from 0 in the epoch")
    parser.add_argument("--rank", type=not_negative, metavar="N", help="the rank (default: all ranks)")
    add_dataset_of_checkpoint(parser)


def run(arguments: argparse.Namespace) -> Report:
    """Return the rows of a step."""
    from torch_dataloader_utils.cli.checkpoint_dataset import open_checkpoint

    opened = open_checkpoint(arguments)
    epoch = opened.dataset.epoch if arguments.epoch is None else arguments.epoch
    found, unknown = _rows_at(opened, arguments, epoch)
    value = {
        "root": opened.root,
        "epoch": epoch,
        "step": arguments.step,
        "skipped": opened.skips(epoch, arguments.step),
        "ranks": [
            {"rank": rank, "delivered": opened.delivered(epoch, arguments.step, rank)}
            | {"files": rows.files, "rows": rows.rows}
            for rank, rows in found.items()
        ],
        "unknown": unknown,
        "bytes_read": sum(rows.bytes_read for rows in found.values()),
    }
    return Report(value, _blocks(value, found))


def _rows_at(
    opened: CheckpointDataset, arguments: argparse.Namespace, epoch: int
) -> tuple[dict[int, Rows], dict[int, str]]:
    """Return the rows of the step on each rank, and why there are none where there are none.

    Raises:
        LedgerUnknownError: If nothing is known of any rank, or of the rank that was asked for.
        ValueError: If no rank makes the step, or not the one that was asked for.
    """
    found: dict[int, Rows] = {}
    unknown: dict[int, str] = {}
    ranks = range(opened.dataset.num_ranks) if arguments.rank is None else [arguments.rank]
    for rank in ranks:
        try:
            found[rank] = opened.dataset.rows_at(arguments.step, epoch, rank, scan=arguments.scan)
        except (LedgerUnknownError, ValueError) as error:  # noqa: PERF203 - each rank has its own
            if rank == ranks[-1] and not found:
                raise
            unknown[rank] = in_options(str(error), options_of("rows"))
    return found, unknown


def _blocks(value: dict[str, Any], found: dict[int, Rows]) -> list[Block]:
    facts: list[tuple[str, Text]] = [
        ("epoch", count(value["epoch"])),
        ("step", count(value["step"])),
        ("rows", count(sum(map(len, found.values())))),
        ("bytes of data read", size(value["bytes_read"])),
    ]
    table = [line for of_rank in value["ranks"] for line in _lines(of_rank, found[of_rank["rank"]])]
    columns = ["rank", "file", "rows", "numbers of the rows"]
    note = "--json has the rows in the order of the batch"
    left = frozenset({"file", "numbers of the rows"})
    unknown = [Line(f"Rank {rank}: {why}", "warning") for rank, why in value["unknown"].items()]
    return [Facts(facts, value["root"]), Table(columns, table, left=left, note=note), *unknown, *_status(value)]


def _lines(of_rank: dict[str, Any], rows: Rows) -> list[list[Text]]:
    by_file: dict[str, list[int]] = {}
    for path, row in rows:
        by_file.setdefault(path, []).append(row)
    return [
        [count(of_rank["rank"]), path, count(len(numbers)), ranges(sorted(numbers))]
        for path, numbers in sorted(by_file.items())
    ]


def _status(value: dict[str, Any]) -> list[Block]:
    if value["skipped"]:
        return [Line("Skipped: loaders do not deliver this step under its number.", "warning")]
    known = {of_rank["delivered"] for of_rank in value["ranks"]}
    if known == {True}:
        return [Line("Delivered before the checkpoint was saved.")]
    if known == {False}:
        return [Line("Yet to come when the checkpoint was saved.")]
    return []


def ranges(numbers: Sequence[int]) -> str:
    """Return rising numbers with neighbours joined: 0-99, 120, 130-131."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in found)
