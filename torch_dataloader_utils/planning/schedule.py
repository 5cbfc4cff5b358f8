"""The steps of a rank: which worker turn makes each, and which rows of the turn's streams it has. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepRows:
    """Where the rows of a step come from.

    Attributes:
        turn: The worker turn that makes the step.
        batch: Number of the step's batch among those of the turn, from 0 at the beginning of the schedule.
        start: Number of the first row of the step in each stream of the turn, from 0 at the beginning of the schedule.
        stop: The end of these rows.
    """

    turn: int
    batch: int
    start: int
    stop: int


class StepSchedule:
    """The steps that a rank makes of some streams, where no filter drops rows.

    Turns alternate, beginning with `next_turn`. A turn whose streams have ended is left out: this is the order of
    `loader.contents.round_robin`, with the batches that `reading.batching` cuts.

    `rows` has for each worker turn the number of rows of each of its streams. All streams of a turn have equally many:
    there is one, unless there is a virtual topology. `batch_size` is the number of rows that a step takes of each
    stream: that of a rank, divided by the streams of a turn. `first_step` is the number of the first step.
    """

    def __init__(
        self, rows: Sequence[int], batch_size: int, *, drop_last: bool, next_turn: int = 0, first_step: int = 0
    ) -> None:
        self.rows = tuple(rows)
        self.batch_size = batch_size
        self.next_turn = next_turn
        short = 0 if drop_last else batch_size - 1
        self.batches = tuple((count + short) // batch_size for count in self.rows)
        self.steps = range(first_step, first_step + sum(self.batches))

    def at(self, step: int) -> StepRows:
        """Return where the rows of a step come from.

        Raises:
            IndexError: If the schedule does not have the step.
        """
        if step not in self.steps:
            raise IndexError(f"step {step} is not one of steps {self.steps.start} to {self.steps.stop - 1}")
        number = step - self.steps.start
        batch = bisect_right(range(max(self.batches)), number, key=self._before) - 1
        turn = self._turns_with(batch)[number - self._before(batch)]
        start = batch * self.batch_size
        return StepRows(turn, batch, start, min(start + self.batch_size, self.rows[turn]))

    def step_of(self, turn: int, row: int) -> int | None:
        """Return the step that has a row of a turn's streams, counted from 0 at the beginning of the schedule.

        It is None for a row of a short last batch that is left out, and for a row that the streams do not have.
        """
        batch = row // self.batch_size
        if not 0 <= row < self.rows[turn] or batch >= self.batches[turn]:
            return None
        return self.steps.start + self._before(batch) + self._turns_with(batch).index(turn)

    def rows_before(self, step: int) -> list[int]:
        """Return for each turn how many rows of each of its streams are in the steps before one of the schedule."""
        number = step - self.steps.start
        batch = bisect_right(range(max(self.batches)), number, key=self._before) - 1 if number else 0
        before = self._turns_with(batch)[: number - self._before(batch)]
        made = [min(batch + (turn in before), count) for turn, count in enumerate(self.batches)]
        return [min(count * self.batch_size, rows) for count, rows in zip(made, self.rows, strict=True)]

    def _before(self, batch: int) -> int:
        """Return the number of steps before the turns' batches of this number."""
        return sum(min(count, batch) for count in self.batches)

    def _turns_with(self, batch: int) -> list[int]:
        """Return the turns that have a batch of this number, in their order."""
        count = len(self.batches)
        turns = ((self.next_turn + number) % count for number in range(count))
        return [turn for turn in turns if self.batches[turn] > batch]
