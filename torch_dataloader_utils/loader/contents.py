"""What an iteration takes from where batches are made: part after part, a batch of each process in turn."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

from torch_dataloader_utils.checkpoint.parts import Part, own_parts, restored_parts
from torch_dataloader_utils.checkpoint.progress import Progress
from torch_dataloader_utils.checkpoint.skipped_steps import between, rows_in
from torch_dataloader_utils.planning.assignment import Assignment, Receipt, StreamAssignment
from torch_dataloader_utils.planning.excluded import EpochExclusions
from torch_dataloader_utils.planning.quotas import Counts, Quotas
from torch_dataloader_utils.reading.batching import Batch, EmptyStep, StreamEnd
from torch_dataloader_utils.reading.work import Work
from torch_dataloader_utils.workers.collate import FailedCollate


@dataclass(frozen=True, slots=True)
class PartBegin:
    """A part begins: the steps between the one before and this one are skipped."""

    part: Part


@dataclass(frozen=True, slots=True)
class ThrownAway:
    """A batch of a skipped step. It had to be read, since only that tells which rows it has."""

    receipt: Receipt
    work: Work | None


Content: TypeAlias = Batch | EmptyStep | StreamEnd | PartBegin | ThrownAway

Read: TypeAlias = Callable[[Mapping[int, Sequence[Assignment]]], dict[int, Iterator[Batch | EmptyStep | StreamEnd]]]
"""Lets each process read what it is assigned, part by part, and returns for each what it makes."""


class PartsOfPass:
    """The parts that an iteration delivers from a progress on, and which process reads what of each.

    The rows of thrown-away batches are known only when these are read. So the parts of restored rows, which come last,
    are made when all others have been read.
    """

    def __init__(
        self,
        iteration: int,
        epoch: int,
        progress: Progress,
        processes: int,
        excluded: EpochExclusions,
        *,
        quotas: Quotas | None = None,
    ) -> None:
        self._quotas = quotas
        self._excluded = excluded
        self._iteration = iteration
        self._epoch = epoch
        self._processes = processes
        self._streams_per_turn = progress.streams_per_turn
        self._begun = progress
        self._has_own = progress.restored is None
        self.first = own_parts(progress) if self._has_own else restored_parts(progress)

    def assigned(self, parts: Sequence[Part]) -> dict[int, list[Assignment]]:
        """Return for each process its assignment in each part; the first part's first process is the first."""
        assigned: dict[int, list[Assignment]] = defaultdict(list)
        may_skip = parts is self.first and self._sorts_out
        for part in parts:
            together = self._streams_per_turn
            sizes = self._sizes(part)
            streams = [StreamAssignment(index, slices, sizes[index]) for index, slices in enumerate(part.slices)]
            turns = [tuple(streams[turn * together :][:together]) for turn in part.turns(together)]
            for number, process in enumerate(self._order(part)):
                own = tuple(turns[number :: self._processes])
                assignment = Assignment(self._iteration, process, self._epoch, own, self._excluded, may_skip=may_skip)
                assigned[process].append(assignment)
        return dict(assigned)

    @property
    def _sorts_out(self) -> bool:
        """Whether batches of skipped steps may be read."""
        return self._has_own and bool(self._begun.skip_requests)

    def _sizes(self, part: Part) -> list[Counts | None]:
        """Return the rows of each step of each stream, where the streams of a turn give unequal numbers of rows.

        How many batches a turn has made follows from the rows of its streams: a worker of a plain loader that restores
        states knows only its own.
        """
        streams, together = len(part.slices), self._streams_per_turn
        if self._quotas is None:
            return [None] * streams
        turns, sources = streams // together, self._quotas.sources
        of_turns = []
        for turn in range(turns):
            own = slice(turn * together, (turn + 1) * together)
            places = zip(part.streams[own], part.begin.places[own], strict=True)
            rows = rows_in(between(stream.planned, (0, 0), place) for stream, place in places)
            made = -(-rows // (self._quotas.step_rows * (together // sources)))
            before = (turn - part.begin.turn) % turns  # steps of the part before the turn's first one
            stop = None if part.steps is None else made + max(0, -(-(part.steps - before) // turns))
            of_turns.append(self._quotas.counts[turn::turns][made:stop])
        return [of_turns[stream // together][:, stream % sources] for stream in range(streams)]

    def contents(self, read: Read, restores: Callable[[], bool]) -> Iterator[Content]:
        """Let the processes read, and return what they make.

        `restores` is asked once the epoch's own steps are read, whether restored rows are to follow.
        """
        return self._contents(read(self.assigned(self.first)), read, restores)

    def _contents(
        self, streams: dict[int, Iterator[Batch | EmptyStep | StreamEnd]], read: Read, restores: Callable[[], bool]
    ) -> Iterator[Content]:
        reached = self._begun
        for part in self.first:
            if part is not self.first[0]:
                yield PartBegin(part)
                reached = part.begun(reached)
            ends = 0
            for made in self._in_turns(part, streams):
                content: Content = made
                ends += isinstance(made, StreamEnd)
                if self._sorts_out:
                    content, reached = _sorted_out(made, part, reached)
                yield content
                del made, content
            if ends < len(streams):  # a worker process died
                return
        restored = restored_parts(reached) if self._has_own and restores() else []
        if restored:
            streams.clear()  # lets go of workers that serve only one pass
            streams = read(self.assigned(restored))
        for part in restored:
            yield PartBegin(part)
            yield from self._in_turns(part, streams)

    def _in_turns(
        self, part: Part, streams: Mapping[int, Iterator[Batch | EmptyStep | StreamEnd]]
    ) -> Iterator[Batch | EmptyStep | StreamEnd]:
        return round_robin([streams[process] for process in self._order(part)])

    def _order(self, part: Part) -> list[int]:
        """Return the processes in the order in which they make the first steps of a part."""
        return [(part.begin.turn + number) % self._processes for number in range(self._processes)]


def _sorted_out(content: Batch | EmptyStep | StreamEnd, part: Part, reached: Progress) -> tuple[Content, Progress]:
    """Return what is delivered of a content, and the progress after it. Batches of skipped steps are thrown away."""
    receipt = part.placed(content.receipt)
    if isinstance(content, StreamEnd):
        return content, reached.ended(receipt)
    if any(start <= reached.batches_delivered < stop for start, stop in reached.skip_requests):
        return ThrownAway(content.receipt, content.work), reached.thrown_away(receipt)
    if isinstance(content, Batch) and isinstance(content.data, FailedCollate):
        content.data.reraise()
    return content, reached.advanced(receipt)


def read_here(
    make: Callable[[Assignment], Iterator[Batch | EmptyStep | StreamEnd]], assigned: Mapping[int, Sequence[Assignment]]
) -> dict[int, Iterator[Batch | EmptyStep | StreamEnd]]:
    """Return what this process makes of its assignments, part after part: see `Read`."""
    return {process: chain.from_iterable(map(make, parts)) for process, parts in assigned.items()}


def round_robin(streams: Iterable[Iterator[Batch | EmptyStep | StreamEnd]]) -> Iterator[Batch | EmptyStep | StreamEnd]:
    """Yield a step of each stream in turn. A stream that has ended is skipped from then on."""
    waiting = deque(streams)
    while waiting:
        stream = waiting.popleft()
        content = next(stream, None)
        if content is None:  # a worker process died
            return
        if not isinstance(content, StreamEnd):
            waiting.append(stream)
        yield content
