"""Where a dataset stands: its epoch, the epoch's plan, and which iteration owns the progress."""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from torch.utils.data import get_worker_info

from torch_dataloader_utils.checkpoint.compare import shorten, touched_files
from torch_dataloader_utils.checkpoint.dump import dump_state
from torch_dataloader_utils.checkpoint.merge import OnChangedFiles, merge_states
from torch_dataloader_utils.checkpoint.parse import parse_states
from torch_dataloader_utils.checkpoint.progress import Progress
from torch_dataloader_utils.checkpoint.restore import check_states, place_states
from torch_dataloader_utils.checkpoint.run import Run
from torch_dataloader_utils.checkpoint.saved_state import SavedState
from torch_dataloader_utils.errors import ChangedFilesWarning, LostRowsWarning, UnevenRanksWarning, warn_user
from torch_dataloader_utils.formats.base import OpenedFiles
from torch_dataloader_utils.loader.iteration import Iteration
from torch_dataloader_utils.loader.metrics import ProgressLine
from torch_dataloader_utils.loader.plain_loader import Copies, is_being_sent_to_a_process
from torch_dataloader_utils.planning.manifest import SizedSplit
from torch_dataloader_utils.planning.plan import DeliveredBaseline, Plan, PlanOptions, ShardSlice
from torch_dataloader_utils.planning.planner import make_plan
from torch_dataloader_utils.planning.shuffle import delivery_order
from torch_dataloader_utils.planning.strategy import SplitStrategy, bundled, described
from torch_dataloader_utils.planning.topology import Topology
from torch_dataloader_utils.reading.scan import ReadOptions

__all__ = ["EpochState"]


LOG = logging.getLogger("torch_dataloader_utils")


class EpochState:
    """A rank's way through its epochs.

    Args:
        opened_files: The data files.
        plan_options: What plans depend on.
        read_options: What the number of batches depends on.
        strategy: How row groups are bundled, or None for the plan's own way.
        topology: Who reads.
        adopts_num_workers: Whether a loaded state's number of workers is taken over.
        progress_interval_sec: Seconds between two lines about the progress; None for none.
    """

    def __init__(
        self,
        opened_files: OpenedFiles,
        plan_options: PlanOptions,
        read_options: ReadOptions,
        *,
        strategy: SplitStrategy | None,
        topology: Topology,
        adopts_num_workers: bool,
        progress_interval_sec: float | None,
    ) -> None:
        self.topology = topology
        self.epoch = 0
        self.iteration: Iteration | None = None
        self.copies = Copies()
        self._opened_files = opened_files
        self._plan_options = plan_options
        self._read_options = read_options
        self._strategy = strategy
        self._own_shards: tuple[int, list[list[SizedSplit]], str] | None = None
        self._adopts_num_workers = adopts_num_workers
        self._progress_interval_sec = progress_interval_sec
        self._plan: tuple[tuple[int, int, DeliveredBaseline | None], Plan] | None = None
        self._balanced_rows: tuple[Plan, dict[str, list[tuple[str, int]]]] | None = None
        self._loaded: Progress | None = None
        self._iterations = 0
        self._warned_of_uneven_ranks = False
        self._warn_of_uneven_ranks()
        self._check_strategy()

    @property
    def num_batches(self) -> int:
        """The epoch's number of batches, also when it is continued from a state.

        Raises:
            TypeError: If only reading tells.
        """
        if self._opened_files.unknown_rows is not None:
            msg = f"the number of batches is not known ahead: {self._opened_files.unknown_rows}"
            raise TypeError(msg)
        return self._batches(self.progress)

    @property
    def plan_digest(self) -> str:
        """Digest of this epoch's plan and all that decides its batches."""
        parts = (
            self._plan_of(self.progress.baseline).digest,
            self._opened_files.manifest.fingerprint,
            self._opened_files.filter_digest,
            self._opened_files.format.options_digest,
            self._plan_options,
            self._read_options.batch_size,
            self._read_options.drop_last,
        )
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    @property
    def progress(self) -> Progress:
        """The progress as it stands: of the newest iteration, else loaded, else none."""
        if self.iteration is not None:
            return self.iteration.progress
        return self._loaded if self._loaded is not None else self._fresh()

    def begin_iteration(self) -> Iteration:
        """Begin an iteration: the epoch anew, or what a state that was loaded since the last one left."""
        progress = self._loaded if self._loaded is not None else self._fresh()
        self._take_over("iter", None)
        self._iterations += 1
        line = None
        if self._progress_interval_sec is not None:
            total = None if self._opened_files.unknown_rows is not None else self._batches(progress)
            line = ProgressLine(self._progress_interval_sec, total)
        self.iteration = Iteration(self._iterations, self.epoch, progress, self.topology.processes, line)
        self._log_balancing()
        return self.iteration

    def set_epoch(self, epoch: int) -> None:
        """Plan an epoch and forget the progress, but for a loaded state that waits for its iteration in this epoch."""
        if self._loaded is not None and epoch == self.epoch:
            return
        self.epoch = epoch
        self._take_over("set_epoch", None)
        self._warn_of_uneven_ranks()
        self._check_strategy()

    def state_dict(self) -> dict[str, Any]:
        """Return the progress as a state."""
        return dump_state(self._run(self.epoch), self.epoch, self.progress)

    def load_state_dict(self, states: Any, *, strict: bool, on_changed_files: OnChangedFiles) -> None:
        """Take over a state, or those of all ranks, or raise and change nothing."""
        saved = parse_states(states)
        if not strict:
            self._load_elastically(saved, on_changed_files)
            return
        if on_changed_files != "error":
            msg = f"on_changed_files={on_changed_files!r} needs strict=False: what is left has to be planned anew"
            raise ValueError(msg)
        worker = get_worker_info()
        run = self._run(saved[0].epoch)
        if worker is None and self._adopts_num_workers and run.topology.virtual_workers is None:
            run = replace(run, topology=replace(run.topology, num_workers=saved[0].num_workers))
        checked = check_states(saved, run)
        progress = place_states(checked, self._make_plan(checked.epoch, run.topology, checked.baseline))
        self._warn_of_touched_files(saved[0])
        if worker is not None:  # a loader that loads states in its workers also knows whose turn it is
            own = progress.batches_delivered - (0 if progress.baseline is None else progress.baseline.batches)
            turn = own * run.topology.processes % progress.count_of_turns
            progress = replace(progress, next_turn=turn)
        self.topology = run.topology
        self.epoch = saved[0].epoch
        self._take_over("load_state_dict", progress)

    def _load_elastically(self, saved: Sequence[SavedState], on_changed_files: OnChangedFiles) -> None:
        merged = merge_states(saved, self._run(saved[0].epoch), on_changed_files=on_changed_files)
        self._warn_of_touched_files(saved[0])
        if merged.lost_rows:
            lost, count = list(merged.lost_rows), "an unknown number of"
            if self._opened_files.manifest.counts_rows:
                lost = [f"{path} ({rows} rows)" for path, rows in merged.lost_rows.items()]
                count = str(sum(merged.lost_rows.values()))
            text = f"{count} rows cannot be delivered any more, of files that are gone or "
            text += f"were written anew since the checkpoint: {shorten(lost)}; what is new of them comes next epoch"
            warn_user(text, LostRowsWarning)
        self.epoch = merged.epoch
        self._take_over("load_state_dict", self._fresh(merged.baseline))

    def _warn_of_touched_files(self, saved: SavedState) -> None:
        touched = touched_files(saved, self._opened_files.manifest)
        if touched:
            text = "files have a new modification time since the checkpoint, with the same size and footer"
            advice = "if their rows were changed, begin the epoch without the state"
            warn_user(f"{text}: {shorten(touched)}; {advice}", ChangedFilesWarning)

    def balanced_rows(self) -> dict[str, list[tuple[str, int]]]:
        """Return the rows that are left out, and those that are delivered twice, to give every rank as many.

        Returns:
            Under ``dropped`` and ``repeated`` each row as its file's relative path and its place there; nothing where
            ranks are not balanced.
        """
        plan = self._plan_of(self.progress.baseline)
        if plan.balanced is None:
            return {}
        if self._balanced_rows is None or self._balanced_rows[0] is not plan:
            parts = {"dropped": plan.balanced.dropped, "repeated": plan.balanced.repeated}
            self._balanced_rows = plan, {verb: list(self._rows_of(slices)) for verb, slices in parts.items()}
        return self._balanced_rows[1]

    def _rows_of(self, slices: Sequence[ShardSlice]) -> Iterator[tuple[str, int]]:
        for shard_slice in slices:
            splits = shard_slice.shard.splits
            starts = [0, *accumulate(split.row_length for split in splits)]
            for row in map(
                int, delivery_order(shard_slice, seed=self._plan_options.row_shuffle_seed, epoch=self.epoch)
            ):
                place = bisect_right(starts, row) - 1
                yield splits[place].path, splits[place].row_offset + row - starts[place]

    def _log_balancing(self) -> None:
        for verb, rows in self.balanced_rows().items() if LOG.isEnabledFor(logging.INFO) else ():
            if rows:
                shown = shorten([f"{path} row {row}" for path, row in rows])
                LOG.info("epoch %d: %d rows %s to give every rank as many: %s", self.epoch, len(rows), verb, shown)

    def join_plain_loader(self, num_workers: int, loader_seed: int) -> None:
        """Stand, in a worker of a plain loader, where the training process stands."""
        grid = self.topology.virtual_workers
        if grid is not None and grid % num_workers:
            msg = f"virtual_workers={grid} is no multiple of the plain DataLoader's num_workers={num_workers}"
            raise ValueError(msg)
        saved = None
        if self._loaded is not None:
            saved = self.topology.processes if grid is None else num_workers
        self.epoch, continues = self.copies.join(self.epoch, saved, num_workers=num_workers, loader_seed=loader_seed)
        self._loaded = self._loaded if continues else None
        self.topology = replace(self.topology, num_workers=num_workers)

    def without_footers(self, opened_files: OpenedFiles) -> EpochState:
        """Return the same for a process that is told what to read.

        Args:
            opened_files: The data files, without what that process does not need.
        """
        copy: EpochState = EpochState.__new__(EpochState)
        copy.__dict__.update(self.__dict__, _opened_files=opened_files, _loaded=None)
        return copy

    # Within ----------------------------------------------------------------------------------------------------------

    def _check_strategy(self) -> None:
        """Plan the epoch at once where a user's strategy may be wrong."""
        if self._strategy is not None:
            self._plan_of(None)

    def _fresh(self, baseline: DeliveredBaseline | None = None) -> Progress:
        """Return the progress at the beginning of the epoch, or of what a baseline left of it."""
        streams = self.topology.own_streams(self._plan_of(baseline))
        return Progress.fresh(streams, self.topology.streams_per_turn, baseline)

    def _take_over(self, by: str, loaded: Progress | None) -> None:
        """Let a call take the progress from the iteration that owned it."""
        if self.iteration is not None:
            self.iteration.replace(by)
        self.iteration = None
        self._loaded = loaded
        if get_worker_info() is None:
            self.copies.publish(self.epoch, waiting=loaded is not None)

    def _run(self, epoch: int) -> Run:
        """Return what a state of an epoch belongs to."""
        worker = get_worker_info()
        topology = self.topology if worker is None else replace(self.topology, num_workers=worker.num_workers)
        return Run(
            manifest=self._opened_files.manifest,
            options=self._plan_options,
            filter_digest=self._opened_files.filter_digest,
            topology=topology,
            format=self._opened_files.format.name,
            format_options=self._opened_files.format.options_digest,
            **self._opened_files.pin,
            split_strategy=self._bundled(epoch)[1],
        )

    @property
    def plan(self) -> Plan:
        """The plan of the whole epoch."""
        return self._plan_of(None)

    def _plan_of(self, baseline: DeliveredBaseline | None) -> Plan:
        """Return the plan of the epoch, or of what a baseline left of it."""
        key = (self.epoch, self.topology.planned_workers, baseline)
        if self._plan is None or self._plan[0] != key:
            self._plan = key, self._make_plan(self.epoch, self.topology, baseline)
        return self._plan[1]

    def _make_plan(self, epoch: int, topology: Topology, baseline: DeliveredBaseline | None) -> Plan:
        return make_plan(
            self._opened_files.manifest,
            self._plan_options,
            epoch=epoch,
            num_ranks=topology.planned_ranks,
            num_workers=topology.planned_workers,
            selection=self._opened_files.selection,
            baseline=baseline,
            bundled=self._bundled(epoch)[0],
        )

    def _bundled(self, epoch: int) -> tuple[list[list[SizedSplit]] | None, str | None]:
        """Return what a strategy makes of an epoch, and what states say of it; None where there is none."""
        if self._strategy is None:
            return None, None
        if self._own_shards is None or self._own_shards[0] != epoch:
            shards = bundled(self._strategy, self._opened_files.manifest, epoch)
            self._own_shards = epoch, shards, described(self._strategy, shards)
        return self._own_shards[1:]

    def _batches(self, progress: Progress) -> int:
        return progress.batches(self._read_options.batch_size, drop_last=self._read_options.drop_last)

    def _warn_of_uneven_ranks(self) -> None:
        if self._warned_of_uneven_ranks or self.topology.num_ranks == 1 or self._plan_options.uneven_ranks != "allow":
            return
        if self._opened_files.unknown_rows is not None:
            text = f"the number of batches of each rank is not known ahead: {self._opened_files.unknown_rows}"
        else:
            streams = map(self.plan.rank_streams, range(self.topology.num_ranks))
            ranks = list(map(Progress.fresh, streams))
            batches = [self._batches(rank) for rank in ranks]
            if len(set(batches)) == 1:
                return
            rows = [rank.rows_left for rank in ranks]
            text = f"ranks make different numbers of steps in epoch {self.epoch}: batches {batches}, rows {rows}"
        self._warned_of_uneven_ranks = True
        even = "distributed.in_step" if self._opened_files.unknown_rows is not None else "uneven_ranks='drop' or 'pad'"
        advice = f"a DDP loop needs {even}, or join(); else ranks wait for one another"
        warn_user(f"{text}; {advice}", UnevenRanksWarning)

    def __getstate__(self) -> dict[str, Any]:
        """Leave behind what belongs to this process: the iteration, and shared memory unless a process is started."""
        state = {**self.__dict__, "iteration": None, "_plan": None, "_balanced_rows": None, "_own_shards": None}
        if not is_being_sent_to_a_process():
            del state["copies"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "copies" not in state:
            self.copies = Copies(self.epoch, waiting=self._loaded is not None)
