"""An audit of states: for each file how many rows are done, under way, left, missing or recorded twice. Pure.

States are compared with one another and with today's files. Where they do not fit together, that is a finding, not an
error, as long as they are of one epoch of one list of files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from torch_dataloader_utils.checkpoint.audit_result import Audit, Counts, FileAudit, RankAudit
from torch_dataloader_utils.checkpoint.compare import MOST_RANKS, file_lines, require_alike, shorten
from torch_dataloader_utils.checkpoint.file_changes import NOT_COMPARED, compare_manifests, how_changed, touched_in
from torch_dataloader_utils.checkpoint.merge.states import ALIKE
from torch_dataloader_utils.checkpoint.mixture_run import MixtureRun
from torch_dataloader_utils.checkpoint.removed_rows import RowsWithin, passed_in, saved_removed
from torch_dataloader_utils.checkpoint.row_counts import Axis, Integers, RowCounts, count_rows, ends_in, rows_recorded
from torch_dataloader_utils.checkpoint.saved_state import MOST_FILES, SavedMixture, SavedState
from torch_dataloader_utils.errors import shown
from torch_dataloader_utils.planning.excluded import NONE_EXCLUDED, EpochExclusions
from torch_dataloader_utils.planning.manifest import Layout, Manifest
from torch_dataloader_utils.planning.mixture.source_paths import source_path
from torch_dataloader_utils.planning.planner import Selection
from torch_dataloader_utils.planning.row_ranges import size_of, splits_of_rows

COUNTED = " counted"
"""How the digest of a text format's options ends where rows are counted."""

TEXT_FORMATS = ("csv", "json", "jsonl")


@dataclass(frozen=True, slots=True)
class Today:
    """Today's files, which states are compared with.

    Attributes:
        manifest: The files.
        selection: The row groups that the filter may keep rows of, if it is the filter of the states; else None.
        differences: How settings differ from those of the states, in words.
        has_rows: Whether the manifest counts what the states count.
    """

    manifest: Manifest
    selection: Selection = None
    differences: tuple[str, ...] = ()
    has_rows: bool = True


def unit_of(settings: Mapping[str, Any]) -> str:
    """Return what a state with these settings counts: rows or bytes."""
    digest = str(settings["format_options"])
    is_bytes = settings["format"] in TEXT_FORMATS and not digest.endswith(COUNTED)
    return "bytes" if is_bytes else "rows"


def audit_states(states: Sequence[SavedState], today: Today | None = None) -> Audit:
    """Count what the states of one rank, or of several, record.

    Those of a mixture are counted for each file of each pass that their epoch reaches: what earlier epochs have taken
    is done, and what is left comes in this epoch or a later one.

    Raises:
        RankMismatchError: If the states are of several epochs, or of several lists of files.
    """
    datasets = {"files": lambda state: (state.fingerprint, state.settings["rows"])}
    require_alike(states, {"epochs": lambda state: state.epoch, **datasets})
    states = list(map(_with_files_of_passes, states))
    first = states[0]
    return _Auditing(states, today, _layout(first, today)).audit()


def _with_files_of_passes(state: SavedState) -> SavedState:
    """Return the state of a mixture with the files of each pass that its epoch reaches; of a single dataset itself."""
    if state.mixture is None or state.mixture.layout is None:
        return state
    files = (
        replace(file, path=source_path(source.name, number, file.path))
        for source in state.mixture.sources
        for number in source.position.passes
        for file in source.files or ()
    )
    return replace(state, files=tuple(sorted(files, key=lambda file: file.path)))


def manifest_of_passes(mixture: SavedMixture, run: MixtureRun) -> Manifest:
    """Return today's files of the passes that the epoch of a state reaches."""
    passes = {source.name: source.position.passes for source in mixture.sources}
    files = (
        file._replace(path=source_path(source.name, number, file.path))
        for source in run.sources
        for number in passes.get(source.name, ())
        for file in source.manifest.files
    )
    return Manifest("", tuple(sorted(files, key=lambda file: file.path)))


def _layout(saved: SavedState, today: Today | None) -> Layout | None:
    """Return the files, each with its rows, to which the states refer; None if they are not known."""
    if saved.files is not None and all(file.rows is not None for file in saved.files):
        return Layout((file.path, file.rows or 0) for file in saved.files)
    if today is not None and today.has_rows and today.manifest.fingerprint == saved.fingerprint:
        return today.manifest.rows_by_file
    return None


class _Auditing:
    """States, the files that they refer to, and today's.

    The layout has the files and their rows. Where it is not known, one nameless file stands for all of them.
    """

    def __init__(self, states: Sequence[SavedState], today: Today | None, layout: Layout | None) -> None:
        self._states, self._today, self._saved = states, today, states[0]
        self._layout = layout
        known = Layout([("", self._saved.settings["rows"])]) if layout is None else layout
        names = {path for path, _ in known}
        others = [(path, end) for path, end in sorted(ends_in(states).items()) if path not in names]
        self._axis = Axis(Layout([*known, *others]))
        self._paths = ("",) if layout is None else self._axis.paths
        self._unit = unit_of(self._saved.settings)
        self._is_complete = {state.rank for state in states} == set(range(self._saved.num_ranks))
        baselines = [state.baseline for state in states if state.baseline is not None]
        self._left_out = {path for baseline in baselines for path in baseline.left_out}
        self._changes = _changes(self._saved, today)
        self._exclusions = self._saved.excluded.exclusions(known)
        self._removed_left = 0  # rows that are excluded in this epoch, and that their ranks have not come to
        self._left_out_rows = NONE_EXCLUDED  # those that were excluded in earlier epochs

    def audit(self) -> Audit:
        """Return what was found."""
        saved, today = self._saved, self._today
        excluded = EpochExclusions() if self._layout is None else self._exclusions.in_epoch(saved.epoch)
        is_filtered = saved.settings["filters"] is not None or bool(excluded.left_out_by)
        is_exact = self._unit == "rows" and not is_filtered and not saved.is_open_ended
        self._left_out_rows = excluded.left_out
        if excluded.removed:
            excluded = self._without_delivered(excluded, is_exact=is_exact)
        columns = self._columns(count_rows(self._states, self._axis, excluded, is_exact=is_exact))
        differences: list[str] = []
        if today is not None:
            differences = [*file_lines(compare_manifests(saved, today.manifest)), *today.differences]
        states = sorted(self._states, key=lambda state: state.rank)
        return Audit(
            epoch=saved.epoch,
            batches=max(state.batches_delivered for state in states),
            num_ranks=saved.num_ranks,
            ranks=tuple(RankAudit(state.rank, state.batches_delivered, self._recorded(state)) for state in states),
            unit=self._unit,
            root=saved.root,
            total=Counts(**{name: int(column.sum()) for name, column in columns.items()}),
            files=() if self._layout is None else tuple(self._files(columns)),
            files_match=None
            if today is None
            else saved.fingerprint == today.manifest.fingerprint and not self._changes,
            differences=tuple(differences),
            problems=tuple(_problems(self._states)),
            notes=tuple(self._notes()),
        )

    def _recorded(self, state: SavedState) -> int:
        return rows_recorded(state, in_bytes=self._unit == "bytes")

    def _without_delivered(self, excluded: EpochExclusions, *, is_exact: bool) -> EpochExclusions:
        """Return what is excluded without the rows that were delivered in this epoch before they were excluded in it.

        Where states of some ranks are not given, those may have delivered what the others have not passed.
        """
        saved, layout, removed = self._saved, self._layout or Layout(), excluded.removed
        seed = saved.settings["shuffle_seed"] if saved.settings["shuffle_buffer_size"] is not None else None
        within = RowsWithin(removed, seed=seed, epoch=saved.epoch, is_exact=is_exact)
        passed = passed_in(self._states, within, layout, excluded.left_out)
        delivered = saved_removed(self._states, layout).delivered if self._records_removed else passed
        lost = removed.minus(delivered)
        if not self._is_complete:
            lost = lost.both(passed)
        self._removed_left = lost.minus(passed).rows
        return replace(excluded, removed=lost)

    @property
    def _records_removed(self) -> bool:
        """Whether states tell which rows were delivered before they were excluded: those of earlier releases do not."""
        return all(state.excluded_delivered is not None for state in self._states)

    def _columns(self, counts: RowCounts) -> dict[str, Integers]:
        """Return for each field of `Counts` the number of each file."""
        rows = self._axis.rows
        if self._layout is None:  # what is recorded by path is of the nameless file as well
            rows, counts = rows[:1], counts.summed()
        rest = rows - counts.done - counts.under_way - counts.skipped - counts.excluded
        none = np.zeros_like(rest)
        missing = rest * self._mask(self._left_out)
        changed = (rest - missing) * self._mask(path for path, how in self._changes.items() if how != NOT_COMPARED)
        rest = rest - missing - changed
        ruled_out = np.minimum(rest, self._ruled_out())
        rest = rest - ruled_out
        is_dropped = self._is_dropped(int(rest.sum()) + self._removed_left, int(rows.sum()) - self._left_out_rows.rows)
        return {
            "rows": rows,
            "done": counts.done,
            "under_way": counts.under_way,
            "left": rest if self._is_complete and not is_dropped else none,
            "missing": missing + changed if self._is_complete else missing,
            "unknown": none if self._is_complete else rest + changed,
            "dropped": rest if is_dropped else none,
            "skipped": counts.skipped,
            "excluded": counts.excluded,
            "ruled_out": ruled_out,
            "twice": counts.twice,
            "repeated": counts.repeated,
        }

    def _mask(self, paths: Iterable[str]) -> Integers:
        """Return 1 for each of these files, and 0 for the others."""
        chosen = set(paths)
        return np.fromiter((path in chosen for path in self._paths), np.int64, len(self._paths))

    def _ruled_out(self) -> Integers:
        """Return for each file the rows of the row groups that the filter rules out, as far as that is known."""
        today, found = self._today, np.zeros(len(self._paths), dtype=np.int64)
        if today is None or today.selection is None or self._layout is None:
            return found
        places = {path: number for number, path in enumerate(self._paths)}
        for file, selected in zip(today.manifest.files, today.selection, strict=True):
            if file.path in places and len(selected) < len(file.row_groups):
                found[places[file.path]] = file.rows - sum(file.row_groups[number].rows for number in selected)
        return found

    def _is_dropped(self, rest: int, rows: int) -> bool:
        """Whether the rest are the rows that are dropped where all ranks have equally many and have ended."""
        settings, baseline = self._saved.settings, self._saved.baseline
        if settings["uneven_ranks"] != "drop" or not self._is_complete or self._left_out or self._changes:
            return False
        if self._saved.mixture is not None:
            return False  # they come first in the next epoch
        if baseline is not None:
            if self._layout is None and self._exclusions:
                return False  # its ranges may hold rows that were left out
            rows -= sum(baseline.completed_rows[1::2]) - sum(baseline.completed_rows[::2])
            if self._left_out_rows:
                rows += sum(
                    map(self._left_out_rows.within, splits_of_rows(self._layout or Layout(), baseline.completed_rows))
                )
            rows -= sum(size_of(shard.windows) for shard in baseline.in_progress)
        ranks = int(settings["virtual_ranks"] or settings["num_ranks"])
        return rest > 0 and rest == rows % ranks

    def _files(self, columns: Mapping[str, Integers]) -> Iterator[FileAudit]:
        """Yield what was found of each file, sorted by path; those that only today's list has have no rows."""
        listed = self._paths[: len(self._layout or Layout())]
        values = zip(*(column.tolist() for column in columns.values()), strict=True)
        found = {
            path: dict(zip(columns, of_file, strict=True)) for path, of_file in zip(self._paths, values, strict=True)
        }
        added = () if self._today is None or self._saved.files is None else self._today.manifest.rows_of
        for path in sorted({*listed, *self._left_out, *added}):
            change = self._changes.get(path)
            if path in self._left_out:
                change = "removed or rewritten during the epoch"
            elif path not in found:
                change = "added since the checkpoint"
            yield FileAudit(path=path, change=change, **found.get(path, {}))

    def _notes(self) -> Iterator[str]:
        saved = self._saved
        if not self._is_complete:
            given = {state.rank for state in self._states}
            absent = list(islice((rank for rank in range(saved.num_ranks) if rank not in given), MOST_RANKS))
            yield f"the states of ranks {shown(absent)} are not given: what those ranks delivered is not known"
        if self._layout is None:
            many = (
                f"states do not list more than {MOST_FILES:,} files" if saved.files is None else "rows are not listed"
            )
            yield f"{many}: without today's files, unchanged, there are no numbers for each file"
        if saved.settings["filters"] is not None:
            yield "rows are counted as the files have them, before the filter"
            if self._today is None or self._today.selection is None:
                yield "rows of row groups that the filter rules out count as left"
        yield from self._notes_of_units()
        listed = {path for path, _ in self._layout or Layout()}
        yield from self._notes_of_exclusions()
        lost = sorted(self._left_out - listed)
        if lost:
            yield f"files were removed during the epoch; how many of their rows are missing is unknown: {shorten(lost)}"
        touched = [] if self._today is None else touched_in(saved, self._today.manifest)
        if touched:
            yield f"files have a new modification time; their size and footer are the same: {shorten(touched)}"

    def _notes_of_units(self) -> Iterator[str]:
        saved = self._saved
        if saved.settings["unit"] != "rows" and not saved.is_open_ended:
            yield f"the numbers are those of {saved.settings['unit']}, which were counted, and not of rows of the files"
        elif saved.settings["unit"] != "rows":
            yield f"rows are counted as the files have them, and not the {saved.settings['unit']} that were delivered"
        if self._unit == "bytes":
            yield "the rows of text are not counted: the numbers are bytes of uncompressed text, of shards as a whole"
            yield "of compressed text, they are the most bytes that the files can hold"
        if saved.mixture is not None:
            yield "all rows of each pass that a mixture's epoch reaches are counted; those of later epochs are left"

    def _notes_of_exclusions(self) -> Iterator[str]:
        if self._exclusions and self._layout is None:
            yield "excluded rows are not told apart from the others"
        elif self._exclusions.in_epoch(self._saved.epoch).removed and not self._records_removed:
            msg = (
                "rows that were excluded in this epoch count as delivered once their step is passed: states of earlier "
            )
            yield f"{msg}releases do not tell whether they were delivered before, or left out of its batch"
        if self._exclusions.expressions:
            texts = [one.text for one in self._exclusions.expressions]
            yield f"which rows are excluded by an expression only reading tells: {shorten(texts)}"


def _changes(saved: SavedState, today: Today | None) -> dict[str, str]:
    """Return how files differ today from those in a state, by path, as far as the state lists them."""
    if today is None:
        return {}
    now = {file.path: file for file in today.manifest.files}
    found = {}
    for file in saved.files or ():
        change = how_changed(file, now[file.path]) if file.path in now else "removed since the checkpoint"
        if change is not None:
            found[file.path] = change
    return found


def _problems(states: Sequence[SavedState]) -> Iterator[str]:
    """Yield how states do not fit together."""
    counts = sorted({state.num_ranks for state in states})
    if len(counts) > 1:
        yield f"the states were saved under different numbers of ranks: {shown(counts)}"
    twice = sorted(rank for rank, times in Counter(state.rank for state in states).items() if times > 1)
    if twice:
        yield f"the states of ranks {shown(twice)} are given more than once"
    parts: dict[str, Callable[[SavedState], Any]] = {**ALIKE, "plans": lambda state: state.plan_digest}
    for name, part in parts.items():
        others = [state.rank for state in states if part(state) != part(states[0])]
        if others:
            yield f"ranks {shown(others)} were saved under other {name} than rank {states[0].rank}"
