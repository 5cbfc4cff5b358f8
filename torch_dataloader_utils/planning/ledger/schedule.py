"""The steps of a rank: which worker turn makes each, and which rows of the turn's streams it has. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from torch_dataloader_utils.planning.quotas import Counts


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


class StepWindows(NamedTuple):
    """Where the rows of a step come from: the worker turn, and for each of its streams the first row and the end."""

    turn: int
    windows: list[tuple[int, int]]


class Schedule(ABC):
    """The steps that a rank makes of some streams, from some progress on.

    Attributes:
        steps: The steps.
        next_turn: The worker turn of the first one.
    """

    steps: range
    next_turn: int

    @abstractmethod
    def windows(self, step: int) -> StepWindows:
        """Return where the rows of a step of the schedule come from."""

    @abstractmethod
    def step_of_row(self, stream: int, row: int) -> int | None:
        """Return the step that has a row of a stream, counted from 0 at the beginning of the schedule, or None."""

    @abstractmethod
    def rows_of_streams(self, step: int) -> list[int]:
        """Return for each stream how many of its rows are in the steps before one, or before the schedule's end."""


class StepSchedule(Schedule):
    """The steps that a rank makes of some streams, where no filter drops rows.

    Turns alternate, beginning with `next_turn`. A turn whose streams have ended is left out: this is the order of
    `loader.contents.round_robin`, with the batches that `reading.batching` cuts.

    `rows` has for each worker turn the number of rows of each of its streams. All streams of a turn have equally many:
    there is one, unless there is a virtual topology. `batch_size` is the number of rows that a step takes of each
    stream: that of a rank, divided by the streams of a turn. `first_step` is the number of the first step.
    """

    def __init__(
        self,
        rows: Sequence[int],
        batch_size: int,
        *,
        drop_last: bool,
        next_turn: int = 0,
        first_step: int = 0,
        streams_per_turn: int = 1,
    ) -> None:
        self._together = streams_per_turn
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

    def windows(self, step: int) -> StepWindows:
        """Return where the rows of a step come from: see `Schedule`."""
        part = self.at(step)
        return StepWindows(part.turn, [(part.start, part.stop)] * self._together)

    def step_of_row(self, stream: int, row: int) -> int | None:
        """Return the step that has a row of a stream: see `Schedule`."""
        return self.step_of(stream // self._together, row)

    def rows_of_streams(self, step: int) -> list[int]:
        """Return how many rows of each stream are in the steps before one: see `Schedule`."""
        return [rows for rows in self.rows_before(step) for _ in range(self._together)]

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


class MixedSchedule(Schedule):
    """The same for a mixture, whose quotas say how many rows each step takes of each source.

    `counts` are the rows of each source in each step. Turns alternate until the last step. The streams of a turn are
    those of each source of one planned rank, or of several one after the other.
    """

    def __init__(
        self, counts: Counts, turns: int, streams_per_turn: int, *, next_turn: int = 0, first_step: int = 0
    ) -> None:
        sources = counts.shape[1]
        self._sources = [number % sources for number in range(streams_per_turn)]
        self.next_turn = next_turn
        self.steps = range(first_step, first_step + len(counts))
        self._turns = turns
        # By turn: the rows of each source before each batch of the turn, and last all of them.
        self._before = [
            np.concatenate([np.zeros((1, sources), np.int64), counts[self._offset(turn) :: turns].cumsum(axis=0)])
            for turn in range(turns)
        ]

    def windows(self, step: int) -> StepWindows:
        """Return where the rows of a step come from: see `Schedule`."""
        batch, offset = divmod(step - self.steps.start, self._turns)
        turn = (self.next_turn + offset) % self._turns
        start, stop = self._before[turn][batch].tolist(), self._before[turn][batch + 1].tolist()
        return StepWindows(turn, [(start[source], stop[source]) for source in self._sources])

    def step_of_row(self, stream: int, row: int) -> int | None:
        """Return the step that has a row of a stream: see `Schedule`."""
        turn, number = divmod(stream, len(self._sources))
        before = self._before[turn][:, self._sources[number]]
        if not 0 <= row < before[-1]:
            return None
        batch = int(np.searchsorted(before, row, side="right")) - 1
        return self.steps.start + batch * self._turns + self._offset(turn)

    def rows_of_streams(self, step: int) -> list[int]:
        """Return how many rows of each stream are in the steps before one: see `Schedule`."""
        number = step - self.steps.start
        made = [max(0, -(-(number - self._offset(turn)) // self._turns)) for turn in range(self._turns)]
        return [int(self._before[turn][made[turn], source]) for turn in range(self._turns) for source in self._sources]

    def _offset(self, turn: int) -> int:
        """Return how many steps of other turns come before the first one of a turn."""
        return (turn - self.next_turn) % self._turns
