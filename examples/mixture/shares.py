"""What a model was trained on, by source: counted, and drawn over the steps of its training. `demo.py` uses it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.dataset
import torch
from train import SOURCES, STEP_ROWS

WIDTH, LEFT, RIGHT, HEIGHT, TOP = 720, 64, 704, 130, 64
STEPS_OF_A_LOSS = 5
COLORS = ("#2f6fb7", "#c4560a")
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


@dataclass(frozen=True, slots=True)
class Counted:
    """What became of the rows of a source.

    Args:
        rows: How many the model was trained on.
        size: How many the source has.
        lost: Rows of a finished pass that never came.
        repeated: Rows that came more often than passes had begun.
    """

    rows: int
    size: int
    lost: int
    repeated: int


def count(checkpoint: dict[str, Any], sizes: Sequence[int]) -> list[Counted]:
    """Count the rows of each source in what a checkpoint's model was trained on."""
    trained = checkpoint["trained"].long()
    found = []
    for source, size in enumerate(sizes):
        times = Counter(trained[trained[:, 1] == source, 2].tolist())
        finished, begun = times.total() // size, -(-times.total() // size)
        lost = sum(max(0, finished - times[row]) for row in range(size))
        found.append(Counted(times.total(), size, lost, sum(max(0, came - begun) for came in times.values())))
    return found


def shares(checkpoint: dict[str, Any], source: int) -> list[tuple[float, float]]:
    """Return the share of a source in the rows of each step."""
    steps = checkpoint["trained"][:, 0].long()
    own = torch.bincount(steps[checkpoint["trained"][:, 1] == source], minlength=checkpoint["step"] + 1)
    parts = own[1:] / torch.bincount(steps)[1:]
    return [(number + 0.5, part) for number, part in enumerate(parts.tolist())]


def losses(checkpoint: dict[str, Any], source: int) -> list[tuple[float, float]]:
    """Return the mean loss of a source's rows in each few steps, at the middle of these."""
    own = checkpoint["trained"][checkpoint["trained"][:, 1] == source]
    found = []
    for first in range(0, checkpoint["step"], STEPS_OF_A_LOSS):
        rows = own[(own[:, 0] > first) & (own[:, 0] <= first + STEPS_OF_A_LOSS)]
        if len(rows):
            found.append((first + STEPS_OF_A_LOSS / 2, rows[:, 3].mean().item()))
    return found


def draw(checkpoint: dict[str, Any], asked: Sequence[tuple[int, dict[str, float]]]) -> str:
    """Return the picture: above the share of each source, below its loss, over the steps of the training.

    Args:
        checkpoint: The last checkpoint.
        asked: The schedule of the weights.
    """
    steps = checkpoint["step"]
    second = TOP + HEIGHT + 64
    highest = max(loss for source in range(len(SOURCES)) for _, loss in losses(checkpoint, source))
    pieces = [*_axis(TOP, "share of the rows", 1), *_axis(second, "loss, nats for each byte", highest)]
    pieces += _starts(checkpoint, second + HEIGHT)
    for source, name in enumerate(SOURCES):
        pieces += _line(
            [(_x(step, steps), TOP + HEIGHT * (1 - part)) for step, part in shares(checkpoint, source)], source
        )
        found = losses(checkpoint, source)
        pieces += _line([(_x(step, steps), second + HEIGHT * (1 - loss / highest)) for step, loss in found], source)
        pieces += _asked(asked, name, steps)
        pieces.append(f'<text x="{LEFT + 80 * source}" y="20" fill="{COLORS[source]}" font-weight="600">{name}</text>')
    pieces.append(f'<text x="{LEFT + 160}" y="20" fill="#59636e">dashed: the share asked</text>')
    for step in (0, steps):
        anchor = "end" if step else "start"
        words = f"step {step}"
        pieces.append(f'<text x="{_x(step, steps)}" y="{second + HEIGHT + 20}" text-anchor="{anchor}">{words}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {second + HEIGHT + 32}" role="img"'
    title = "<title>The shares of two sources, and the loss on each, in a training that was killed and resumed</title>"
    background = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([f'{head} font-family="{FONT}" font-size="13">', title, background, *pieces, "</svg>", ""])


def _x(step: float, steps: int) -> float:
    return round(LEFT + (RIGHT - LEFT) * step / steps, 1)


def _axis(top: float, words: str, highest: float) -> Iterator[str]:
    yield f'<text x="{LEFT + 4}" y="{top - 8}" fill="#59636e">{words}</text>'
    for part in (0, 0.5, 1):
        y = top + HEIGHT * (1 - part)
        yield f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y}" y2="{y}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end" fill="#59636e">{part * highest:.1f}</text>'


def _line(places: Sequence[tuple[float, float]], source: int) -> Iterator[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    yield f'<polyline points="{path}" fill="none" stroke="{COLORS[source]}" stroke-width="2"/>'


def _asked(asked: Sequence[tuple[int, dict[str, float]]], name: str, steps: int) -> Iterator[str]:
    ends = [*(row for row, _ in asked[1:]), steps * STEP_ROWS]
    for (row, weights), end in zip(asked, ends, strict=True):
        y = TOP + HEIGHT * (1 - weights[name] / sum(weights.values()))
        first, last = _x(row / STEP_ROWS, steps), _x(end / STEP_ROWS, steps)
        yield f'<line x1="{first}" x2="{last}" y1="{y:.1f}" y2="{y:.1f}" stroke="#1f2328" stroke-dasharray="3 4"/>'


def _starts(checkpoint: dict[str, Any], bottom: float) -> Iterator[str]:
    for start in checkpoint["starts"]:
        x = _x(start["step"], checkpoint["step"])
        words = f"{start['ranks']} × {start['workers']}" + (" (ranks × workers)" if not start["step"] else "")
        yield f'<line x1="{x}" x2="{x}" y1="{TOP - 22}" y2="{bottom}" stroke="#59636e"/>'
        yield f'<text x="{x + 4}" y="{TOP - 26}" fill="#1f2328">{words}</text>'


def show(run_dir: Path, data: Path, asked: Sequence[tuple[int, dict[str, float]]]) -> list[Counted]:
    """Print what was counted, write the picture, and return the counts."""
    checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    counts = count(checkpoint, [pyarrow.dataset.dataset(data / name).count_rows() for name in SOURCES])
    for source, (name, found) in enumerate(zip(SOURCES, counts, strict=True)):
        (_, first), *_, (_, last) = losses(checkpoint, source)
        print(
            f"{name}: {found.rows:,} rows, {found.rows / found.size:.2f} passes, {found.lost} lost, "
            f"{found.repeated} repeated; loss {first:.2f} at first, {last:.2f} at last"
        )
    (run_dir / "shares.svg").write_text(draw(checkpoint, asked), encoding="utf-8")
    return counts
