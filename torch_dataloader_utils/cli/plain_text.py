"""Blocks as lines of plain text, in which columns stand below one another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch_dataloader_utils.cli.report import Block, Facts, Line, Raw, Table, words
from torch_dataloader_utils.errors import printable


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
                yield from lines_of_table(block)


def lines_of_table(table: Table) -> Iterator[str]:
    """Yield a table as lines of plain text, however long they become."""
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
