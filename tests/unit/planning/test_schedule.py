"""The steps of a rank: the arithmetic against the loader's own way of taking batches in turns."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import examples

from torch_dataloader_utils.loader.contents import round_robin
from torch_dataloader_utils.planning.assignment import Receipt
from torch_dataloader_utils.planning.ledger.schedule import MixedSchedule, StepRows, StepSchedule
from torch_dataloader_utils.planning.quotas import Counts
from torch_dataloader_utils.reading.batching import Batch, StreamEnd


def _stream(turn: int, rows: int, batch_size: int, *, drop_last: bool) -> Iterator[Batch | StreamEnd]:
    """Yield where a stream's batches begin and end, cut as the reader cuts them."""
    for number, start in enumerate(range(0, rows, batch_size)):
        stop = min(start + batch_size, rows)
        if stop - start == batch_size or not drop_last:
            yield Batch(StepRows(turn, number, start, stop), Receipt(turn, 0, stop, stop - start))
    yield StreamEnd(Receipt(turn, 1, 0, 0))


@given(
    rows=st.lists(st.integers(0, 23), min_size=1, max_size=5),
    batch_size=st.integers(1, 6),
    drop_last=st.booleans(),
    next_turn=st.integers(0, 4),
    first_step=st.integers(0, 9),
)
def test_the_schedule_is_that_of_streams_taken_in_turns(
    rows: list[int], batch_size: int, drop_last: bool, next_turn: int, first_step: int
) -> None:
    next_turn %= len(rows)
    order = [*range(next_turn, len(rows)), *range(next_turn)]
    streams = [_stream(turn, rows[turn], batch_size, drop_last=drop_last) for turn in order]
    made = [content.data for content in round_robin(streams) if isinstance(content, Batch)]

    schedule = StepSchedule(rows, batch_size, drop_last=drop_last, next_turn=next_turn, first_step=first_step)

    assert [schedule.at(step) for step in schedule.steps] == made
    assert schedule.steps == range(first_step, first_step + len(made))
    found = {(part.turn, row): step for step, part in zip(schedule.steps, made, strict=True) for row in _rows_of(part)}
    for turn, count in enumerate(rows):
        for row in range(-1, count + 1):
            assert schedule.step_of(turn, row) == found.get((turn, row))


def _rows_of(part: StepRows) -> range:
    return range(part.start, part.stop)


@pytest.mark.parametrize("step", [1, 7, -1])
def test_a_step_that_the_schedule_does_not_have_is_refused(step: int) -> None:
    schedule = StepSchedule([8, 4], 3, drop_last=False, first_step=2)

    with pytest.raises(IndexError, match="is not one of steps 2 to 6"):
        schedule.at(step)


@st.composite
def mixed_schedules(draw: st.DrawFn) -> tuple[MixedSchedule, Counts, int, int]:
    """Return a schedule of a mixture, and the rows of each source in each of its steps."""
    steps, sources = draw(st.integers(0, 12)), draw(st.integers(1, 3))
    turns, ranks = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    rows = draw(
        st.lists(st.lists(st.integers(0, 4), min_size=sources, max_size=sources), min_size=steps, max_size=steps)
    )
    counts = np.array(rows, dtype=np.int64).reshape(steps, sources)
    next_turn, first_step = draw(st.integers(0, turns - 1)), draw(st.integers(0, 5))
    schedule = MixedSchedule(counts, turns, ranks * sources, next_turn=next_turn, first_step=first_step)
    return schedule, counts, turns, ranks * sources


@given(mixed_schedules())
@examples(200)
def test_the_schedule_of_a_mixture_takes_of_each_source_what_its_quotas_say(
    made: tuple[MixedSchedule, Counts, int, int],
) -> None:
    schedule, counts, turns, together = made
    taken = [0] * (turns * together)
    for number, step in enumerate(schedule.steps):
        assert schedule.rows_of_streams(step) == taken
        turn, windows = schedule.windows(step)
        assert turn == (schedule.next_turn + number) % turns
        for place, (start, stop) in enumerate(windows):
            stream = turn * together + place
            assert start == taken[stream]
            assert stop - start == counts[number, place % counts.shape[1]]
            assert all(schedule.step_of_row(stream, row) == step for row in range(start, stop))
            taken[stream] = stop
    assert schedule.rows_of_streams(schedule.steps.stop) == taken
    assert all(schedule.step_of_row(stream, rows) is None for stream, rows in enumerate(taken))
