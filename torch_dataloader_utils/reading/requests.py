"""The order in which a stream's row groups are requested: as many ahead of those that are read as the budget allows.

A row group is requested before it is read: its bytes are then fetched, and decoded in another thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from torch_dataloader_utils.planning.plan import ShardSlice
from torch_dataloader_utils.reading.memory_budget import BudgetClosedError, MemoryBudget, MemoryLease
from torch_dataloader_utils.reading.row_groups.file_row_group import FileRowGroup
from torch_dataloader_utils.reading.row_groups.reader import RowGroupReader
from torch_dataloader_utils.storage.request_size import RequestSize

TOO_LONG = 2
"""How many times as long as it should be a request has to be for the rest of it to be requested again."""

MOST_IN_PARTS = 2
"""Row groups that are read in parts and requested at once: the one that is read, and the next."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a scan: a row group, or all row groups of a shard that is shuffled in rounds.

    Attributes:
        position: Index of its slice in the stream's slices.
        shard_slice: The slice.
        group: The row group; of a shard in rounds the first.
        first: The shard's delivered rows before it, if no filter removes any.
        last: Whether it is the slice's last.
        number: Its index among the row groups of the slice's shard.
        whole: Whether it is read as one table.
        size: Bytes to lease before it is requested. A row group that is read in parts takes a lease for each part.
        requested: Whether it is requested ahead. Rounds request their parts themselves.
        continues: Whether its shard is read together with the next one.
        following: The slices behind this one that it has all rows of, after those of this slice.
        behind: Row groups of the slice's shard that are requested and read with it: others of its file, or of others.
        numbers: Where rows are shuffled, the index in the shard of each of its `groups`.
    """

    position: int
    shard_slice: ShardSlice
    group: FileRowGroup
    first: int
    last: bool
    number: int
    whole: bool
    size: int
    requested: bool = True
    continues: bool = False
    following: tuple[ShardSlice, ...] = ()
    behind: tuple[FileRowGroup, ...] = ()
    numbers: tuple[int, ...] = ()

    @property
    def groups(self) -> tuple[FileRowGroup, ...]:
        """The row group, and those that are read with it."""
        return (self.group, *self.behind)


@dataclass(slots=True)
class _Run:
    """Steps that one request is for.

    Attributes:
        waiting: Those that are not requested yet.
        steps: How many they are, with those that are requested.
        stored_bytes: What is stored of all of them.
        requested_bytes: What is stored of those that are requested.
        is_guess: Whether no answer had told how long requests should be: it may be too long, and is cut then.
        is_prepared: Whether its request was made before the first of them is requested.
    """

    waiting: deque[Step] = field(default_factory=deque)
    steps: int = 0
    stored_bytes: int = 0
    requested_bytes: int = 0
    is_guess: bool = False
    is_prepared: bool = False


class Requests(Iterator[tuple[Step, MemoryLease]]):
    """Yields each step with its lease once it is requested; requests as many ahead as the budget allows.

    Only the next step waits for memory. Those behind it are requested if their lease is granted at once: what is
    delivered releases memory for them, and the next step has to be read first. Consecutive row groups that come faster
    by one request are received one after another, each once there is memory for it. The next such request is made when
    half of them are requested, so that its answer begins while the others are received.

    Args:
        steps: The steps, in order.
        reader: Reads their row groups.
        budget: The memory for them.
        on_request: Called with each step that was requested.
    """

    def __init__(
        self,
        steps: Iterable[Step],
        reader: RowGroupReader,
        budget: MemoryBudget,
        on_request: Callable[[Step], object] = lambda _: None,
    ) -> None:
        self._reader = reader
        self._budget = budget
        self._on_request = on_request
        self._ahead: deque[tuple[Step, MemoryLease]] = deque()
        self._runs: Iterator[_Run] = self._in_runs(steps)
        self._run = next(self._runs, _Run())
        self._following: _Run | None = None
        self._error: Exception | None = None

    def __next__(self) -> tuple[Step, MemoryLease]:
        self._request_if_possible(waits=True)
        if self._ahead:
            return self._ahead.popleft()
        if self._error is not None:
            raise self._error
        if self._run.waiting:
            raise RuntimeError("a row group is neither requested nor read")
        raise StopIteration

    def more(self) -> None:
        """Request what there is memory for by now, and wait for nothing."""
        self._request_if_possible(waits=False)

    def _request_if_possible(self, *, waits: bool) -> None:
        """Keep an error for later: the rows of what is requested come before it."""
        if self._error is not None:
            return
        try:
            self._request(waits=waits)
        except BudgetClosedError:
            raise
        except Exception as error:  # noqa: BLE001 - it is raised once nothing comes before it
            self._error = error

    def _request(self, *, waits: bool) -> None:
        while self._run.waiting and self._may_request(self._run.waiting[0]):
            step = self._run.waiting[0]
            if self._stops_at(step):
                break
            lease = self._budget.take(step.size) if waits and not self._ahead else self._budget.try_take(step.size)
            if lease is None:
                break
            run = self._run
            run.waiting.popleft()
            run.requested_bytes += self._reader.sizes.stored_bytes(step.group)
            if step.requested:
                try:
                    if step.behind:
                        self._reader.request_together(step.groups)
                    else:
                        self._reader.request(step.group, [later.group for later in run.waiting], whole=step.whole)
                    self._on_request(step)
                except BaseException:
                    lease.release()
                    raise
            self._ahead.append((step, lease))
            if self._following is None and 2 * len(run.waiting) <= run.steps:
                self._following = next(self._runs, _Run())
                self._prepare(self._following)
            if self._following is not None and not run.waiting:
                self._run, self._following = self._following, None

    def _stops_at(self, step: Step) -> bool:
        """Whether to wait for an answer before a step is requested: it tells how long requests should be.

        Once one has told, what was guessed to be a run and is too long is cut.
        """
        run, size = self._run, self._reader.request_size
        if not run.is_guess or size is None or not self._reaches(size, run):
            return False
        is_received = self._reader.receives(step.group)
        if is_received and self._ahead and not size.is_known:
            return True
        run.is_guess = False
        if is_received and run.stored_bytes > TOO_LONG * size.bytes:
            self._reader.cut(step.group)
            rest = [] if self._following is None else [self._following]
            self._runs = chain(self._in_runs(run.waiting), rest, self._runs)
            self._run, self._following = next(self._runs), None
        return False

    def _prepare(self, run: _Run) -> None:
        """Let the answer begin that several row groups are received from, unless it was."""
        if len(run.waiting) > 1 and not run.is_prepared:
            run.is_prepared = True
            self._reader.prepare([step.group for step in run.waiting])

    def _in_runs(self, steps: Iterable[Step]) -> Iterator[_Run]:
        """Yield the steps in runs, each of which one request is for."""
        run = _Run()
        for step in steps:
            stored = self._reader.sizes.stored_bytes(step.group)
            if run.waiting and not self._may_join(run, step, stored):
                yield run
                run = _Run()
            size = self._reader.request_size
            run.is_guess = size is not None and not size.is_known
            run.waiting.append(step)
            run.steps += 1
            run.stored_bytes += stored
            if size is None or not step.whole:  # it has its own: the next step is made when more is known of sizes
                yield run
                run = _Run()
        if run.waiting:
            yield run

    def _reaches(self, size: RequestSize, run: _Run) -> bool:
        """Whether as much was requested of a run as one request should be for."""
        following = self._reader.sizes.stored_bytes(run.waiting[0].group)
        return run.requested_bytes > 0 and run.requested_bytes + following > size.bytes

    def _may_join(self, run: _Run, step: Step, stored: int) -> bool:
        """Whether a step may be received by the request of those before it."""
        size, last, added = self._reader.request_size, run.waiting[-1].group, step.group
        return (
            size is not None
            and last.is_followed_by(added)
            and step.whole
            and run.stored_bytes + stored <= size.most_bytes
        )

    def _may_request(self, step: Step) -> bool:
        """Whether a step may be requested behind others without using memory that the parts of a large one need."""
        if all(other.whole for other, _ in self._ahead):
            return len(self._ahead) < self._reader.most_requested(step.group)
        return not step.whole and len(self._ahead) < MOST_IN_PARTS
