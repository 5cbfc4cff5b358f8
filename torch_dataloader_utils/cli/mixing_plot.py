"""The picture of `tdu mixing --plot`, as SVG: a bar for each order, and below it what the order costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from torch_dataloader_utils.cli.mixing import Mixing, OrderFound
from torch_dataloader_utils.cli.report import plural, rate, size
from torch_dataloader_utils.cli.written import write_file

BAR, GAP, HEIGHT, LEFT, TOP = 72, 28, 220, 64, 72
FONT = "system-ui,-apple-system,'Segoe UI',sans-serif"
COLORS = {True: "#2e7d32", False: "#5c7cba"}
"""Of the advised order, and of all others."""


def draw_mixing(found: Mixing, path: str, storage_options: Mapping[str, Any] | None) -> None:
    """Write the picture."""
    write_file(path, render(found).encode(), storage_options)


def render(found: Mixing) -> str:
    """Return the picture: how many random rows a batch is worth, as a part of its rows, for each order."""
    width = LEFT + len(found.orders) * (BAR + GAP) + GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {TOP + HEIGHT + 90}"'
    bars = (line for number, one in enumerate(found.orders) for line in _bar(found, number, one))
    background = '<rect width="100%" height="100%" fill="white"/>'
    head += f' font-family="{FONT}" font-size="12">'
    return "\n".join([head, background, *_title(found), *_axis(width), *bars, "</svg>\n"])


def _title(found: Mixing) -> Iterator[str]:
    options = found.options
    title = f"How well the labels in {found.column!r} mix"
    yield f'<text x="16" y="24" font-size="16" font-weight="bold">{escape(title)}</text>'
    subtitle = (
        f"Effective rows of a batch of {options.batch_size:,}; 100%: uniform shuffle of all {found.rows:,} rows. "
    )
    subtitle += f"{plural(options.ranks, 'rank')} with {plural(options.workers, 'worker')}. Below: memory for rows"
    yield f'<text x="16" y="44" fill="#555">{escape(subtitle)}</text>'


def _axis(width: int) -> Iterator[str]:
    for percent in (0, 25, 50, 75, 100):
        y = TOP + HEIGHT * (100 - percent) / 100
        dashes = ' stroke-dasharray="5 4" stroke="#555"' if percent == 100 else ' stroke="#ddd"'  # noqa: PLR2004
        yield f'<line x1="{LEFT}" x2="{width - 8}" y1="{y}" y2="{y}"{dashes}/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end" fill="#555">{percent}%</text>'


def _bar(found: Mixing, number: int, one: OrderFound) -> Iterator[str]:
    part = min(1.0, one.effective_part)
    x, height = LEFT + GAP + number * (BAR + GAP), HEIGHT * part
    top, middle = TOP + HEIGHT - height, LEFT + GAP + number * (BAR + GAP) + BAR / 2
    yield f'<rect x="{x}" y="{top:.1f}" width="{BAR}" height="{height:.1f}" fill="{COLORS[number == found.advised]}"/>'
    below = [str(one.order), size(one.memory_bytes)]
    if one.rows_per_s is not None:
        below.append(f"{rate(one.rows_per_s)} rows/s")
    yield f'<text x="{middle}" y="{top - 6:.1f}" text-anchor="middle">{one.effective_part:.1%}</text>'
    for line, text in enumerate(below):
        y, color = TOP + HEIGHT + 18 + 16 * line, "#000" if not line else "#555"
        yield f'<text x="{middle}" y="{y}" text-anchor="middle" fill="{color}">{escape(text)}</text>'
