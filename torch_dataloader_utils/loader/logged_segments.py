"""The segments of a run log as the ledger knows segments: by plans that can be made again from today's files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch_dataloader_utils.checkpoint.restore import load_baseline
from torch_dataloader_utils.checkpoint.run_segments import RunSegment
from torch_dataloader_utils.errors import LedgerUnknownError, shown
from torch_dataloader_utils.formats.opened_files import Opened, OpenedSources
from torch_dataloader_utils.loader.mixture import different_sources
from torch_dataloader_utils.loader.run_log import RunLogFiles
from torch_dataloader_utils.loader.segments import Segments, have_one_plan, removals_from
from torch_dataloader_utils.planning.ledger.rank_starts import regrouped
from torch_dataloader_utils.planning.ledger.segment import RankStart, Removal, Segment
from torch_dataloader_utils.planning.planner import PLAN_ALGORITHMS


@dataclass
class LoggedSegments:
    """The segments of a log whose steps count.

    A log is read when it is first needed, and again after `forget`: what is in it does not change, but for its end.
    """

    files: RunLogFiles
    opened_files: Opened = field(repr=False)
    _known: tuple[RunSegment, ...] | None = None

    def forget(self) -> None:
        """Read the log again when it is needed: a segment was begun, or may have been by another process."""
        self._known = None

    def of(self, epoch: int, segments: Segments) -> tuple[Segment, ...]:
        """Return the segments of an epoch, oldest first; none if the log knows of no later epoch.

        Raises:
            LedgerUnknownError: If the log lacks the epoch or a part of it, or its files or filter are others today.
            ValueError: If the log is damaged.
            OSError: If it cannot be read.
        """
        if self._known is None:
            self._known = self.files.segments()
        newest = max((segment.epoch for segment in self._known), default=-1)
        found = [segment for segment in self._known if segment.epoch == epoch]
        if not found and epoch < newest:
            raise LedgerUnknownError(f"epoch {epoch} is not in the run log {self.files.url}, and later epochs are")
        of_epoch = _Epoch(segments, self.files.url)
        for segment in (one for one in found if one.stop is None or one.stop > one.first_step):
            self._require_known(segment, segments)
            of_epoch.append(segment)
        return tuple(of_epoch.logged)

    def _require_known(self, segment: RunSegment, segments: Segments) -> None:
        """Raise unless today's files and planning give the plan of a segment."""
        where = f"the steps from {segment.first_step} on of epoch {segment.epoch} in the run log {self.files.url}"
        if not segment.is_certain:
            raise LedgerUnknownError(f"{where} are not known: a file that comes after {segment.name} is missing")
        files, saved = self.opened_files, segment.state
        if saved.has_unequal_batches:
            raise LedgerUnknownError(f"{where} have unequal numbers of rows: a TokenBudget made their batches")
        now = {
            "files": files.manifest.fingerprint,
            "filters": files.filter_digest,
            "filter_binding": files.filter_binding,
            "format": files.format_name,
            "format_options": files.options_digest,
            "split_strategy": segments.strategy_digest(segment.epoch),
            "transform_id": None if files.transform is None else files.transform.id,
        }
        then = {**saved.settings, "files": saved.fingerprint}
        different = [name for name, value in now.items() if then[name] != value]
        if isinstance(files, OpenedSources) and saved.mixture is not None:
            different = different_sources(files, saved.mixture)
        if segment.settings["plan_algorithm"] not in PLAN_ALGORITHMS:
            different.append("plan_algorithm")
        if different:
            raise LedgerUnknownError(f"{where} were delivered with other {shown(different)} than this dataset has")


class _Epoch:
    """The segments of an epoch in the order of the log."""

    def __init__(self, segments: Segments, url: str) -> None:
        self.logged: list[Segment] = []
        self._segments = segments
        self._url = url

    def append(self, segment: RunSegment) -> None:
        """Add a segment, or lengthen the last one that it continues in the same plan."""
        own = _of(segment, self._segments)
        if segment.began == "epoch":
            self.logged.clear()  # the epoch began again
        if segment.began != "state" or own.begin == segment.first_step:
            self.logged.append(own)
            return
        before = self.logged[-1] if self.logged else None
        if before is None or not have_one_plan(before, own):
            self._require_same_batches(segment, own)
            self.logged.append(own)
            return
        own_alone = segment.loaded is None or not segment.loaded.is_one_step
        removals = removals_from(own, before.removals, segment.first_step, own_alone=own_alone)
        if (before.batch_size, before.drop_last, before.topology) == (own.batch_size, own.drop_last, own.topology):
            self.logged[-1] = replace(own, first_step=before.first_step, starts=before.starts, removals=removals)
        else:
            steps = _steps_before(segment, before.topology.num_ranks)
            starts = self._starts(before, own, steps)
            self.logged[-1] = replace(before, stops=steps)
            self.logged.append(replace(own, first_step=segment.first_step, starts=starts, removals=removals))

    def _require_same_batches(self, segment: RunSegment, own: Segment) -> None:
        """Raise unless a segment continues the batches that were before it, of which the log has nothing itself."""
        loaded = segment.loaded
        own_batches = own.topology.num_ranks, own.batch_size, own.drop_last
        if loaded is None or (loaded.num_ranks, loaded.batch_size, loaded.drop_last) != own_batches:
            msg = f"the run log {self._url} does not have the steps before step {segment.first_step} of epoch "
            msg += f"{segment.epoch}, whose batches had another size: where ranks stood at that step is not known"
            raise LedgerUnknownError(msg)

    def _starts(self, before: Segment, own: Segment, steps: Sequence[int]) -> dict[int, RankStart]:
        """Return where ranks stood when a segment began whose batches, or real ranks, differ from those before it.

        `steps` are those that they had made, by rank.
        """
        ledger = self._segments.ledger(replace(before, stops=None))
        stands = [replace(ledger.start_at(rank, step), step=step) for rank, step in enumerate(steps)]
        return regrouped(stands, before.topology, own.topology)


def _steps_before(segment: RunSegment, num_ranks: int) -> tuple[int, ...]:
    """Return the steps that each rank had made before a segment; where that is not recorded, as many as rank 0."""
    steps = None if segment.loaded is None else segment.loaded.steps
    return steps if steps is not None and len(steps) == num_ranks else (segment.first_step,) * num_ranks


def _of(segment: RunSegment, segments: Segments) -> Segment:
    """Return a segment of the log from the beginning of its plan."""
    saved, stop = segment.state, segment.stop
    own = Segment(
        epoch=segment.epoch,
        plan_algorithm=segment.settings["plan_algorithm"],
        options=segment.options,
        topology=segment.topology,
        batch_size=saved.batch_size or 1,  # never None: see `_require_known`
        drop_last=segment.drop_last,
        stops=None if stop is None else segment.rank_stops or (stop,) * segment.num_ranks,
        skipped=segment.skipped,
        restores=segment.restores,
        mixture=segments.place_of(saved, segment.topology, drop_last=segment.drop_last),
    )
    manifest = segments.manifest(own)
    excluded = saved.excluded.exclusions(manifest.rows_by_file).in_epoch(segment.epoch)
    removal = Removal(0, excluded.removed, excluded.removed_by)
    return replace(
        own,
        left_out=excluded.left_out,
        removals=(removal,) if removal.rows or removal.expressions else (),
        baseline=None
        if saved.baseline is None
        else load_baseline(saved.baseline, manifest, excluded.left_out, is_open_ended=saved.is_open_ended),
    )
