"""The sources of a mixture as endless sequences of passes, and what was taken of them. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch_dataloader_utils.planning.manifest import DataFile, Manifest, SizedSplit, Split
from torch_dataloader_utils.planning.mixture.source_paths import parse_source_path, source_path
from torch_dataloader_utils.planning.mixture.weight_schedule import Shares
from torch_dataloader_utils.planning.plan import DeliveredBaseline, PartialShard, PlanOptions, Shard, ShardSlice
from torch_dataloader_utils.planning.planner import Selection
from torch_dataloader_utils.planning.row_ranges import Coverage, Windows, gaps, merged, size_of
from torch_dataloader_utils.planning.shards import make_shards

SHARDS_OF_A_PASS = 16
"""A pass has at least so many shards, if it has so many row groups: it does not know how many streams share it."""


@dataclass(frozen=True)
class PlannedSource:
    """A source as plans see it.

    Attributes:
        name: Its name.
        manifest: Its files.
        selection: The row groups that its filter leaves.
        has_whole_groups: Whether a row group is read as a whole where rows are shuffled, however large it is, since
            what is delivered is made of its rows.
    """

    name: str
    manifest: Manifest
    selection: Selection = None
    has_whole_groups: bool = False

    @cached_property
    def rows(self) -> int:
        """The rows of a pass."""
        return sum(group.rows for group in self._groups())

    def _groups(self) -> Iterator[SizedSplit]:
        for number, groups in enumerate(self.manifest.row_group_splits):
            selected = groups if self.selection is None else [groups[index] for index in self.selection[number]]
            yield from (group for group in selected if group.split.row_length)

    def slices(self, number: int, options: PlanOptions, buffer_rows: int | None) -> Iterator[ShardSlice]:
        """Yield the shards of a pass, in its order."""
        groups = [self._in_pass(group, number) for group in self._groups()]
        options = self._of_pass(options, buffer_rows)
        yield from map(ShardSlice, make_shards(groups, options, number, SHARDS_OF_A_PASS // 4))

    def _of_pass(self, options: PlanOptions, buffer_rows: int | None) -> PlanOptions:
        """Return the options by which a pass is divided into shards.

        What is made of a row group is in memory as a whole, so that the buffer has room for the largest one.
        """
        if buffer_rows is not None and self.has_whole_groups:
            groups = list(self._groups())
            buffer_rows = max([buffer_rows, *(group.rows for group in groups)])
            options = replace(options, split_bytes=max([options.split_bytes, *(group.bytes for group in groups)]))
        return replace(options, shuffle_buffer_size=buffer_rows)

    def _in_pass(self, group: SizedSplit, number: int) -> SizedSplit:
        return replace(group, split=replace(group.split, path=source_path(self.name, number, group.split.path)))

    def rest(
        self, number: int, options: PlanOptions, buffer_rows: int | None, taken: Taken, left_out: Collection[str]
    ) -> Iterator[ShardSlice]:
        """Yield the shards of a pass whose files have changed since it began.

        First come those of which rows were taken, then those of the row groups of which none was. Files that are left
        out have other rows now, and those come with the next pass.
        """
        path = source_path(self.name, number, "")
        yield from map(ShardSlice, taken.begun(path))
        untouched = taken.untouched(self._in_pass(group, number) for group in self._groups())
        groups = [group for group in untouched if group.split.path not in left_out]
        options = self._of_pass(options, buffer_rows)
        yield from map(ShardSlice, make_shards(groups, options, number, SHARDS_OF_A_PASS // 4))

    def files(self, number: int) -> Iterator[DataFile]:
        """Yield the files of a pass."""
        for file in self.manifest.files:
            yield file._replace(path=source_path(self.name, number, file.path))


@dataclass(frozen=True, slots=True)
class Start:
    """Where an epoch begins in a source: a pass, and how many rows of it were planned before."""

    number: int = 0
    row: int = 0


NONE_CARRIED = DeliveredBaseline((), (), (), 0)


@dataclass(frozen=True, slots=True)
class Base:
    """The epoch from which on others are counted, and where it begins.

    Attributes:
        epoch: The epoch.
        starts: Where it begins in each source.
        rows_before: Planned rows of the whole run before it, of all ranks.
        rows: Rows of this epoch, of all ranks, if it began with another number than later epochs have.
        ends: For each source the pass before which the epoch's files end; None where its plan says so.
        buffers: The rows of the shuffle buffer in passes that had begun before, by source and pass.
        carried: Rows after the starts that earlier epochs have taken.
        changed: The passes, by source and number, whose files have changed since they began. Their shards follow from
            the rows that are carried or delivered. For each the paths of files of which no more rows come in it.
    """

    epoch: int
    starts: tuple[Start, ...]
    rows_before: int = 0
    rows: int | None = None
    ends: tuple[int, ...] | None = None
    buffers: Mapping[tuple[int, int], int | None] = field(default_factory=dict)
    carried: DeliveredBaseline = NONE_CARRIED
    changed: Mapping[tuple[int, int], tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MixturePlace:
    """What the plans of a mixture's epochs depend on in addition to files, options and topology.

    Attributes:
        base: From which epoch on others are counted, and where it begins.
        schedule: From which planned row of the whole run on which shares of the sources hold.
        rows_per_epoch: Rows of an epoch, of all ranks.
        drop_last: Whether a short last step is left out.
    """

    base: Base
    schedule: Shares
    rows_per_epoch: int
    drop_last: bool


class Taken:
    """Rows that epochs, or the current one, have taken of shards."""

    def __init__(self, *baselines: DeliveredBaseline) -> None:
        self._done = [split for baseline in baselines for split in baseline.done]
        self._whole = Coverage(self._done)
        self._windows: defaultdict[tuple[Split, ...], list[tuple[int, int]]] = defaultdict(list)
        self._shards: dict[tuple[Split, ...], Shard] = {}
        for partial in (partial for baseline in baselines for partial in baseline.partial):
            self._windows[partial.shard.splits] += partial.windows
            self._shards[partial.shard.splits] = partial.shard

    def add(self, slices: Iterable[ShardSlice]) -> None:
        """Add slices."""
        for part in slices:
            self._windows[part.shard.splits].append((part.start, part.stop))

    def begun(self, path: str) -> list[Shard]:
        """Return the shards of which some rows are taken, of files whose paths begin so."""
        return [self._shards[splits] for splits in sorted(self._shards) if splits[0].path.startswith(path)]

    def done(self, path: str) -> Iterator[Split]:
        """Yield the row ranges that are done, of files whose paths begin so."""
        return (split for split in self._done if split.path.startswith(path))

    def untouched(self, groups: Iterable[SizedSplit]) -> Iterator[SizedSplit]:
        """Yield the row groups of which no row is taken, and that are in no shard of which some are."""
        begun = Coverage(split for splits in self._shards for split in splits)
        return (group for group in groups if not (self._whole.covers(group.split) or begun.covers(group.split)))

    def windows(self, part: ShardSlice) -> Windows:
        """Return the rows that are taken of a shard."""
        if all(map(self._whole.covers, part.shard.splits)):
            return ((0, part.rows),)
        return merged(self._windows.get(part.shard.splits, ()))


def rows_of(baseline: DeliveredBaseline, source: str | None = None) -> int:
    """Return the rows of a baseline, or those of one source that are still there."""
    gone = baseline.gone if source is None else 0
    return gone + _rows_of_source(baseline.done, baseline.partial, source)


def delivered_of(baseline: DeliveredBaseline, source: str) -> int:
    """Return the rows of a source that are still there, but for those that were skipped."""
    skipped = baseline.skipped
    less = 0 if skipped is None else _rows_of_source(skipped.whole, skipped.partial, source)
    return rows_of(baseline, source) - less


def _rows_of_source(whole: Iterable[Split], partial: Iterable[PartialShard], source: str | None) -> int:
    """Return the rows of ranges and of parts of shards, or those of one source."""

    def counts(split: Split) -> bool:
        return source is None or parse_source_path(split.path).source == source

    of_ranges = sum(split.row_length for split in whole if counts(split))
    return of_ranges + sum(size_of(part.windows) for part in partial if counts(part.shard.splits[0]))


def end_of_passes(baseline: DeliveredBaseline, source: str) -> int:
    """Return the number after the last pass of a source that a baseline has rows of; 0 if it has none."""
    splits = (*baseline.done, *(split for partial in baseline.partial for split in partial.shard.splits))
    found = map(parse_source_path, {split.path for split in splits})
    return max((path.number + 1 for path in found if path.source == source), default=0)


def moved(start: Start, rows: int, size: int) -> Start:
    """Return a place so many rows of a sequence of equal passes later."""
    if not rows:
        return start
    passes, row = divmod(start.row + rows, size)
    return Start(start.number + passes, row)


def first_left(
    start: Start,
    stop: int,
    shards_of: Callable[[int], Iterable[ShardSlice]],
    taken: Taken,
    begun_again: Collection[int],
) -> tuple[Start, list[tuple[ShardSlice, Windows]]]:
    """Return the first row from a start on that is not taken, and which rows of later shards are, before a pass.

    `shards_of` returns the shards of a pass. Passes whose files have changed have begun again as far as numbers of rows
    go: all that is taken of them comes later.
    """
    first: Start | None = None
    later: list[tuple[ShardSlice, Windows]] = []
    for number in range(start.number, stop):
        before = 0
        has_changed = number in begun_again
        of_pass: list[tuple[ShardSlice, Windows]] = []
        for part in shards_of(number):
            windows = taken.windows(part)
            if number == start.number:  # the rows before the start were taken by earlier epochs
                windows = merged([*windows, (0, min(part.rows, max(0, start.row - before)))])
                windows = tuple(window for window in windows if window[0] < window[1])
            left = gaps(windows, part.rows)
            if first is None and left:
                first = Start(number, 0 if has_changed else before + left[0][0])
                if not has_changed:
                    windows = tuple(window for window in windows if window[0] >= left[0][0])
            if windows and (first is not None or has_changed):
                of_pass.append((part, windows))
            before += part.rows
        if first is not None:
            later += of_pass
    return first or Start(stop, 0), later
