"""Segments: the steps that one plan delivers to all ranks, and everything that they depend on. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from torch_dataloader_utils.errors import LedgerUnknownError
from torch_dataloader_utils.planning.excluded import NONE_EXCLUDED, ExcludedRows, Flags
from torch_dataloader_utils.planning.ledger.row_steps import Rows
from torch_dataloader_utils.planning.mixture.passes import MixturePlace
from torch_dataloader_utils.planning.plan import DeliveredBaseline, PlanOptions, ShardSlice
from torch_dataloader_utils.planning.row_ranges import Windows
from torch_dataloader_utils.planning.topology import Topology


@dataclass(frozen=True, slots=True)
class RankStart:
    """Where a rank begins, if that is not the beginning of a plan.

    Attributes:
        streams: What each of the rank's streams delivers from here on.
        next_turn: The worker turn of the next batch.
        step: The rank's first step; None for that of the segment.
    """

    streams: tuple[tuple[ShardSlice, ...], ...]
    next_turn: int
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Removal:
    """What batches lose after they are cut, from a step on.

    Attributes:
        first_step: The first step.
        rows: Excluded rows.
        expressions: Digests of expressions by which rows are excluded.
        rank: The rank whose state stood at the first step: the states of others may have stood at other steps. None if
            it is the first step of all ranks.
    """

    first_step: int
    rows: ExcludedRows
    expressions: tuple[str, ...] = ()
    rank: int | None = None


NO_REMOVAL = Removal(0, NONE_EXCLUDED)


@dataclass(frozen=True, slots=True)
class Segment:
    """Steps that one plan delivers to all ranks: everything that they depend on, apart from the files.

    Attributes:
        epoch: The epoch.
        plan_algorithm: The planning algorithm.
        options: What else the plan depends on.
        topology: The ranks and workers; its `rank` has no meaning here.
        batch_size: Rows in a batch of a rank.
        drop_last: Whether a stream's short last batch is left out.
        left_out: Excluded rows that the plan leaves out.
        removals: What batches lose after they are cut, each from a step on until the next one's; rising.
        baseline: What was delivered before an elastic load planned the rest; None for nothing.
        first_step: The first step; None for the beginning of the plan: the baseline's batches, or 0.
        starts: Where ranks begin, by rank, if that is not the beginning of the plan. It is not known of other ranks.
        stops: For each rank the step at which the next segment begins for it; None for the end of the plan.
        skipped: Steps that are not handed over: start and stop of each range, in rising order.
        restores: Whether skipped steps are delivered after the last one.
        mixture: Where the sources of a mixture stand, and their weights; None for a single dataset.
    """

    epoch: int
    plan_algorithm: int
    options: PlanOptions
    topology: Topology
    batch_size: int
    drop_last: bool
    left_out: ExcludedRows = NONE_EXCLUDED
    removals: tuple[Removal, ...] = ()
    baseline: DeliveredBaseline | None = None
    first_step: int | None = None
    starts: Mapping[int, RankStart] | None = None
    stops: tuple[int, ...] | None = None
    skipped: Windows = ()
    restores: bool = False
    mixture: MixturePlace | None = None

    @property
    def begin(self) -> int:
        """The first step."""
        if self.first_step is not None:
            return self.first_step
        return 0 if self.baseline is None else self.baseline.batches

    def begin_of(self, rank: int) -> int:
        """Return the first step of a rank."""
        start = None if self.starts is None else self.starts.get(rank)
        return self.begin if start is None or start.step is None else start.step

    def skips(self, step: int) -> bool:
        """Whether a step is not handed over."""
        return any(start <= step < stop for start, stop in self.skipped)

    def removal_at(self, step: int) -> Removal:
        """Return what the batch of a step loses after it is cut."""
        return next((one for one in reversed(self.removals) if one.first_step <= step), NO_REMOVAL)

    def removed_of(self, rank: int, step: int, rows: Rows) -> Flags:
        """Return for each row of a step whether its batch loses it after it is cut.

        Raises:
            LedgerUnknownError: If that depends on the step at which the rank's state stood when it was loaded.
        """
        removed = are_removed(rows, self.removal_at(step))
        if all(removal.rank in {None, rank} for removal in self.removals):
            return removed
        first = self.removals[0]
        begins = () if first.first_step == 0 and first.rank in {None, rank} else (NO_REMOVAL,)
        if any(not np.array_equal(are_removed(rows, other), removed) for other in (*begins, *self.removals)):
            msg = (
                f"step {step} of rank {rank} has rows that were excluded in epoch {self.epoch}: each rank leaves them "
            )
            msg += (
                f"out from the step on at which its state stood, and that of rank {rank} is not known here; ask there"
            )
            raise LedgerUnknownError(msg)
        return removed


def without_removed(rows: Rows, removed: Flags) -> Rows:
    """Return the rows of a step that its batch does not lose after it is cut."""
    if not removed.any():
        return rows
    return Rows(rows.files[~removed], rows.rows[~removed], rows.bytes_read)


def are_removed(rows: Rows, removal: Removal) -> Flags:
    """Return for each row of a step whether its batch loses it after it is cut."""
    removed = np.zeros(len(rows), dtype=bool)
    if not removal.rows:
        return removed
    for path in np.unique(rows.files).tolist():
        of_file = rows.files == path
        removed[of_file] = removal.rows.contains(path, rows.rows[of_file])
    return removed
