"""A picture, as SVG, of who reads what: the files that each worker reads in turn, and the readers of each file."""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from xml.sax.saxutils import escape

from torch_dataloader_utils.cli.epoch_plan import PlannedEpoch
from torch_dataloader_utils.cli.report import count, plural
from torch_dataloader_utils.cli.written import write_file
from torch_dataloader_utils.planning.plan import ShardSlice

WIDTH, LEFT, RIGHT, TOP = 960, 190, 24, 76
LINE, BAR, GAP = 22, 16, 64
MOST_LINES = 40
"""Workers, and files, that are drawn."""

MOST_TITLES = 5_000
"""Bars, up to which each has a title: more would make the picture large."""

FILE_COLORS = ("#440154", "#414487", "#2a788e", "#22a884", "#7ad151", "#fde725")
"""The colours of the files, from the first to the last (viridis: told apart also without colour vision)."""

RANK_COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#777777")
"""The colours of the first ranks: https://personal.sron.nl/~pault, told apart also without colour vision."""

STYLE = (
    "text{font:12px system-ui,-apple-system,'Segoe UI',sans-serif;fill:#222}"
    ".title{font-size:17px;font-weight:600}.head{font-size:13px;font-weight:600}.note{fill:#666}"
    ".grid{stroke:#d8d8d8}.bar{stroke:#fff;stroke-width:.6}"
)


@dataclass(frozen=True, slots=True)
class Bar:
    """A part of a line: from one number of rows to another, from one height to another (0 to 1), in a colour."""

    start: float
    stop: float
    color: str
    about: str
    top: float = 0.0
    bottom: float = 1.0


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines of bars over an axis of rows. The note says what colours mean; the legend has colours and names."""

    title: str
    lines: Sequence[tuple[str, Sequence[Bar]]]
    axis: str
    note: str
    legend: Sequence[tuple[str, str]] = ()

    @property
    def height(self) -> int:
        """The height, with the axis and the gap below."""
        return 26 + LINE * len(self.lines) + GAP


def draw_plan(planned: PlannedEpoch, path: str, storage_options: Mapping[str, Any] | None) -> None:
    """Write the picture."""
    write_file(path, render(planned).encode(), storage_options)


def render(planned: PlannedEpoch) -> str:
    """Return the picture as SVG."""
    panels = [_of_workers(planned), _of_files(planned)]
    height = TOP + sum(panel.height for panel in panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">',
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        _text(24, 32, "Who reads what in an epoch", "title"),
        _text(24, 52, _subtitle(planned), "note"),
    ]
    bars = sum(len(bars) for panel in panels for _, bars in panel.lines)
    tops = accumulate((panel.height for panel in panels), initial=TOP)
    for panel, top in zip(panels, tops, strict=False):
        parts += _drawn(panel, top, has_titles=bars <= MOST_TITLES)
    return "\n".join([*parts, "</svg>", ""])


def _subtitle(planned: PlannedEpoch) -> str:
    manifest, topology, options = planned.opened.manifest, planned.topology, planned.options.plan
    order = "in the files' order"
    if options.shuffle:
        order = "rows shuffled" if options.shuffles_rows else "shards shuffled"
    parts = [
        plural(len(manifest.files), "file"),
        plural(
            manifest.rows,
            "row" if manifest.counts_rows else "byte of text",
            "" if manifest.counts_rows else "bytes of text",
        ),
        plural(len(planned.plan.slices), "shard"),
        f"{plural(topology.num_ranks, 'rank')} × {plural(topology.num_workers, 'worker')}",
        order,
    ]
    return " · ".join(parts)


def _of_workers(planned: PlannedEpoch) -> Panel:
    """Return the panel of workers: what each reads, from the first row to the last."""
    files = planned.opened.manifest.files
    colors = {file.path: _ramp(index / max(1, len(files) - 1)) for index, file in enumerate(files)}
    lines: list[tuple[str, list[Bar]]] = []
    workers = 0
    for rank in range(planned.topology.num_ranks):
        for worker, slices in enumerate(planned.streams(rank)):
            workers += 1
            if len(lines) < MOST_LINES:
                name = f"rank {rank}, worker {worker}" if planned.topology.num_workers else f"rank {rank}"
                lines.append((name, list(_bars_of_stream(slices, colors, mixes=planned.options.plan.shuffles_rows))))
    how = "; above one another: rows that are shuffled together" if planned.options.plan.shuffles_rows else ""
    note = f"a colour for each file, from the first (dark) to the last (light){how}"
    return Panel("Each worker reads", lines, f"rows that the worker has read{_left_out(workers, 'worker')}", note)


def _bars_of_stream(slices: Iterable[ShardSlice], colors: dict[str, str], *, mixes: bool) -> Iterator[Bar]:
    """Yield the bars of a worker. Rows that are shuffled together are above one another, others one after the other."""
    done = 0
    for part in slices:
        total = max(1, part.shard.rows)
        before = 0
        for split in part.shard.present:
            share = before / total, (before + split.row_length) / total
            before += split.row_length
            about = f"{split.path}, rows {count(split.row_offset)} to {count(split.row_offset + split.row_length)}"
            if mixes:
                yield Bar(done, done + part.rows, colors[split.path], about, *share)
                continue
            start, stop = max(part.start, int(share[0] * total)), min(part.stop, round(share[1] * total))
            if start < stop:
                yield Bar(done + start - part.start, done + stop - part.start, colors[split.path], about)
        done += part.rows


def _of_files(planned: PlannedEpoch) -> Panel:
    """Return the panel of files: who reads which rows of each."""
    found: dict[str, list[Bar]] = {file.path: [] for file in planned.opened.manifest.files}
    for rank in range(planned.topology.num_ranks):
        for worker, slices in enumerate(planned.streams(rank)):
            name = f"rank {rank}, worker {worker}" if planned.topology.num_workers else f"rank {rank}"
            color = _shade(rank, worker, planned.topology.processes)
            for part in slices:
                for path, bar in _bars_in_files(part, name, color, mixes=planned.options.plan.shuffles_rows):
                    found[path].append(bar)
    lines = list(found.items())[:MOST_LINES]
    ranks = range(min(planned.topology.num_ranks, len(RANK_COLORS)))
    legend = [(_shade(rank, 0, 1), f"rank {rank}") for rank in ranks]
    note = "lighter: later workers" if planned.topology.num_workers > 1 else ""
    return Panel("Each file is read by", lines, f"rows of the file{_left_out(len(found), 'file')}", note, legend)


def _bars_in_files(part: ShardSlice, name: str, color: str, *, mixes: bool) -> Iterator[tuple[str, Bar]]:
    """Yield the rows of a slice, by file. A window of shuffled rows has some of each row group of its shard."""
    before, total = 0, max(1, part.shard.rows)
    for split in part.shard.present:
        start, stop = split.row_offset, split.row_offset + split.row_length
        about = f"{name}: rows {count(start)} to {count(stop)}"
        if mixes:
            yield split.path, Bar(start, stop, color, about, part.start / total, part.stop / total)
        else:
            first, last = max(start, start + part.start - before), min(stop, start + part.stop - before)
            if first < last:
                yield split.path, Bar(first, last, color, f"{name}: rows {count(first)} to {count(last)}")
        before += split.row_length


def _left_out(number: int, noun: str) -> str:
    return f"; {plural(number - MOST_LINES, f'more {noun}')} not drawn" if number > MOST_LINES else ""


def _drawn(panel: Panel, top: int, *, has_titles: bool) -> Iterator[str]:
    """Yield the elements of a panel; with titles, each bar says what it is under the mouse."""
    most = max((bar.stop for _, bars in panel.lines for bar in bars), default=1) or 1
    scale = (WIDTH - LEFT - RIGHT) / most
    first = top + 26
    bottom = first + LINE * len(panel.lines)
    yield _text(24, top + 10, panel.title, "head")
    x = float(LEFT)
    for color, name in panel.legend:
        yield f'<rect x="{x:.0f}" y="{top}" width="12" height="12" fill="{color}"/>'
        yield _text(x + 17, top + 10, name)
        x += 30 + 7 * len(name)
    yield _text(x, top + 10, panel.note, "note")
    for tick in _ticks(most):
        x = LEFT + tick * scale
        yield f'<line class="grid" x1="{x:.1f}" y1="{first - 4}" x2="{x:.1f}" y2="{bottom}"/>'
        yield _text(x, bottom + 15, count(int(tick)), "note", "middle")
    for number, (name, bars) in enumerate(panel.lines):
        y = first + number * LINE
        yield _text(LEFT - 10, y + 13, _short(name), "", "end")
        yield from _rectangles(bars, y, scale, has_titles=has_titles)
    yield _text(LEFT, bottom + 32, panel.axis, "note")


def _rectangles(bars: Sequence[Bar], y: float, scale: float, *, has_titles: bool) -> Iterator[str]:
    """Yield the bars of a line; of those that would be on the same two pixels only the first."""
    drawn = set()
    for bar in bars:
        x, width = LEFT + bar.start * scale, (bar.stop - bar.start) * scale
        pixel = x // 2, (x + width) // 2, BAR * bar.top // 2, BAR * bar.bottom // 2
        if pixel in drawn:
            continue
        drawn.add(pixel)
        height = max(1.5, (bar.bottom - bar.top) * BAR)
        edge = ' class="bar"' if width > 3 and height > 3 else ""  # noqa: PLR2004 - pixels
        place = f'x="{x:.1f}" y="{y + bar.top * BAR:.1f}" width="{max(2, width):.1f}" height="{height:.1f}"'
        title = f"<title>{escape(bar.about)}</title>" if has_titles else ""
        yield f'<rect{edge} {place} fill="{bar.color}">{title}</rect>'


def _ticks(most: float) -> list[float]:
    """Return about five round numbers from 0 to the most."""
    step = 10 ** (len(str(int(most))) - 1)
    factor = next(factor for factor in (0.2, 0.5, 1, 2) if most / (step * factor) <= 6)  # noqa: PLR2004 - ticks
    step = max(1, step * factor)
    return [number * step for number in range(int(most / step) + 1)]


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def _short(name: str, most: int = 26) -> str:
    return name if len(name) <= most else f"…{name[1 - most :]}"


def _ramp(share: float) -> str:
    """Return the colour of a file by its place among all files, from 0 to 1."""
    place = share * (len(FILE_COLORS) - 1)
    index = min(int(place), len(FILE_COLORS) - 2)
    first, second = (_channels(FILE_COLORS[number]) for number in (index, index + 1))
    return _hex(low + (high - low) * (place - index) for low, high in zip(first, second, strict=True))


def _shade(rank: int, worker: int, workers: int) -> str:
    """Return the colour of a worker: that of its rank, lighter for later workers."""
    lighter = 0.45 * worker / max(1, workers - 1)
    is_named = rank < len(RANK_COLORS)
    base = _channels(RANK_COLORS[rank]) if is_named else colorsys.hls_to_rgb(rank * 0.618 % 1, 0.45, 0.5)
    return _hex(channel + (1 - channel) * lighter for channel in base)


def _channels(color: str) -> tuple[float, float, float]:
    red, green, blue = (int(color[start : start + 2], 16) / 255 for start in (1, 3, 5))
    return red, green, blue


def _hex(channels: Iterable[float]) -> str:
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)
