"""Show which step a row goes into, on which rank, and where in the batch.

Computed from the plan. No rows are read, unless --scan is given.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from torch_dataloader_utils.cli.options import add_checkpoint, add_dataset_of_checkpoint, not_negative
from torch_dataloader_utils.cli.report import Block, Cell, Facts, Line, Report, Table, Text, count, plain, size

if TYPE_CHECKING:
    from torch_dataloader_utils.planning.ledger.row_steps import RowStep


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoint and the row."""
    add_checkpoint(parser)
    parser.add_argument("file", metavar="FILE", help="the file, relative to the dataset's root or with it")
    parser.add_argument("row", metavar="ROW", type=not_negative, help="the row's number in the file, from 0")
    add_dataset_of_checkpoint(parser)
    parser.set_defaults(rank=None)


def run(arguments: argparse.Namespace) -> Report:
    """Return the step of a row."""
    from torch_dataloader_utils.cli.checkpoint_dataset import open_checkpoint
    from torch_dataloader_utils.planning.manifest import root_prefix

    opened = open_checkpoint(arguments)
    path = arguments.file.removeprefix(root_prefix(opened.root))
    epoch = opened.dataset.epoch if arguments.epoch is None else arguments.epoch
    found = opened.dataset.step_of(path, arguments.row, epoch, scan=arguments.scan)
    steps = [] if found is None else [found, *found.others]
    delivered = [opened.delivered(step.epoch, step.step, step.rank) for step in steps]
    value = {
        "root": opened.root,
        "file": path,
        "row": arguments.row,
        "epoch": epoch,
        "steps": [
            {name: item for name, item in plain(step).items() if name not in ("others", "bytes_read")}
            | {"delivered": was}
            for step, was in zip(steps, delivered, strict=True)
        ],
        "bytes_read": 0 if found is None else found.bytes_read,
    }
    return Report(value, _blocks(value, steps, delivered))


def _blocks(value: dict[str, Any], steps: list[RowStep], delivered: list[bool | None]) -> list[Block]:
    title = f"{value['root']}: row {value['row']:,} of {value['file']}, epoch {value['epoch']:,}"
    if not steps:
        return [Line(title), Line("No step has this row: the epoch leaves it out.", "warning")]
    said: dict[bool | None, Text] = {
        True: Cell("delivered", "good"),
        False: Cell("to come", "plain"),
        None: Cell("?", "dim"),
    }
    rows = [
        [count(step.rank), count(step.step), count(step.worker), count(step.place), said[was]]
        for step, was in zip(steps, delivered, strict=True)
    ]
    columns = ["rank", "step", "worker", "place in the batch", "at the checkpoint"]
    facts: list[tuple[str, Text]] = [("bytes of data read", size(value["bytes_read"]))]
    return [Table(columns, rows, title, left=frozenset({"at the checkpoint"})), Facts(facts)]
