"""A line on standard error that says what a long command does now, on a terminal alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

CLEAR = "\r\x1b[K"
MOST_CHARACTERS = 78


@contextmanager
def status_line(name: str) -> Iterator[Callable[[str], None]]:
    """Within it, the function that it yields draws the line. It is gone at the end."""
    is_shown = sys.stderr is not None and sys.stderr.isatty()

    def draw(text: str) -> None:
        if is_shown:
            sys.stderr.write(f"{CLEAR}{text}")
            sys.stderr.flush()

    try:
        yield lambda text: draw(f"{name}: {text}"[:MOST_CHARACTERS])
    finally:
        draw("")
