"""Tables of Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["table"]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Give the lines of a table."""
    yield f"| {' | '.join(header)} |"
    yield f"| {' | '.join('---' for _ in header)} |"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""
