"""What a command is doing, in one line on a terminal that is overwritten. Nothing elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch_dataloader_utils.errors import printable

CLEAR = "\r\x1b[K"


@contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """Yield what shows a text on standard error, if that is a terminal; remove it at the end."""
    out = sys.stderr
    is_shown = out is not None and out.isatty() and os.environ.get("TERM") != "dumb"

    def show(text: str) -> None:
        if is_shown:
            columns = os.get_terminal_size(out.fileno()).columns or 80
            out.write(f"{CLEAR}{printable(text)[: columns - 1]}")
            out.flush()

    try:
        yield show
    finally:
        show("")
