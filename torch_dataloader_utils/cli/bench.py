"""`tdu bench`: how fast the loader reads the user's own data, beside Arrow alone, and the setting that it advises."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.dataset as pads
from pyarrow import fs

from torch_dataloader_utils.cli.opening import OpenedDataset, open_dataset
from torch_dataloader_utils.cli.report import size
from torch_dataloader_utils.columns.arrow import nbytes
from torch_dataloader_utils.columns.arrow_memory import release_unused
from torch_dataloader_utils.formats.cpus import usable_cpus
from torch_dataloader_utils.formats.opened_files import OpenedFiles

WORKERS = (0, 2, 4)
BATCH_SIZES = (256, 1024, 4096)
SECONDS = 1.0
ROUNDS = 3

CLEARLY = 1.05
"""A setting is clearly faster than another if its rate is more than this many times the other's in every round."""

MOST_REASON = 200
"""Characters of an error of Arrow that a note has."""

OVERTIME = 2.0
SLACK_SEC = 5.0
"""Rounds after the first are left out once the measurements have taken this many times as long as announced and this
much longer, as on a storage that is slow to answer."""

SETTLE = 0.25
"""The part of a measurement's seconds that passes after the first batch before rows are counted: meanwhile what was
read ahead of the first batch is delivered."""

START_SEC = 0.3
"""About what the start of workers adds to a measurement."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to measure.

    Attributes:
        workers: Numbers of worker processes.
        batch_sizes: Rows in a batch.
        seconds: How long each measurement runs after its first batch.
        rounds: How often each is repeated. A round measures every setting once.
    """

    workers: tuple[int, ...] = tuple(count for count in WORKERS if count <= usable_cpus())
    batch_sizes: tuple[int, ...] = BATCH_SIZES
    seconds: float = SECONDS
    rounds: int = ROUNDS

    @property
    def settings(self) -> list[Setting]:
        """Each number of workers with each batch size."""
        return [Setting(workers, size) for workers in self.workers for size in self.batch_sizes]

    @property
    def announced_seconds(self) -> float:
        """About how long all measurements take."""
        starts = START_SEC * self.rounds * sum(setting.workers > 0 for setting in self.settings)
        return (1 + SETTLE) * self.seconds * (1 + self.rounds * (1 + len(self.settings))) + starts


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of the loader."""

    workers: int
    batch_size: int

    def __str__(self) -> str:
        return f"num_workers={self.workers}, batch_size={self.batch_size}"


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement: seconds to the first batch, and some rows after it with the seconds that they took."""

    first_batch_s: float
    rows: int
    seconds: float

    @property
    def rate(self) -> float:
        """Rows in a second, without the time to the first batch."""
        return self.rows / self.seconds


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of the rounds, and their smallest and largest value."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Measured:
    """What the rounds of one setting have measured.

    Attributes:
        setting: The setting; None for Arrow alone.
        rows_per_s: Rows in a second after the first batch.
        first_batch_s: Seconds from ``iter(loader)`` to the first batch, the start of workers included.
        of_raw: The rate as a part of that of Arrow alone in the same round; None if Arrow alone cannot read the files.
        stored_bytes_per_s: The median rate in bytes of the files, compressed.
        decoded_bytes_per_s: The median rate in bytes as Arrow decodes them; None if Arrow alone cannot read the files.
    """

    setting: Setting | None
    rows_per_s: Spread
    first_batch_s: Spread
    of_raw: Spread | None
    stored_bytes_per_s: float
    decoded_bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class Advice:
    """The setting to use, and why."""

    setting: Setting
    reason: str


@dataclass(frozen=True, slots=True)
class Bench:
    """What `tdu bench` found.

    Attributes:
        root: The files' directory, without credentials.
        files: Number of files.
        rows: Number of rows; None for text, whose rows are not counted.
        columns: The columns that were read.
        open_s: Seconds to list the files and to read their footers.
        stored_row_bytes: Bytes of a row in the files, in these columns, compressed.
        decoded_row_bytes: Bytes of a row as Arrow decodes it; None if Arrow alone cannot read the files.
        rounds: How many rounds were measured.
        raw: Arrow alone; None if it cannot read the files.
        measured: The settings.
        advice: The advised one.
        notes: What else to know about these figures.
    """

    root: str
    files: int
    rows: int | None
    columns: tuple[str, ...]
    open_s: float
    stored_row_bytes: float
    decoded_row_bytes: float | None
    rounds: int
    raw: Measured | None
    measured: tuple[Measured, ...]
    advice: Advice
    notes: tuple[str, ...]


def bench(
    path: Any, options: BenchOptions, *, progress: Callable[[str], None] = lambda _: None, **arguments: Any
) -> Bench:
    """Measure the loader over some files, in turns with Arrow alone.

    `progress` is called with what is measured next. The arguments are those of `create_dataloader`, which says what is
    raised.

    Raises:
        ValueError: If the files have no rows.
    """
    begin = time.perf_counter()
    dataset = open_dataset(path, **arguments)
    open_s = time.perf_counter() - begin
    opened, notes = dataset.opened, []
    arrow = RawArrow(opened)
    raw: RawArrow | None = arrow
    progress("raw Arrow, for the first time")
    decoded_row_bytes = first_rate = None
    try:
        with opened.storage.errors_at("raw Arrow"):  # without secrets
            first_rate = measure(arrow, options.seconds).rate
        decoded_row_bytes = arrow.decoded_row_bytes
    except OSError as error:
        raw = None
        reason = " ".join(str(error).split())[:MOST_REASON]
        notes.append(f"There is no comparison with raw Arrow, which cannot read these files ({reason}).")
    samples = _measure_in_turns(dataset, raw, options, progress)
    sizes = dataset.stored_row_bytes(), decoded_row_bytes
    raw_samples = samples.pop(None, None)
    measured = tuple(summary(setting, found, raw_samples, sizes) for setting, found in samples.items())
    of_arrow = None if raw_samples is None else summary(None, raw_samples, None, sizes)
    if opened.storage.is_local:
        notes.append(_cache_note(sizes[0], first_rate, of_arrow))
    rounds = len(next(iter(samples.values())))
    if rounds < options.rounds:
        notes.append(f"Only {rounds} of {options.rounds} rounds were measured: they took longer than announced.")
    return Bench(
        root=opened.manifest.root,
        files=len(opened.manifest.files),
        rows=opened.manifest.rows if opened.manifest.counts_rows else None,
        columns=tuple(opened.schema.names),
        open_s=open_s,
        stored_row_bytes=sizes[0],
        decoded_row_bytes=decoded_row_bytes,
        rounds=rounds,
        raw=of_arrow,
        measured=measured,
        advice=advise(measured, samples),
        notes=tuple(notes),
    )


def _measure_in_turns(
    dataset: OpenedDataset, raw: RawArrow | None, options: BenchOptions, progress: Callable[[str], None]
) -> dict[Setting | None, list[Sample]]:
    """Measure every setting once in each round, so that a machine that slows down slows all of them."""
    begin = time.perf_counter()
    samples: dict[Setting | None, list[Sample]] = {} if raw is None else {None: []}
    samples |= {setting: [] for setting in options.settings}
    for number in range(options.rounds):
        if number and time.perf_counter() - begin > OVERTIME * (options.announced_seconds + SLACK_SEC):
            break
        where = f"round {number + 1} of {options.rounds}"
        if raw is not None:
            progress(f"{where}: raw Arrow")
            samples[None].append(measure(raw, options.seconds))
        for setting in options.settings:
            progress(f"{where}: {setting}")
            samples[setting].append(measure_loader(dataset, setting, options.seconds, epoch=number))
    return samples


def measure_loader(dataset: OpenedDataset, setting: Setting, seconds: float, epoch: int = 0) -> Sample:
    """Measure the loader, from an epoch on. Its worker processes have ended when this returns."""
    loader = LoaderPasses(dataset, setting, epoch)
    try:
        return measure(loader, seconds)
    finally:
        loader.close()


class Passes(Protocol):
    """Something that reads the files, pass after pass."""

    def begin(self) -> Iterator[Any]:
        """Return the batches of the next pass."""

    def rows(self) -> int:
        """Return the rows of the batches that were taken of this pass."""


def measure(passes: Passes, seconds: float) -> Sample:
    """Take batches for some seconds, not counting the time to the first batch and a part after it: see `SETTLE`.

    A pass that ends is followed by the next, and its start counts.

    Raises:
        ValueError: If there are no batches.
    """
    begin = time.perf_counter()
    batches = passes.begin()
    if next(batches, None) is None:
        raise ValueError("the files have no rows: there is nothing to measure")
    first = time.perf_counter()
    settled, rows = None, 0
    while True:
        for _ in batches:
            now = time.perf_counter()
            if settled is None:
                if now - first >= SETTLE * seconds:
                    settled, rows = now, -passes.rows()
            elif now - settled >= seconds:
                return Sample(first - begin, rows + passes.rows(), now - settled)
        rows += passes.rows()
        batches = passes.begin()


class LoaderPasses:
    """Epochs of the loader with one setting. Workers stay alive from one to the next."""

    def __init__(self, dataset: OpenedDataset, setting: Setting, epoch: int = 0) -> None:
        self._loader, self._dataset = dataset.loader(num_workers=setting.workers, batch_size=setting.batch_size)
        self._epochs = count(epoch)
        self._batches: Any = None

    def begin(self) -> Iterator[Any]:
        """Return the batches of the next epoch."""
        self._dataset.set_epoch(next(self._epochs))
        self._batches = batches = iter(self._loader)
        return batches

    def rows(self) -> int:
        """Return the rows of the batches that were taken of this epoch."""
        return int(self._dataset.get_metrics()["rows_delivered"])

    def close(self) -> None:
        """End the worker processes."""
        if self._batches is not None:
            self._batches.close()
        del self._loader, self._dataset, self._batches
        gc.collect()
        release_unused()


class RawArrow:
    """Arrow alone: its scanner decodes the same columns with all threads, and nothing is done with them.

    Files of remote storages are read through the same fsspec filesystem as the loader's.
    """

    def __init__(self, opened: OpenedFiles) -> None:
        self._opened = opened
        self._rows = self._read_rows = self._read_bytes = 0
        files = [opened.files[file.path] for file in opened.manifest.files]
        if opened.storage.is_local:
            filesystem: Any = fs.LocalFileSystem(use_mmap=all(map(opened.storage.maps, files[:1])))
        else:
            filesystem = fs.PyFileSystem(fs.FSSpecHandler(opened.storage.fs))
        self._files = pads.FileSystemDataset.from_paths(
            [file.location for file in files],
            schema=pa.schema([column for column in opened.schema if column.name not in opened.constant_columns]),
            format=ARROW_FORMATS[opened.format.name](),
            filesystem=filesystem,
        )

    @property
    def decoded_row_bytes(self) -> float:
        """Bytes of a row in memory, of all that were read."""
        return self._read_bytes / max(1, self._read_rows)

    def begin(self) -> Iterator[pa.RecordBatch]:
        """Decode all files, in order."""
        self._rows = 0
        for batch in self._files.to_batches():
            self._rows += batch.num_rows
            self._read_rows += batch.num_rows
            self._read_bytes += nbytes(batch)
            if batch.num_rows:
                yield batch

    def rows(self) -> int:
        """Return the rows that were decoded in this pass."""
        return self._rows


ARROW_FORMATS = {
    "parquet": pads.ParquetFileFormat,
    "orc": pads.OrcFileFormat,
    "csv": pads.CsvFileFormat,
    "jsonl": pads.JsonFileFormat,
}


def summary(
    setting: Setting | None,
    samples: Sequence[Sample],
    raw: Sequence[Sample] | None,
    row_bytes: tuple[float, float | None],
) -> Measured:
    """Return what the rounds of one setting have measured, also compared with Arrow alone in the same round.

    `row_bytes` are the bytes of a row in the files, and decoded.
    """
    rates = [sample.rate for sample in samples]
    rate = statistics.median(rates)
    stored, decoded = row_bytes
    return Measured(
        setting,
        rows_per_s=Spread.of(rates),
        first_batch_s=Spread.of([sample.first_batch_s for sample in samples]),
        of_raw=None if raw is None else Spread.of([of / arrow.rate for of, arrow in zip(rates, raw, strict=True)]),
        stored_bytes_per_s=rate * stored,
        decoded_bytes_per_s=None if decoded is None else rate * decoded,
    )


def advise(measured: Sequence[Measured], samples: Mapping[Setting | None, Sequence[Sample]]) -> Advice:
    """Advise the setting with the fewest processes that the fastest setting does not beat clearly.

    Rates are compared within each round, because a machine's speed changes from round to round. A setting is clearly
    faster if it was faster in every round.
    """
    rates = {one.setting: one.rows_per_s.median for one in measured if one.setting is not None}
    best = max(rates, key=rates.__getitem__)

    def faster(setting: Setting) -> list[float]:
        """Return how many times as fast the fastest setting was, round by round."""
        return [fast.rate / own.rate for own, fast in zip(samples[setting], samples[best], strict=True)]

    near = [setting for setting in rates if min(faster(setting)) <= CLEARLY]
    fewest = min(setting.workers for setting in near)
    setting = max((one for one in near if one.workers == fewest), key=rates.__getitem__)
    reason = f"{rates[setting]:,.0f} rows/s"
    others = [one for one in rates if one.workers != best.workers]
    if setting != best:
        spread = Spread.of(faster(setting))
        reason += f"; {best}, which takes {best.workers - fewest} more processes, is not clearly faster "
        reason += f"({spread.low:.2f} to {spread.high:.2f} times as fast)"
    elif others:
        second = max(others, key=rates.__getitem__)
        reason += f", the fastest of {len(rates)} settings; with {second}: {rates[second]:,.0f} rows/s"
    return Advice(setting, reason)


def _cache_note(stored_row_bytes: float, first_rate: float | None, raw: Measured | None) -> str:
    note = "Local files are in memory after their first reading (page cache): a cold disk may be slower"
    if first_rate is None or raw is None or first_rate >= raw.rows_per_s.low:  # not slower than later ones
        return f"{note}."
    first, later = size(first_rate * stored_row_bytes), size(raw.stored_bytes_per_s)
    return f"{note} (raw Arrow: {first}/s of stored bytes in its first measurement, then {later}/s)."
