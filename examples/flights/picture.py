"""Draw the picture of the killed and resumed run that README and documentation show.

    python examples/flights/picture.py docs/images

It makes the run that `make demo` makes and draws what its ledgers say, once for light pages and once for dark ones.
Nothing in the picture is written by hand but the words.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from demo import BATCH_SIZE, Demonstration, demonstrate, split_by_step
from ledger import committed

WIDTH = 720
LEFT = 128
RIGHT = WIDTH - 16
BAR = 26
CELL_ROW = 18
STEPS_BEFORE, STEPS_AFTER = 12, 12  # of the second part: around the checkpoint and the kill


@dataclass(frozen=True, slots=True)
class Look:
    """The colours of one variant.

    Args:
        name: What the file is named after.
        text: Words and lines.
        faint: Words and lines of less weight.
        kept: What the checkpoint held.
        resumed: What the resumed run delivered.
        rolled_back: What was delivered after the checkpoint and forgotten with the model.
        cells: Colours that stand for batches.
    """

    name: str
    text: str
    faint: str
    kept: str
    resumed: str
    rolled_back: str
    cells: tuple[str, ...]


LOOKS = (
    Look(
        name="light",
        text="#1f2328",
        faint="#59636e",
        kept="#2f6fb7",
        resumed="#1a7f50",
        rolled_back="#c4560a",
        cells=("#0b5394", "#2e8b8b", "#7ab648", "#e0b000", "#d9731a", "#b3315f", "#7046a8", "#8a8f98"),
    ),
    Look(
        name="dark",
        text="#e6e9ee",
        faint="#a3abb6",
        kept="#5b9bea",
        resumed="#3fb57c",
        rolled_back="#f0883e",
        cells=("#4f9fe8", "#4fc3c3", "#9fd46a", "#f2cc3f", "#f59a4a", "#ee6f9d", "#b08cf0", "#c6cad1"),
    ),
)


class Drawing:
    """Pieces of an SVG, put together one below the other.

    Args:
        look: The colours.
    """

    def __init__(self, look: Look) -> None:
        self.look = look
        self._pieces: list[str] = []

    def text(
        self, x: float, y: float, words: str, *, anchor: str = "start", colour: str = "", bold: bool = False
    ) -> None:
        """Write words; `y` is their baseline."""
        weight = ' font-weight="600"' if bold else ""
        colour = colour or self.look.text
        self._pieces.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{weight}>{words}</text>'
        )

    def bar(self, start: float, stop: float, y: float, height: float, colour: str) -> None:
        """Fill a rectangle between two places."""
        shape = f'<rect x="{start:.2f}" y="{y:.1f}" width="{stop - start:.2f}" height="{height}"'
        self._pieces.append(f'{shape} fill="{colour}"/>')

    def line(self, x: float, top: float, bottom: float, colour: str) -> None:
        """Draw a dashed line from top to bottom."""
        self._pieces.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}" stroke="{colour}" stroke-dasharray="4 3"/>'
        )

    def svg(self, height: float, description: str) -> str:
        """Put the pieces together."""
        font = "font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif\" font-size=\"14\""
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" {font}>'
        return "\n".join([head, f"<title>{description}</title>", *self._pieces, "</svg>", ""])


def draw_epoch(drawing: Drawing, shown: Demonstration, top: float) -> float:
    """Draw which steps of the epoch each run made, and give the place below."""
    look, evidence = drawing.look, shown.evidence
    steps = max(evidence.batches_of_ranks())

    def place(step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / steps

    kill, resume = place(shown.last_step), place(evidence.step)
    drawing.text(resume - 6, top + 14, f"checkpoint of step {evidence.step}", anchor="end", colour=look.faint)
    drawing.text(
        kill + 6, top + 14, f"kill -9 of {shown.processes} processes at step {shown.last_step}", colour=look.rolled_back
    )
    first, second = top + 24, top + 24 + BAR + 10
    drawing.bar(place(0), resume, first, BAR, look.kept)
    drawing.bar(resume, kill, first, BAR, look.rolled_back)
    drawing.bar(resume, place(steps), second, BAR, look.resumed)
    drawing.line(resume, top + 4, second + BAR + 4, look.faint)
    drawing.line(kill, top + 4, first + BAR + 4, look.rolled_back)
    drawing.text(LEFT - 10, first + 18, "first run", anchor="end", bold=True)
    drawing.text(LEFT - 10, second + 18, "resumed run", anchor="end", bold=True)
    below = second + BAR + 18
    for step in (0, evidence.step, steps):
        anchor = "start" if step == 0 else "end" if step == steps else "middle"
        drawing.text(place(step), below, f"step {step}" if step else "0", anchor=anchor, colour=look.faint)
    return below


def draw_ledger(drawing: Drawing, shown: Demonstration, top: float) -> float:
    """Write what became of the rows, each number in the colour of its bar, and give the place below."""
    look, evidence = drawing.look, shown.evidence
    kept = evidence.rows_kept_before_kill()
    after = sum(map(len, evidence.kept)) - kept
    again = evidence.rows_trained_before_kill() - kept
    lines = [
        (kept, "rows are in the checkpoint", look.kept),
        (again, "rows came after it: rolled back with the model, delivered again", look.rolled_back),
        (after, "rows are delivered by the resumed run", look.resumed),
        (
            evidence.rows,
            f"rows in the epoch: {evidence.rows_lost()} lost, {evidence.rows_repeated()} repeated",
            look.text,
        ),
    ]
    for number, (rows, words, colour) in enumerate(lines):
        y = top + 22 * number
        drawing.text(LEFT + 62, y, f"{rows:,}", anchor="end", colour=colour, bold=True)
        drawing.text(LEFT + 72, y, words)
    return top + 22 * (len(lines) - 1)


def draw_batches(drawing: Drawing, shown: Demonstration, top: float) -> float:
    """Draw batches around the kill, one cell each, coloured by their rows, and give the place below."""
    look, evidence = drawing.look, shown.evidence
    steps = range(evidence.step - STEPS_BEFORE + 1, shown.last_step + STEPS_AFTER + 1)
    cell = (RIGHT - LEFT) / len(steps)
    y = top
    for rank, (killed, kept, uninterrupted) in enumerate(
        zip(evidence.killed, evidence.kept, evidence.uninterrupted, strict=True)
    ):
        after = kept[len(committed(kept, evidence.step)) :]
        runs = (("first run", killed), ("resumed run", after), ("never stopped", uninterrupted))
        drawing.text(LEFT, y + 12, f"rank {rank}", colour=look.faint)
        y += 18
        for name, records in runs:
            batches = split_by_step(records)
            drawing.text(LEFT - 10, y + 14, name, anchor="end")
            for number, step in enumerate(steps):
                if step in batches:
                    colour = look.cells[blake2b(batches[step], digest_size=1).digest()[0] % len(look.cells)]
                    start = LEFT + number * cell
                    drawing.bar(start + 0.5, start + cell - 0.5, y, CELL_ROW, colour)
            y += CELL_ROW + 3
        y += 8
    for step in (steps[0], evidence.step + 1, shown.last_step, steps[-1]):
        drawing.text(LEFT + (step - steps[0] + 0.5) * cell, y + 8, str(step), anchor="middle", colour=look.faint)
    return y + 8


def draw(look: Look, shown: Demonstration) -> str:
    """Draw the whole picture."""
    total, same = shown.evidence.batches_after_resume()
    drawing = Drawing(look)
    y = draw_epoch(drawing, shown, 4)
    y = draw_ledger(drawing, shown, y + 34)
    y += 44
    drawing.text(
        16,
        y,
        f"The batches around the kill: a cell is {BATCH_SIZE} rows, a colour is their ids in their order.",
        bold=True,
    )
    y = draw_batches(drawing, shown, y + 10)
    y += 26
    drawing.text(
        16, y, f"{same} of {total} batches after the resume are those of the run that was never stopped, in order."
    )
    description = "A training that was killed and resumed: no row is lost, none is repeated, the batches are the same"
    return drawing.svg(y + 14, description)


def main() -> int:
    """Make the run, draw it, and give the exit status: 0 if no row was lost or repeated."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    shown = demonstrate()
    for look in LOOKS:
        path = folder / f"killed-and-resumed-{look.name}.svg"
        path.write_text(draw(look, shown), encoding="utf-8")
        print(f"wrote {path}")
    return 0 if shown.evidence.holds() else 1


if __name__ == "__main__":
    sys.exit(main())
