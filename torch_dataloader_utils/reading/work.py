"""What a reading process did for some batches, and where its time went: counters that travel with the batches."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias, get_args

from torch_dataloader_utils.storage.attempts import Retry

Stage: TypeAlias = Literal[
    "waiting_for_storage_sec",
    "decoding_sec",
    "converting_sec",
    "collating_sec",
    "packing_sec",
    "waiting_for_loop_sec",
]
"""Where the time of a process went: each moment of the thread that makes its batches belongs to one of these."""

STAGES: tuple[Stage, ...] = get_args(Stage)
"""All stages; waiting for the loop is the last."""


@dataclass(slots=True)
class Counters:
    """What a reading process did. The seconds are those of its wall clock, and add up to them.

    While the thread that makes batches waits for the threads that read, its time is spent on what these do: they wait
    for the storage, decode or convert. What they do while it is busy, or waits for the loop, costs no time here.

    Attributes:
        bytes_read: Compressed bytes of the row groups that were read.
        bytes_read_again: Those of them in row groups that hold rows which were delivered before a resume.
        row_groups_read: Row groups that were read, some only in part.
        row_groups_read_again: Those of them that hold rows which were delivered before a resume.
        tokens_packed: Tokens in the sequences that were made, separators included.
        tokens_separators: The separators among them.
        tokens_padding: What fills these sequences up.
        tokens_dropped: Tokens of documents that are longer than a sequence, and not to be split.
        waiting_for_storage_sec: Seconds in which the next rows had not come from the storage.
        decoding_sec: Seconds in which they were decoded and filtered. A file that is mapped into memory is read here.
        converting_sec: Seconds in which they were shuffled, converted and cut into batches.
        collating_sec: Seconds in `collate_fn`.
        packing_sec: Seconds in which batches were copied into messages, into pinned memory, or to a device.
        waiting_for_loop_sec: Seconds in which the batches before them were not taken.
        cpu_sec: Seconds that all threads of the process together were on a CPU. Only this is no time of the clock.
    """

    bytes_read: int = 0
    bytes_read_again: int = 0
    row_groups_read: int = 0
    row_groups_read_again: int = 0
    tokens_packed: int = 0
    tokens_separators: int = 0
    tokens_padding: int = 0
    tokens_dropped: int = 0
    waiting_for_storage_sec: float = 0.0
    decoding_sec: float = 0.0
    converting_sec: float = 0.0
    collating_sec: float = 0.0
    packing_sec: float = 0.0
    waiting_for_loop_sec: float = 0.0
    cpu_sec: float = 0.0

    def add(self, other: Counters) -> None:
        """Add another's counts to these."""
        for name in COUNTERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


COUNTERS = tuple(one.name for one in fields(Counters))
"""The names of all counters."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Time in which the reading thread waited for rows of a row group, as `time.perf_counter` tells it.

    Attributes:
        began: When it began to wait.
        fetched: When the bytes had come, so that they were decoded from then on.
        ended: When the rows were decoded and filtered.
    """

    began: float
    fetched: float
    ended: float


@dataclass(slots=True)
class Work:
    """What was done for some batches, since those before.

    Attributes:
        counters: The counts, and the seconds once the thread that makes batches has measured them.
        waits: When the reading thread waited; only within the process.
        retries: What the storage failed to do and was asked again for.
    """

    counters: Counters = field(default_factory=Counters)
    waits: tuple[Wait, ...] = ()
    retries: tuple[Retry, ...] = ()

    def add(self, other: Work) -> None:
        """Add what was done for other batches."""
        self.counters.add(other.counters)
        self.waits += other.waits
        self.retries += other.retries


class Stopwatch:
    """Divides the time of the thread that makes batches among the stages, from its making on."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._cpu = time.process_time()
        self._seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)

    def lap(self, stage: Stage) -> float:
        """Say that the time since the last call was spent on a stage, and return the time."""
        now = time.perf_counter()
        self._seconds[stage] += now - self._last
        self._last = now
        return now

    def lap_reading(self, waits: Iterable[Wait]) -> float:
        """Say that since the last call batches were waited for, which took the reading thread these waits.

        Returns:
            The time.
        """
        began, now = self._last, time.perf_counter()
        seconds = self._seconds
        converting = now - began
        for wait in waits:
            fetching = _overlap(wait.began, wait.fetched, began, now)
            decoding = _overlap(wait.fetched, wait.ended, began, now)
            seconds["waiting_for_storage_sec"] += fetching
            seconds["decoding_sec"] += decoding
            converting -= fetching + decoding
        seconds["converting_sec"] += max(0.0, converting)  # streams of a virtual topology are read one after the other
        self._last = now
        return now

    def take(self) -> Counters:
        """Return the seconds since the last call."""
        taken: dict[str, Any] = {**self._seconds}
        self._seconds = dict.fromkeys(STAGES, 0.0)
        before, self._cpu = self._cpu, time.process_time()
        return Counters(**taken, cpu_sec=self._cpu - before)


def _overlap(start: float, stop: float, began: float, ended: float) -> float:
    return max(0.0, min(stop, ended) - max(start, began))
