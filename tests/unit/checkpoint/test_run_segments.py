"""The segments of a log say of every step that counts which of them delivered it, whatever was killed or loaded."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import examples, manifest_of

from torch_dataloader_utils.checkpoint.epoch_record import EpochRecord
from torch_dataloader_utils.checkpoint.progress import Progress
from torch_dataloader_utils.checkpoint.run import Run
from torch_dataloader_utils.checkpoint.run_segments import (
    Began,
    Beginning,
    Loaded,
    Reached,
    dump_segment,
    in_order,
    parse_segment,
    segment_of,
)
from torch_dataloader_utils.planning.manifest import json_digest
from torch_dataloader_utils.planning.plan import DeliveredBaseline, PlanOptions
from torch_dataloader_utils.planning.topology import Topology

FILES = manifest_of([(50, 9), (30, 9)], [(20, 9)])
OPTIONS = PlanOptions(2**27, shuffle=True, shuffle_buffer_size=60)


def run_of(num_ranks: int = 1, options: PlanOptions = OPTIONS) -> Run:
    return Run(FILES, options, None, Topology(num_ranks, 0, 2), batch_size=8, drop_last=False)


def dumped(
    number: int,
    epoch: int,
    step: int,
    began: Began,
    *,
    reached: tuple[int, int] | None = None,
    steps: tuple[int, ...] | None = None,
    num_ranks: int = 1,
    baseline: DeliveredBaseline | None = None,
) -> dict[str, Any]:
    """What the log records of a segment, through JSON."""
    loaded = None if began == "epoch" else Loaded(num_ranks if steps is None else len(steps), steps, 8, False)
    progress = Progress((), 0, step, None, 1, baseline)
    run, record = run_of(num_ranks), EpochRecord(FILES, progress)
    segment = dump_segment(
        run,
        epoch,
        progress,
        Beginning(began, loaded, None if reached is None else Reached(*reached)),
        record,
        number=number,
        process="0" * 16,
    )
    return json.loads(json.dumps(segment, allow_nan=False))


def name_of(number: int) -> str:
    return f"segment-{number:08d}-{'0' * 16}.json"


def parsed(*segments: dict[str, Any]) -> Any:
    return in_order(parse_segment(segment, name_of(segment["number"])) for segment in segments)


class Simulation:
    """A training that delivers steps, is killed, and goes on from saved states or from the beginning of an epoch."""

    def __init__(self) -> None:
        self.segments: list[dict[str, Any]] = []
        self.committed: dict[tuple[int, int], int] = {}
        self.rolled_back: set[tuple[int, int, int]] = set()
        self.stands = 0, 0
        self.reached: tuple[int, int] | None = None

    def deliver(self, began: Began, start: tuple[int, int], steps: int) -> None:
        """Begin a segment and make some steps."""
        number = len(self.segments) + 1
        self.segments.append(dumped(number, *start, began, reached=self.reached))
        epoch, step = start
        for made in range(step, step + steps):
            self.committed[epoch, made] = number
        self.stands = epoch, step + steps
        self.reached = number, step + steps

    def roll_back(self, start: tuple[int, int]) -> None:
        """Forget what was delivered after a place."""
        for key in [key for key in self.committed if key >= start]:
            self.rolled_back.add((*key, self.committed.pop(key)))


@st.composite
def simulations(draw: st.DrawFn) -> Simulation:
    """Any history of a training."""
    training = Simulation()
    training.deliver("epoch", (0, 0), draw(st.integers(0, 6)))
    for _ in range(draw(st.integers(0, 8))):
        event = draw(st.sampled_from(["next epoch", "killed", "killed without a state", "load"]))
        steps = draw(st.integers(0, 6))
        if event == "next epoch":
            training.deliver("epoch", (training.stands[0] + 1, 0), steps)
            continue
        places = sorted({(epoch, step + 1) for epoch, step in training.committed} | {(0, 0), training.stands})
        start = draw(st.sampled_from(places))
        if event != "load":
            training.reached = None
        if event == "killed without a state":
            start = start[0], 0
        training.roll_back(start)
        training.deliver("epoch" if event == "killed without a state" else "state", start, steps)
    return training


@given(simulations())
@examples(300, part=12)
def test_every_step_that_counts_is_of_the_segment_that_delivered_it_and_none_that_was_rolled_back(training):
    segments = parsed(*training.segments)
    for (epoch, step), number in training.committed.items():
        found = segment_of(segments, epoch, step)
        assert found is not None
        assert found.number == number, (epoch, step)
    for epoch, step, number in training.rolled_back:
        assert not any(one.number == number and one.epoch == epoch and one.has(step) for one in segments)
        assert segments[number - 1].rolled_back


def test_a_segment_comes_back_with_everything_that_its_plan_depends_on():
    baseline = DeliveredBaseline((FILES.row_group_splits[0][0].split,), (), ("gone",), 7)
    [segment] = parsed(dumped(1, 3, 7, "elastic state", steps=(6, 7), num_ranks=3, baseline=baseline))
    assert (segment.epoch, segment.first_step, segment.began, segment.stop) == (3, 7, "elastic state", None)
    assert (segment.options, segment.topology) == (OPTIONS, Topology(3, 0, 2))
    assert (segment.batch_size, segment.drop_last, segment.fingerprint) == (8, False, FILES.fingerprint)
    assert segment.loaded == Loaded(2, (6, 7), 8, False)
    assert segment.state.baseline is not None
    assert segment.state.baseline.left_out == ("gone",)
    balanced = replace(OPTIONS, uneven_ranks="drop", batch_size=4)
    grid = Run(FILES, balanced, None, Topology(2, 0, 1, 4, 2), batch_size=8, drop_last=True)
    progress = Progress((), 0, 0, None, 2)
    content = dump_segment(
        grid, 0, progress, Beginning("epoch"), EpochRecord(FILES, progress), number=1, process="0" * 16
    )
    [segment] = parsed(content)
    assert (segment.options, segment.topology) == (balanced, Topology(2, 0, 1, 4, 2))


def test_ranks_that_stopped_at_different_steps_have_ends_of_their_own():
    first, second = parsed(
        dumped(1, 0, 0, "epoch", num_ranks=2), dumped(2, 0, 7, "elastic state", steps=(6, 7), num_ranks=3)
    )
    assert [first.stop_of(rank) for rank in range(2)] == [6, 7]
    assert segment_of([first, second], 0, 6, rank=0) is None
    assert segment_of([first, second], 0, 6, rank=1) == first
    assert segment_of([first, second], 0, 7, rank=2) == second
    assert segment_of([first, second], 0, 2, rank=2) is None


def test_a_lost_segment_makes_those_before_it_uncertain():
    segments = parsed(dumped(1, 0, 0, "epoch"), dumped(2, 1, 0, "epoch"), dumped(4, 2, 3, "state"))
    assert [one.is_certain for one in segments] == [False, False, True]
    assert segment_of(segments, 0, 0) is None
    assert segment_of(segments, 2, 3) == segments[2]
    later = parsed(dumped(3, 2, 3, "state"))
    assert later[0].is_certain


def test_two_segments_with_one_number_are_refused():
    first, other = dumped(1, 0, 0, "epoch"), dumped(1, 0, 0, "epoch")
    with pytest.raises(ValueError, match="two runs wrote into this log at the same time"):
        in_order([parse_segment(first, "segment-1-a"), parse_segment(other, "segment-1-b")])


WRONG: dict[str, tuple[tuple[str, ...], Any]] = {
    "another format": (("format",), "other"),
    "another version": (("version",), 2),
    "number 0": (("number",), 0),
    "an unknown beginning": (("began",), "somehow"),
    "a list in place of what was reached": (("reached",), [1]),
    "no step that was reached": (("reached", "step"), None),
    "a list in place of what was loaded": (("loaded",), []),
    "steps below 0": (("loaded", "steps"), [-1]),
    "no ranks": (("loaded", "num_ranks"), 0),
    "no state": (("state",), {}),
    "a batch size of 0": (("state", "batch_size"), 0),
    "nothing of drop_last": (("state", "drop_last"), None),
    "no plan": (("state", "plan"), None),
    "no run": (("run",), None),
    "no checksum": (("checksum",), None),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_an_error_that_names_it(name):
    path, value = WRONG[name]
    segment = dumped(1, 0, 3, "state", reached=(1, 2), steps=(3,))
    target = segment
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    if path != ("checksum",):
        segment.pop("checksum")
        segment["state"].pop("checksum", None)
        segment["checksum"] = json_digest(segment).hex()
    with pytest.raises(ValueError, match=r"expected|version|missing"):
        parse_segment(segment, "segment-1")


def test_any_damage_is_noticed():
    segment = json.dumps(dumped(1, 0, 3, "state", steps=(3,)))
    draw = random.Random(3)
    for _ in range(300):
        content = bytearray(segment.encode())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(7)
        try:
            raw = json.loads(content)
        except ValueError:
            continue
        if raw == json.loads(segment):
            continue
        with pytest.raises(ValueError, match=r".+"):
            parse_segment(copy.deepcopy(raw), "segment-1")
