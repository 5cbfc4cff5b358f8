"""Run each command of ``tdu`` in a real terminal, and keep what it shows as pictures for the documentation.

    python -m benchmarks.screenshots [NAME ...]

The data are the flights of examples/flights, in a temporary directory with a fixed name, which the pictures show.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shlex
import shutil
import struct
import subprocess
import sys
import termios
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import pyarrow.parquet as pq
from rich.ansi import AnsiDecoder
from rich.console import Console
from rich.style import Style
from rich.text import Text

from benchmarks.paths import ROOT
from torch_dataloader_utils import StructuredDataset

PICTURES = ROOT / "docs" / "images" / "command_line"
DIRECTORY = Path("/tmp/tdu")  # noqa: S108 - the pictures show it
COLUMNS = 110

CHARACTER, LINE, MARGIN, BAR = 8, 17, 18, 34
"""The width of a character, the height of a line, the margin and the title bar, in pixels."""

FONT = "DejaVu Sans Mono, Menlo, Consolas, ui-monospace, monospace"
BACKGROUND, FOREGROUND = "#1b1d23", "#d7dae0"
COLORS = {1: "#ef7e7e", 2: "#8ccf7e", 3: "#e5c76b"}
"""Red, green and yellow, by their numbers in ANSI's codes."""


@dataclass(frozen=True, slots=True)
class Shot:
    """A command line, and the exit code that it has to end with.

    Attributes:
        arguments: What follows ``tdu``; a file that --plot names is kept as a picture of its own.
        code: The exit code.
        lines: The most lines that the picture shows, from the first.
    """

    arguments: str
    code: int = 0
    lines: int = 60


SHOTS = {
    "plan": Shot("plan flights --ranks 3 --workers 2 --buffer 20000 --plot plan_plot.svg"),
    "verify": Shot("verify rank_states flights_today", code=1),
    "rows": Shot("rows rank_states 480 --rank 1"),
    "step": Shot("step rank_states flights-2013-07.parquet 1234"),
    "diff": Shot("diff rank_states rank_states_of_other_settings", code=1),
    "bench": Shot("bench flights --columns distance,arr_delay,hour --workers 0,2 --batch-sizes 256,1024"),
    "mixing": Shot("mixing flights --label month --plot mixing_plot.svg"),
    "demo": Shot("demo"),
    "completion": Shot("completion bash", lines=12),
}


def main(names: Sequence[str]) -> None:
    """Take the pictures of some commands, or of all."""
    shutil.rmtree(DIRECTORY, ignore_errors=True)
    DIRECTORY.mkdir()
    try:
        _write_data()
        PICTURES.mkdir(parents=True, exist_ok=True)
        for name in names or SHOTS:
            shot = SHOTS[name]
            code, shown = _run_in_terminal(shlex.split(shot.arguments))
            assert code == shot.code, shown
            picture = render(f"tdu {shot.arguments}", list(AnsiDecoder().decode(shown)), shot.lines)
            (PICTURES / f"{name}.svg").write_text(picture, encoding="utf-8")
        for plot in DIRECTORY.glob("*_plot.svg"):
            shutil.copy(plot, PICTURES)
    finally:
        shutil.rmtree(DIRECTORY)


def _write_data() -> None:
    """Copy the flights; save states of two runs on them; change two files of another copy."""
    flights, today = DIRECTORY / "flights", DIRECTORY / "flights_today"
    shutil.copytree(ROOT / "examples" / "flights" / "data", flights)
    shutil.copytree(flights, today)
    (today / "flights-2013-03.parquet").unlink()
    table = pq.read_table(today / "flights-2013-09.parquet")
    pq.write_table(table.slice(0, 20_000), today / "flights-2013-09.parquet")
    settings = {"batch_size": 128, "shuffle": True, "shuffle_buffer_size": 20_000}
    _save_states("rank_states", batches=600, **settings)
    _save_states("rank_states_of_other_settings", batches=700, **(settings | {"shuffle_buffer_size": 50_000}))


def _save_states(name: str, batches: int, **settings: object) -> None:
    (DIRECTORY / name).mkdir()
    for rank in range(2):
        with warnings.catch_warnings(action="ignore"):
            path, topology = str(DIRECTORY / "flights"), {"num_ranks": 2, "rank": rank, "num_workers": 0}
            loader, _ = StructuredDataset.create_dataloader(path, **topology, **settings)
        batch = iter(loader)
        for _ in range(batches):
            next(batch)
        (DIRECTORY / name / f"loader-{rank:05}-of-00002.json").write_text(json.dumps(loader.state_dict()))


def _run_in_terminal(arguments: Sequence[str]) -> tuple[int, str]:
    """Run a command in a pseudo-terminal, and return its exit code and what it wrote."""
    screen, program = pty.openpty()
    fcntl.ioctl(program, termios.TIOCSWINSZ, struct.pack("HHHH", 60, COLUMNS, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "torch_dataloader_utils", *arguments],
        cwd=DIRECTORY,
        env={**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)},
        stdin=program,
        stdout=program,
        stderr=subprocess.DEVNULL,  # the line that says what it does now
    )
    os.close(program)
    shown = b"".join(_read(screen))
    return process.wait(), shown.decode().replace("\r\n", "\n")


def _read(screen: int) -> Iterator[bytes]:
    while True:
        try:
            yield os.read(screen, 65536)
        except OSError:  # noqa: PERF203 - the program has closed its side
            return


def render(command: str, lines: Sequence[Text], most: int) -> str:
    """Return a picture of a terminal. It needs no font from elsewhere."""
    shown = [Text(f"$ {command}", style="bold"), *lines[:most]]
    shown += [Text("...")] if len(lines) > most else []
    width = round(2 * MARGIN + COLUMNS * CHARACTER)
    height = BAR + MARGIN + LINE * len(shown)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    parts = [head, f'<rect width="{width}" height="{height}" rx="8" fill="{BACKGROUND}"/>']
    parts += [
        f'<circle cx="{MARGIN + 20 * number}" cy="{BAR / 2}" r="6" fill="{color}"/>'
        for number, color in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    ]
    parts.append(f'<g font-family="{FONT}" font-size="13.3">')
    for number, line in enumerate(shown):
        parts += _line(line, BAR + LINE * (number + 0.8))
    return "\n".join([*parts, "</g>", "</svg>", ""])


def _line(line: Text, y: float) -> Iterator[str]:
    """Yield each part of a line that has one style, at the place where a terminal has it."""
    column = 0
    for part, style, _ in line.render(Console()):
        text = part.rstrip("\n")
        if text.strip():
            x, width = MARGIN + column * CHARACTER, len(text) * CHARACTER
            fit = f'textLength="{width:.1f}" lengthAdjust="spacingAndGlyphs" xml:space="preserve"'
            yield f'<text x="{x:.1f}" y="{y:.1f}" {fit}{_look(style)}>{escape(text)}</text>'
        column += len(text)


def _look(style: Style | None) -> str:
    color = FOREGROUND
    if style is not None and style.color is not None:
        color = COLORS.get(style.color.number, FOREGROUND)
    look = f' fill="{color}"'
    if style is not None and style.bold:
        look += ' font-weight="bold"'
    return look + (' opacity=".62"' if style is not None and style.dim else "")


if __name__ == "__main__":
    main(sys.argv[1:])
