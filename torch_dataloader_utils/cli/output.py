"""Reports as text or JSON, on standard output: aligned plain text, or tables of rich on a terminal."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from torch_dataloader_utils.cli.report import Block, Facts, Line, Raw, Report, Table, plain, words
from torch_dataloader_utils.errors import printable


def print_report(report: Report, *, as_json: bool) -> None:
    """Print a report on standard output."""
    out = sys.stdout
    if as_json:
        out.write(json.dumps(plain(report.value), indent=2) + "\n")
    elif is_styled(out):
        from torch_dataloader_utils.cli.styled import print_styled

        print_styled(report.blocks, out)
    else:
        out.write("".join(f"{line}\n" for line in lines_of(report.blocks)))
    out.flush()


def is_styled(out: TextIO) -> bool:
    """Whether rich is to print: it is installed, and this is a terminal that can do more than print characters."""
    has_rich = importlib.util.find_spec("rich") is not None
    return out.isatty() and os.environ.get("TERM") != "dumb" and has_rich


def lines_of(blocks: Sequence[Block]) -> Iterator[str]:
    """Yield blocks as lines of plain text, with an empty line before each table and after it."""
    previous: Block | None = None
    for block in blocks:
        if previous is not None and not (isinstance(block, Line) and isinstance(previous, Line)):
            yield ""
        previous = block
        match block:
            case Raw():
                yield block.text
            case Line():
                yield printable(block.text)
            case Facts():
                yield from [block.title] if block.title else []
                yield from aligned([(f"  {name}", words(value)) for name, value in block.rows], {0, 1})
            case Table():
                yield from _table(block)


def _table(table: Table) -> Iterator[str]:
    if table.title:
        yield table.title
    left = {index for index, name in enumerate(table.columns) if name in table.left}
    rows = [list(table.columns), *([words(text) for text in row] for row in table.rows)]
    yield from (f"  {line}" for line in aligned(rows, left))
    if table.note:
        yield f"  {table.note}"


def aligned(rows: Sequence[Sequence[str]], left: set[int]) -> Iterator[str]:
    """Yield each row as a line in which columns stand below one another."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            text.ljust(width) if index in left else text.rjust(width)
            for index, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()
