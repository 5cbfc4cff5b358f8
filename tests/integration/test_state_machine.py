"""Any sequence of calls on one loader, and on those that replace it: compared, call by call, with a model of it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support import batches_of, edited, examples, open_loader, rows_of, write_dataset

from torch_dataloader_utils import IterationEndedError

pytestmark = pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnusedStateWarning")

FILES = ((20, 6), (3, 10), (31, 9))
ROWS = sum(rows for rows, _ in FILES)
FILTER = (pc.field("value") < 45) & (pc.bit_wise_and(pc.field("value"), 8) == 0)
KEPT = [row for row in range(ROWS) if row < 45 and not row & 8]

ORDERS: list[dict[str, Any]] = [{}, {"shuffle": True}, {"shuffle": True, "shuffle_buffer_size": 20}]
COUNTS = st.integers(0, 6)


class StepFailedError(Exception):
    """A training step that failed."""


class LoaderMachine(RuleBasedStateMachine):
    """One training run: iterators come and go, states are saved and loaded, the process is lost and begins again.

    The model is what a reader of the documentation keeps in mind: the epoch, how many of its batches are delivered,
    and whether a loaded state waits for its iteration. Which rows a batch holds, an uninterrupted run has told.
    """

    data: Path
    workers: Mapping[str, Any]
    epochs: dict[tuple[Any, ...], list[list[int]]]

    saved = Bundle("saved")

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0
        self.delivered = 0
        self.waiting = False
        self.touched = False  # whether an iterator has delivered a batch, or has ended, since the epoch began
        self.loader: Any = None
        self.iterator: Any = None
        self.ended_iterators: list[Any] = []

    @initialize(
        order=st.sampled_from(ORDERS),
        filtered=st.booleans(),
        batch_size=st.sampled_from([4, 6, 9]),
        drop_last=st.booleans(),
    )
    def open(self, order: dict[str, Any], filtered: bool, batch_size: int, drop_last: bool) -> None:
        self.options = {"batch_size": batch_size, "drop_last": drop_last, **order, **self.workers}
        self.filtered = filtered
        self.loader = self._new_loader()

    def teardown(self) -> None:
        """Let workers go at once: those that the garbage collector finds are waited for, seconds each."""
        self.iterator = self.loader = None
        self.ended_iterators = []

    def _new_loader(self) -> Any:
        return open_loader(self.data, **self.options, filters=FILTER if self.filtered else None)[0]

    def _whole(self, epoch: int) -> list[list[int]]:
        """Return the batches of an uninterrupted epoch, read in this process, once for all examples."""
        key = (epoch, self.filtered, *self.options.items())
        if key not in self.epochs:
            whole = self._new_loader().dataset
            whole.set_epoch(epoch)
            batches = batches_of(whole)
            rows = [row for batch in batches for row in batch]
            wanted = KEPT if self.filtered else list(range(ROWS))
            assert len(rows) + whole.get_metrics()["rows_dropped"] == len(wanted)
            assert len(set(rows)) == len(rows)
            assert set(rows) <= set(wanted)
            self.epochs[key] = batches
        return self.epochs[key]

    def _end_iterator(self) -> None:
        if self.iterator is not None:
            self.ended_iterators = [*self.ended_iterators[-2:], self.iterator]
        self.iterator = None

    # Iterating --------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._end_iterator()
        self.iterator = iter(self.loader)
        self.touched = False
        if not self.waiting:
            self.delivered = 0
        self.waiting = False

    def _take(self, count: int) -> None:
        for _ in range(count):
            to_come = self._whole(self.epoch)[self.delivered :]
            batch = next(self.iterator, None)
            assert (batch and rows_of(batch)) == (to_come[0] if to_come else None)
            self.delivered += batch is not None
            self.touched = True

    def _begin_and_take(self, count: int | None) -> None:
        if count is not None:
            self._begin()
            self._take(count)

    def _saved(self) -> tuple[str, int, int]:
        return json.dumps(self.loader.state_dict()), self.epoch, self.delivered

    @rule(target=saved, count=COUNTS)
    def begin_take_and_save(self, count: int) -> Any:
        self._begin_and_take(count)
        return self._saved()

    @precondition(lambda self: self.iterator is not None)
    @rule(target=saved, count=COUNTS)
    def take_and_save(self, count: int) -> Any:
        self._take(count)
        return self._saved()

    @precondition(lambda self: self.iterator is not None)
    @rule(target=saved, count=COUNTS)
    def fail_in_the_loop_and_save(self, count: int) -> Any:
        seen = []
        with contextlib.suppress(StepFailedError):
            for batch in self.iterator:
                seen.append(rows_of(batch))
                if len(seen) > count:
                    raise StepFailedError
        assert seen == self._whole(self.epoch)[self.delivered :][: count + 1]
        self.delivered += len(seen)
        self.touched = True
        return self._saved()

    @precondition(lambda self: self.iterator is not None)
    @rule(target=saved)
    def exhaust_and_save(self) -> Any:
        assert batches_of(self.iterator) == self._whole(self.epoch)[self.delivered :]
        self.delivered = len(self._whole(self.epoch))
        self.touched = True
        return self._saved()

    @precondition(lambda self: self.iterator is not None)
    @rule()
    def drop_the_iterator(self) -> None:
        self.iterator = None

    @precondition(lambda self: self.ended_iterators)
    @rule(pick=st.integers(0, 2))
    def ask_an_ended_iterator(self, pick: int) -> None:
        with pytest.raises(IterationEndedError):
            next(self.ended_iterators[pick % len(self.ended_iterators)])

    # Loading ----------------------------------------------------------------------------------------------------------

    def _load(self, one: tuple[str, int, int]) -> None:
        state, self.epoch, self.delivered = one
        self.loader.load_state_dict(json.loads(state))
        self.waiting, self.touched = True, False
        self._end_iterator()

    @rule(one=saved, count=st.none() | COUNTS)
    def resume_in_the_same_loader(self, one: tuple[str, int, int], count: int | None) -> None:
        self._load(one)
        self._begin_and_take(count)

    @rule(one=saved, count=st.none() | COUNTS)
    def crash_and_resume(self, one: tuple[str, int, int], count: int | None) -> None:
        self.teardown()
        self.loader = self._new_loader()
        self._load(one)
        self._begin_and_take(count)

    @rule(one=saved)
    def load_what_is_refused(self, one: tuple[str, int, int]) -> None:
        with pytest.raises(ValueError, match="shuffle_seed"):
            self.loader.load_state_dict(edited(json.loads(one[0]), _shuffle_seed=1))

    @rule(epoch=st.integers(0, 2), count=st.none() | COUNTS)
    def set_epoch(self, epoch: int, count: int | None) -> None:
        self.loader.set_epoch(epoch)
        if self.touched or epoch != self.epoch:
            self.epoch, self.delivered, self.waiting, self.touched = epoch, 0, False, False
            self._end_iterator()
        self._begin_and_take(count)

    # What always holds ------------------------------------------------------------------------------------------------

    @invariant()
    def state_is_what_the_model_says(self) -> None:
        state = self.loader.state_dict()
        assert state == self.loader.state_dict()
        assert (state["epoch"], state["batches_delivered"]) == (self.epoch, self.delivered)
        if not self.filtered:
            assert len(self.loader) == len(self._whole(self.epoch))


def run(machine: type[LoaderMachine], most: int, steps: int) -> None:
    # How many rules do not apply says nothing.
    chosen = settings(
        examples(most, least=6, part=12), stateful_step_count=steps, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(machine, settings=chosen)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    write_dataset(directory, FILES)
    return directory


@pytest.mark.hypothesis
def test_any_sequence_of_calls_in_this_process(path: Path):
    class InProcess(LoaderMachine):
        data = path
        epochs: ClassVar = {}
        workers = MappingProxyType({"num_workers": 0})

    run(InProcess, most=100, steps=30)


@pytest.mark.hypothesis
def test_any_sequence_of_calls_with_worker_processes(path: Path):
    class WithWorkers(LoaderMachine):
        data = path
        epochs: ClassVar = {}
        workers = MappingProxyType({"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "fork"})

    run(WithWorkers, most=40, steps=25)
