"""The memory budget: leases are never more than it has, but for a single one, and each is released exactly once."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from support import examples

from torch_dataloader_utils.reading.memory_budget import BudgetClosedError, MemoryBudget, MemoryLease
from torch_dataloader_utils.reading.read_ahead import ReadAhead

PATIENCE_SEC = 60


def in_thread(action: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


def wait_until_short(budget: MemoryBudget) -> None:
    with budget.changed:
        assert budget.changed.wait_for(lambda: budget.is_short, PATIENCE_SEC)


def granted(lease: MemoryLease | None) -> MemoryLease:
    assert lease is not None
    return lease


def test_a_lease_is_refused_beyond_the_limit_and_a_larger_one_granted_once_nothing_else_is_leased():
    budget = MemoryBudget(10)
    four, six = granted(budget.try_take(4)), granted(budget.try_take(6))
    assert budget.try_take(1) is None
    assert granted(budget.try_take(0)).size == 0
    six.release()
    assert budget.try_take(100) is None
    four.release()
    assert granted(budget.try_take(100)).size == 100
    assert budget.try_take(1) is None


def test_a_lease_that_was_released_or_merged_cannot_be_used_again():
    budget = MemoryBudget(10)
    released, merged, holder = budget.take(1), budget.take(2), budget.take(3)
    released.release()
    holder.merge(merged)
    for lease in (released, merged):
        for use in (
            lease.release,
            lease.keep,
            lease.pass_on,
            lambda lease=lease: lease.resize(1),
            lambda lease=lease: lease.merge(holder),
            lambda lease=lease: holder.merge(lease),
        ):
            with pytest.raises(RuntimeError, match="after it was released"):
                use()
    assert budget.leased == holder.size == 5


def test_the_parts_of_a_lease_are_released_each_by_itself():
    budget = MemoryBudget(100)
    lease = budget.take(80)
    part = lease.split(30)
    assert (lease.size, part.size, budget.leased) == (50, 30, 80)
    rest = lease.split(1000)
    assert (lease.size, rest.size) == (0, 50)
    part.resize(35)
    for each, left in ((lease, 85), (rest, 35), (part, 0)):
        each.release()
        assert budget.leased == left


def test_nothing_waits_for_what_is_kept_until_it_is_passed_on():
    budget = MemoryBudget(10)
    kept = budget.take(8)
    assert budget.try_take(8) is None
    kept.keep()
    more = budget.take(8)
    assert budget.try_take(1) is None
    kept.merge(more)  # what joins a kept lease is kept
    more = budget.take(20)
    assert kept.pass_on() is kept
    more.release()
    assert budget.try_take(1) is None
    kept.release()
    assert granted(budget.try_take(1)).size == budget.leased == 1


def test_what_was_kept_counts_no_longer_once_it_is_part_of_a_lease_that_is_not():
    budget = MemoryBudget(10)
    kept, other = budget.take(5), budget.take(5)
    kept.keep()
    other.merge(kept)
    assert budget.try_take(1) is None
    other.release()
    assert budget.leased == 0
    assert granted(budget.try_take(10)).size == 10


@pytest.mark.parametrize("size", [0, 5, 50])
def test_a_closed_budget_grants_nothing(size):
    budget = MemoryBudget(10)
    lease = budget.take(7)
    budget.close()
    with pytest.raises(BudgetClosedError):
        budget.take(size)
    with pytest.raises(BudgetClosedError):
        budget.try_take(size)
    lease.release()


def test_closing_wakes_all_threads_that_wait():
    budget, ended = MemoryBudget(10), []
    budget.take(10)

    def wait() -> None:
        with pytest.raises(BudgetClosedError):
            budget.take(1)
        ended.append(True)

    waiting = [in_thread(wait) for _ in range(4)]
    wait_until_short(budget)
    budget.close()
    for thread in waiting:
        thread.join(PATIENCE_SEC)
    assert len(ended) == 4


@pytest.mark.parametrize("free", ["release", "shrink", "keep"])
def test_a_waiting_thread_goes_on_once_there_is_memory(free):
    budget = MemoryBudget(10)
    lease = budget.take(10)
    taken: list[MemoryLease] = []
    thread = in_thread(lambda: taken.append(budget.take(5)))
    wait_until_short(budget)
    {"release": lease.release, "shrink": lambda: lease.resize(5), "keep": lease.keep}[free]()
    thread.join(PATIENCE_SEC)
    assert [other.size for other in taken] == [5]
    assert not budget.is_short


def test_a_budget_is_short_as_long_as_any_thread_waits():
    budget = MemoryBudget(10)
    first, second = budget.take(6), budget.take(4)
    threads = [in_thread(lambda: budget.take(6).release()), in_thread(lambda: budget.take(5).release())]
    wait_until_short(budget)
    second.release()  # too little for either
    wait_until_short(budget)
    first.release()
    for thread in threads:
        thread.join(PATIENCE_SEC)
    assert budget.leased == 0


@pytest.mark.parametrize("seed", range(4))
def test_threads_never_lease_more_than_the_limit_but_for_a_single_lease(seed):
    limit = 10
    budget, lock = MemoryBudget(limit), threading.Lock()
    leases: list[MemoryLease] = []
    excesses: list[list[int]] = []

    def work(number: int) -> None:
        draw = random.Random(4 * seed + number)
        for _ in range(300):
            size = draw.randrange(1, 14)
            lease = budget.try_take(size) if draw.random() < 0.3 else budget.take(size)
            if lease is None:
                continue
            with lock:
                leases.append(lease)
                sizes = [lease.size for lease in leases]
                if sum(sizes) > limit and len(sizes) > 1:
                    excesses.append(sizes)
                if draw.random() < 0.5:
                    lease.resize(draw.randrange(size + 1))
            with lock:
                leases.remove(lease)
            lease.release()

    workers = [in_thread(lambda number=number: work(number)) for number in range(4)]
    for worker in workers:
        worker.join(PATIENCE_SEC)
    assert not any(worker.is_alive() for worker in workers)
    assert excesses == []
    assert budget.leased == 0


class RandomReader:
    """Estimates, corrects, merges and keeps leases at random, as scans and batchers do."""

    def __init__(self, seed: int, limit: int) -> None:
        self.draw = random.Random(seed)
        self.limit = limit
        self.batch: MemoryLease | None = None
        self.excesses: list[int] = []

    def read(self, budget: MemoryBudget) -> Iterator[MemoryLease]:
        ahead: list[MemoryLease] = []
        for _ in range(400):
            size = self.draw.randrange(1, 30)
            lease = budget.try_take(size) if ahead else budget.take(size)
            if lease is not None:
                ahead.append(lease)
                kept = 0 if self.batch is None else self.batch.size
                self.excesses += [budget.leased] if budget.leased > max(self.limit, kept + size) else []
            if lease is None or self.draw.random() < 0.4:
                yield from self.add(ahead.pop(0))
        for lease in ahead:
            yield from self.add(lease)
        if self.batch is not None:
            yield self.batch.pass_on()

    def add(self, lease: MemoryLease) -> Iterator[MemoryLease]:
        lease.resize(self.draw.randrange(lease.size + 1))
        if self.batch is not None:
            self.batch.merge(lease)
            lease = self.batch
        self.batch = lease
        if self.draw.random() < 0.6:
            self.batch = None
            yield lease.pass_on()
        else:
            lease.keep()


@pytest.mark.parametrize("limit", [1, 7, 40, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_a_reader_and_its_consumer_never_wait_for_each_other(limit, seed):
    reader = RandomReader(seed, limit)
    ahead = ReadAhead(reader.read, limit)
    delivered: list[MemoryLease] = []
    ended = threading.Event()

    def consume() -> None:
        for lease in ahead:
            delivered.append(lease)
            ahead.retire(lease)
            if len(delivered) % 3 == 0:
                ahead.release()
        ahead.release()
        ended.set()

    in_thread(consume)
    assert ended.wait(PATIENCE_SEC)
    ahead.close()
    assert len(delivered) > 50
    assert reader.excesses == []
    assert ahead.budget.leased == 0


class BudgetMachine(RuleBasedStateMachine):
    """Any operations on leases of one budget, against a list of sizes."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.budget = MemoryBudget(20)
        self.sizes: dict[int, int] = {}
        self.kept: set[int] = set()

    @rule(target=leases, size=st.integers(0, 30))
    def take(self, size):
        others = sum(size for number, size in self.sizes.items() if number not in self.kept)
        fits = not size or not others or sum(self.sizes.values()) + size <= 20
        lease = self.budget.try_take(size)
        assert (lease is not None) == fits
        lease = lease or self.budget.try_take(0)
        self.sizes[id(lease)] = lease.size
        return lease

    @rule(lease=leases, size=st.integers(0, 30))
    def resize(self, lease, size):
        lease.resize(size)
        self.sizes[id(lease)] = size

    @rule(lease=leases)
    def keep(self, lease):
        lease.keep()
        self.kept.add(id(lease))

    @rule(lease=leases)
    def pass_on(self, lease):
        assert lease.pass_on() is lease
        self.kept.discard(id(lease))

    @rule(target=leases, lease=consumes(leases), other=consumes(leases))
    def merge(self, lease, other):
        if lease is not other:
            lease.merge(other)
            self.sizes[id(lease)] += self.sizes.pop(id(other))
            self.kept.discard(id(other))
        return lease

    @rule(lease=consumes(leases))
    def release(self, lease):
        lease.release()
        del self.sizes[id(lease)]
        self.kept.discard(id(lease))

    @invariant()
    def the_budget_has_leased_what_its_leases_have(self):
        assert self.budget.leased == sum(self.sizes.values())


BudgetMachine.TestCase.settings = settings(examples(60), stateful_step_count=30, deadline=None)
TestBudget = BudgetMachine.TestCase
