"""The steps in which skipped rows are delivered after an epoch's last step, as segments. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch_dataloader_utils.planning.ledger.lookup import SegmentLedger
from torch_dataloader_utils.planning.ledger.rank_starts import regrouped
from torch_dataloader_utils.planning.ledger.segment import RankStart, Segment
from torch_dataloader_utils.planning.plan import ShardSlice


def restored_segments(
    ledgers: Sequence[SegmentLedger], carried: Mapping[int, tuple[tuple[ShardSlice, ...], ...]]
) -> list[Segment]:
    """Return a segment for each group of restored rows: no batch has rows of two groups.

    `ledgers` are those of the parts of one plan, the last of which says what is skipped. `carried` are the rows that
    were skipped before an elastic load: by rank the slices of its streams. They come first, then each range of steps.
    """
    newest = ledgers[-1]
    ranks = list(filter(newest.knows, range(newest.segment.topology.num_ranks)))
    steps = {rank: newest.schedule(rank).steps.stop for rank in ranks}
    groups = [{rank: RankStart(carried[rank], 0) for rank in ranks}] if carried else []
    groups += [dict(group) for group in _skipped(ledgers, ranks)]
    segments = []
    for group in groups:
        starts = {rank: replace(start, step=steps[rank]) for rank, start in group.items() if rank in steps}
        segment = replace(newest.segment, first_step=max(steps.values()), starts=starts, skipped=(), restores=False)
        segments.append(segment)
        made = newest.of(segment)
        steps = {rank: made.schedule(rank).steps.stop for rank in starts}
    return segments


def _skipped(ledgers: Sequence[SegmentLedger], ranks: Sequence[int]) -> Iterator[Mapping[int, RankStart]]:
    """Yield for each range of skipped steps where its rows are, by rank."""
    for start, stop in ledgers[-1].segment.skipped:
        for ledger in ledgers:
            topology, now = ledger.segment.topology, ledgers[-1].segment.topology
            is_same = topology.num_ranks == now.num_ranks  # else a virtual topology that has other real ranks now
            own = ranks if is_same else range(topology.num_ranks)
            of_ledger = [(rank, ledger.steps(rank)) for rank in filter(ledger.knows, own)]
            if not any(start < steps.stop and stop > steps.start for _, steps in of_ledger):
                continue
            group = {rank: ledger.between(rank, max(start, steps.start), stop) for rank, steps in of_ledger}
            yield group if is_same else regrouped([group[rank] for rank in own], topology, now)
