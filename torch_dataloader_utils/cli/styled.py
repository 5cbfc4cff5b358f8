"""Reports on a terminal, by rich: colours, and tables that fit the width; plain text where it is too narrow for one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TextIO

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text as RichText

from torch_dataloader_utils.cli.plain_text import lines_of_table
from torch_dataloader_utils.cli.report import Block, Cell, Facts, Line, Raw, Table, Text, words
from torch_dataloader_utils.errors import printable

STYLES = {"plain": "", "good": "green", "warning": "yellow", "bad": "bold red", "dim": "dim"}

LEAST_TEXT = 10
"""Texts are folded into so many characters of a line, at least; numbers never are."""

BESIDE = 3
"""What a column takes of a line beside its texts: two spaces and a border."""


def print_styled(blocks: Sequence[Block], out: TextIO) -> None:
    """Print blocks on a terminal, without colours where the user has refused them: https://no-color.org."""
    print_blocks(blocks, Console(file=out, color_system=None if os.environ.get("NO_COLOR") else "auto"))


def print_blocks(blocks: Sequence[Block], console: Console) -> None:
    """Print blocks with rich."""
    previous: Block | None = None
    for block in blocks:
        if previous is not None and not (isinstance(block, Line) and isinstance(previous, Line)):
            console.print()
        previous = block
        match block:
            case Raw():
                console.out(block.text, highlight=False)
            case Line():
                console.print(RichText(printable(block.text), style=STYLES[block.tone]))
            case Facts():
                _print_facts(block, console)
            case Table():
                _print_table(block, console)


def _print_facts(facts: Facts, console: Console) -> None:
    if facts.title:
        console.print(RichText(facts.title, style="bold"))
    grid = RichTable.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts.rows:
        grid.add_row(f"  {name}", _text(value))
    console.print(grid)


def _print_table(table: Table, console: Console) -> None:
    widths = [max(cell_len(words(text)) for text in column) for column in zip(table.columns, *table.rows, strict=True)]
    is_left = [name in table.left for name in table.columns]
    least = sum(min(width, LEAST_TEXT) if left else width for width, left in zip(widths, is_left, strict=True))
    if least + BESIDE * len(widths) + 1 > console.width:  # rich would cut numbers off
        console.out("\n".join(lines_of_table(table)), highlight=False)
        return
    if table.title:
        console.print(RichText(table.title, style="bold"))
    shown = RichTable(box=box.ROUNDED, border_style="dim", header_style="bold")
    for name, left in zip(table.columns, is_left, strict=True):
        shown.add_column(RichText(name), justify="left" if left else "right", overflow="fold", no_wrap=not left)
    for row in table.rows:
        shown.add_row(*map(_text, row))
    console.print(shown)
    if table.note:
        console.print(RichText(f"  {table.note}", style="dim"))


def _text(text: Text) -> RichText:
    return RichText(words(text), style=STYLES[text.tone] if isinstance(text, Cell) else "")
