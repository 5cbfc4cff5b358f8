"""What a rank's epochs are planned from, and what is known of an epoch before a row of it is read."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from torch.utils.data import get_worker_info

from torch_dataloader_utils.checkpoint.delivered_hash import begun_hashes
from torch_dataloader_utils.checkpoint.parts import schedule_of
from torch_dataloader_utils.checkpoint.progress import Progress
from torch_dataloader_utils.checkpoint.removed_rows import with_removed
from torch_dataloader_utils.checkpoint.restore_skips import with_carried
from torch_dataloader_utils.checkpoint.run import Run
from torch_dataloader_utils.checkpoint.saved_state import lists_files
from torch_dataloader_utils.formats.opened_files import Opened
from torch_dataloader_utils.gc_pause import without_gc
from torch_dataloader_utils.loader.mixture import mixture_of, reweighted
from torch_dataloader_utils.loader.skip_requests import SkipRequests
from torch_dataloader_utils.planning.excluded import NO_EXCLUSIONS, EpochExclusions, Exclusions
from torch_dataloader_utils.planning.ledger.segment import Removal, Segment
from torch_dataloader_utils.planning.plan import DeliveredBaseline, Plan
from torch_dataloader_utils.planning.planner import EpochPlanner, newest_algorithm
from torch_dataloader_utils.planning.quotas import Quotas
from torch_dataloader_utils.planning.topology import Topology
from torch_dataloader_utils.reading.scan import ReadOptions


@dataclass(frozen=True, eq=False)
class EpochPlans:
    """What a rank's epochs are planned from. It never changes: a call that changes the run replaces it.

    Attributes:
        opened_files: The files.
        planner: Makes the plans, and keeps the last one.
        read_options: How rows become batches.
        topology: The ranks and workers, and which rank this is.
        exclusions: What is excluded.
        algorithm: The planning algorithm of a loaded state; None for the newest.
        next_weights: The weights of the sources with which the next epoch begins, if they change.
    """

    opened_files: Opened
    planner: EpochPlanner
    read_options: ReadOptions
    topology: Topology
    exclusions: Exclusions = NO_EXCLUSIONS
    algorithm: int | None = None
    next_weights: tuple[Fraction, ...] | None = None

    def of_run(self, run: Run) -> EpochPlans:
        """Return the same with the topology, the exclusions and the planning algorithm of a run."""
        return replace(self, topology=run.topology, exclusions=run.exclusions, algorithm=run.plan_algorithm)

    def moved_to(self, epoch: int, current: int, baseline: DeliveredBaseline | None) -> EpochPlans:
        """Return the same for an epoch that begins after the current one, which continues what a baseline leaves."""
        planner = self.planner.moved_to(epoch, self.topology, current, baseline)
        if self.next_weights is not None:
            planner = reweighted(planner, self.next_weights, epoch, self.topology, is_loaded=False)
        return replace(self, planner=planner, algorithm=None, next_weights=None)

    # What is known of an epoch ---------------------------------------------------------------------------------------

    def run(self, epoch: int) -> Run:
        """Return what a state of an epoch is compared with."""
        files, options, topology = self.opened_files, self.read_options, self._run_topology
        mixture = mixture_of(files, self.planner, epoch, topology, self.next_weights)
        return Run(
            manifest=self.planner.manifest_of(epoch, topology),
            options=self.planner.options,
            filter_digest=files.filter_digest,
            filter_binding=files.filter_binding,
            filter_bindings=files.filter_bindings if lists_files(files.manifest) else None,
            topology=topology,
            format=files.format_name,
            format_options=None if mixture is not None else files.options_digest,
            snapshot_id=files.pin.get("snapshot_id"),
            version=files.pin.get("version"),
            split_strategy=self.planner.strategy_digest(epoch),
            plan_algorithm=self._algorithm,
            exclusions=self.exclusions,
            batch_size=None if options.batching else options.batch_size,
            drop_last=options.drop_last,
            batching=options.batching,
            mixture=mixture,
            transform_id=None if files.transform is None else files.transform.id,
        )

    @property
    def _run_topology(self) -> Topology:
        """The topology. In a worker of a plain loader it has the workers of that loader."""
        worker = get_worker_info()
        return self.topology if worker is None else replace(self.topology, num_workers=worker.num_workers)

    @property
    def _algorithm(self) -> int:
        return self.algorithm or newest_algorithm()

    def excluded_in(self, epoch: int) -> EpochExclusions:
        """Return what is excluded in an epoch."""
        return self.exclusions.in_epoch(epoch)

    def unknown_steps(self, epoch: int) -> str | None:
        """Return why it is unknown, before an epoch is read, which rows each step has; None where it is known."""
        excluded = self.excluded_in(epoch)
        return self.opened_files.unknown_rows or excluded.unknown_rows or self.read_options.unknown_batches

    def segment(self, epoch: int, requests: SkipRequests) -> Segment:
        """Return the segment of an epoch that begins now, with what is requested of its steps."""
        excluded = self.excluded_in(epoch)
        removal = Removal(0, excluded.removed, excluded.removed_by)
        return Segment(
            left_out=excluded.left_out,
            removals=(removal,) if removal.rows or removal.expressions else (),
            epoch=epoch,
            plan_algorithm=self._algorithm,
            options=self.planner.options,
            topology=self.topology,
            batch_size=self.read_options.batch_size,
            drop_last=self.read_options.drop_last,
            skipped=requests.steps,
            restores=requests.restores,
            mixture=self.planner.place,
        )

    # Plans -----------------------------------------------------------------------------------------------------------

    @without_gc
    def plan(self, epoch: int, baseline: DeliveredBaseline | None = None) -> Plan:
        """Return the plan of an epoch, or of the rows that a baseline leaves of it."""
        left_out = self.excluded_in(epoch).left_out
        return self.planner.plan(epoch, self.topology, baseline, self.algorithm, left_out)

    def plan_skipped(self, epoch: int, baseline: DeliveredBaseline | None) -> Plan | None:
        """Return the plan of the rows that were skipped before a baseline; None if there are none."""
        left_out = self.excluded_in(epoch).left_out
        return self.planner.plan_skipped(epoch, self._run_topology, baseline, self._algorithm, left_out)

    def quotas(self, epoch: int, baseline: DeliveredBaseline | None) -> Quotas | None:
        """Return the quotas of such a plan, in a mixture; else None."""
        return self.planner.quotas(epoch, self.topology, baseline)

    def rows_digest(self, plan: Plan, requests: SkipRequests) -> str:
        """Return the digest of all that determines which rows each rank delivers. Batches may have different sizes."""
        files = self.opened_files
        versions = files.manifest.fingerprint, files.manifest.versions_digest, *sorted(files.pin.items())
        made = () if files.transform is None else (files.transform.id,)
        contents = *versions, files.filter_digest, files.filter_binding, files.options_digest, *made
        fixed = self._algorithm, self.topology.num_ranks
        excluded = () if self.exclusions.digest is None else (self.exclusions.digest,)
        requested = *excluded, *requests.contents
        return _digest(plan.digest, *fixed, *contents, self.planner.options, *requested)

    def digest(self, plan: Plan, requests: SkipRequests) -> str:
        """Return the digest of a plan and of everything else that determines its batches."""
        options = self.read_options
        return _digest(self.rows_digest(plan, requests), options.batching or options.batch_size, options.drop_last)

    # Progress --------------------------------------------------------------------------------------------------------

    def fresh(self, epoch: int) -> Progress:
        """Return the progress at the beginning of an epoch."""
        progress = Progress.fresh(self.topology.own_streams(self.plan(epoch)), self.topology.streams_per_turn)
        return progress._replace(hashes=begun_hashes(self.topology) if self.read_options.fingerprint else None)

    def ranks(self, epoch: int, baseline: DeliveredBaseline | None = None) -> list[Progress]:
        """Return the progress of all ranks at the beginning of a plan, where the topology is not virtual."""
        plan, skipped = self.plan(epoch, baseline), self.plan_skipped(epoch, baseline)
        ranks = [replace(self.topology, rank=rank) for rank in range(self.topology.num_ranks)]
        fresh = (Progress.fresh(rank.own_streams(plan), baseline=baseline) for rank in ranks)
        return [with_carried(progress, rank, skipped) for rank, progress in zip(ranks, fresh, strict=True)]

    def removing(self, progress: Progress, epoch: int) -> Progress:
        """Return a progress with all rows that batches lose if an iteration begins with it."""
        excluded, seed = self.excluded_in(epoch), self.planner.options.row_shuffle_seed
        is_exact = self.opened_files.unknown_rows is None and excluded.unknown_rows is None
        return with_removed(progress, excluded.removed, seed=seed, epoch=epoch, is_exact=is_exact)

    def skipping(self, progress: Progress, epoch: int, requests: SkipRequests) -> Progress:
        """Return a progress with what is requested to be skipped and restored."""
        if requests.are_of(progress):
            return progress
        quotas, counts_rows = self.quotas(epoch, progress.baseline), self.unknown_steps(epoch) is None
        return requests.applied(progress, self.read_options, quotas, counts_rows=counts_rows)

    def batches(self, progress: Progress) -> int:
        """Return the number of batches of a progress' epoch, where it is known: see `Progress.batches`."""
        return progress.batches(self.read_options.batch_size, drop_last=self.read_options.drop_last)

    def batches_in(self, progress: Progress, epoch: int, uneven: Literal["drop", "pad"] | None) -> int | None:
        """Return the number of batches of a progress' epoch; None if only reading tells.

        If ranks may have different numbers, ``"drop"`` asks for the least of these, and ``"pad"`` for the largest.
        """
        if self.unknown_steps(epoch) is not None:
            return None
        if uneven is None or self.planner.options.uneven_ranks != "allow":
            return self.batches(progress)
        requests = SkipRequests(progress.skip_requests, restores=progress.restores)
        fresh = self.ranks(epoch, progress.baseline)
        # Only a mixture has quotas, and its ranks are always balanced.
        ranks = (requests.applied(one, self.read_options, None, counts_rows=True) for one in fresh)
        return (min if uneven == "drop" else max)(map(self.batches, ranks))

    def most_steps(self, progress: Progress, epoch: int) -> int | None:
        """Return the largest number of steps of a rank, skipped ones included; None if only reading tells."""
        if self.unknown_steps(epoch) is not None:
            return None
        is_even = self.planner.options.uneven_ranks != "allow"
        ranks = [progress, *([] if is_even else self.ranks(epoch, progress.baseline))]
        size, drop_last = self.read_options.batch_size, self.read_options.drop_last
        schedules = (schedule_of(rank, size, self.quotas(epoch, rank.baseline), drop_last=drop_last) for rank in ranks)
        return max(schedule.steps.stop for schedule in schedules)


def _digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
