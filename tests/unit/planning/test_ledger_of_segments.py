"""The ledger of a segment against an epoch that is delivered row by row: every step's rows, and every row's steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from deliveries import Delivery, stopped
from hypothesis import given
from hypothesis import strategies as st
from rank_groups import RankGroup, journeys
from support import examples, manifest_of

from torch_dataloader_utils.planning.ledger.lookup import SegmentLedger
from torch_dataloader_utils.planning.ledger.segment import RankStart, Segment
from torch_dataloader_utils.planning.ledger.shard_order import ShardOrder
from torch_dataloader_utils.planning.manifest import DataFile, Manifest, RowGroup
from torch_dataloader_utils.planning.plan import DeliveredBaseline, PlanOptions, Shard, ShardSlice
from torch_dataloader_utils.planning.planner import EpochPlanner, newest_algorithm
from torch_dataloader_utils.planning.shuffle import delivered_rows
from torch_dataloader_utils.planning.topology import Topology


def ledger_of(ranks: Sequence[Delivery], baseline: DeliveredBaseline | None = None) -> SegmentLedger:
    """The ledger of what these ranks deliver."""
    one = ranks[0]
    run = one.run
    segment = Segment(
        epoch=one.epoch,
        plan_algorithm=run.plan_algorithm,
        options=run.options,
        topology=run.topology,
        batch_size=one.batch_size,
        drop_last=one.drop_last,
        baseline=baseline,
    )
    return SegmentLedger(segment, one.plan(one.epoch, baseline), run.manifest)


def files_of(manifest: Manifest, rows: Sequence[int]) -> list[tuple[str, int]]:
    """Each row's file and its number there, given its number among all rows."""
    by_row = [(file.path, row) for file in manifest.files for row in range(file.rows)]
    return [by_row[row] for row in rows]


def require_same(ledger: SegmentLedger, batches: Sequence[Sequence[list[int]]]) -> None:
    """Compare the ledger's answers with the batches of all ranks."""
    manifest, segment = ledger.manifest, ledger.segment
    steps: dict[tuple[str, int], list[tuple[int, int, int]]] = defaultdict(list)
    for rank, of_rank in enumerate(batches):
        assert ledger.steps(rank) == range(segment.begin, segment.begin + len(of_rank))
        for step, batch in zip(ledger.steps(rank), of_rank, strict=True):
            expected = files_of(manifest, batch)
            assert list(ledger.rows_at(rank, step)) == expected
            for place, row in enumerate(expected):
                steps[row].append((step, rank, place))
    for path, row in files_of(manifest, range(manifest.rows)):
        found = ledger.steps_of(path, row)
        assert [(at.step, at.rank, at.place) for at in found] == sorted(steps[path, row])
        assert all(at.worker == ledger.windows(at.rank, at.step).worker for at in found)
        if steps[path, row]:
            assert ledger.plans(path, row)


@given(journeys(takes_every=0), st.booleans())
@examples(120, least=10, part=12)
def test_every_steps_rows_and_every_rows_steps_are_those_that_are_delivered_under_any_ranks_and_after_any_load(
    journey: tuple[list[RankGroup], list[list[int]]], drop_last: bool
) -> None:
    groups, stops = journey
    baseline = None
    for number, (group, after) in enumerate(zip(groups, stops, strict=True)):
        ranks = [replace(one, drop_last=drop_last) for one in group.ranks]
        batches = [rank.batches_from(rank.fresh(baseline)) for rank in ranks]
        require_same(ledger_of(ranks, baseline), batches)
        if number + 1 < len(groups):
            _, states = group.go_on(baseline, after)
            baseline = groups[number + 1].base_of(states)


@given(journeys(takes_every=0), st.integers(1, 9), st.integers(0, 12))
@examples(60)
def test_a_rank_that_goes_on_with_batches_of_another_size_has_the_steps_of_its_progress(
    journey: tuple[list[RankGroup], list[list[int]]], batch_size: int, after: int
) -> None:
    groups, _ = journey
    one = groups[0].ranks[0]
    together = one.run.topology.streams_per_turn
    ledger = ledger_of(groups[0].ranks)
    _, progress = stopped(one, one.fresh(), after)
    step = progress.batches_delivered
    start = RankStart(tuple(stream.left for stream in progress.streams), progress.next_turn)
    assert ledger.start_at(0, step).streams == start.streams

    going_on = replace(one, batch_size=batch_size * together)
    segment = replace(ledger.segment, batch_size=batch_size * together, first_step=step, starts={0: start})
    if one.run.topology.num_ranks == 1:
        require_same(SegmentLedger(segment, ledger.plan, ledger.manifest), [going_on.batches_from(progress)])


@given(journeys(takes_every=0), st.integers(0, 9), st.integers(1, 6))
@examples(40, least=10)
def test_a_skipped_step_keeps_its_rows_and_no_row_is_delivered_in_it(
    journey: tuple[list[RankGroup], list[list[int]]], start: int, count: int
) -> None:
    ranks = journey[0][0].ranks
    whole = ledger_of(ranks)
    ledger = SegmentLedger(replace(whole.segment, skipped=((start, start + count),)), whole.plan, whole.manifest)
    for rank in range(len(ranks)):
        for step in whole.steps(rank):
            rows = list(whole.rows_at(rank, step))
            assert list(ledger.rows_at(rank, step)) == rows
            for row in rows:
                assert ledger.plans(*row)
                expected = [at for at in whole.steps_of(*row) if not start <= at.step < start + count]
                assert ledger.steps_of(*row) == expected


@given(journeys(takes_every=0), st.integers(0, 9))
@examples(40)
def test_ranks_may_begin_at_steps_of_their_own(journey: tuple[list[RankGroup], list[list[int]]], step: int) -> None:
    ranks = journey[0][0].ranks
    whole = ledger_of(ranks)
    starts = {rank: replace(whole.start_at(rank, step), step=100 + rank) for rank in range(len(ranks))}
    later = SegmentLedger(replace(whole.segment, first_step=100, starts=starts), whole.plan, whole.manifest)
    for rank in range(len(ranks)):
        begin = min(step, whole.steps(rank).stop)
        assert later.steps(rank) == range(100 + rank, 100 + rank + whole.steps(rank).stop - begin)
        for number, same in zip(later.steps(rank), range(begin, whole.steps(rank).stop), strict=True):
            assert list(later.rows_at(rank, number)) == list(whole.rows_at(rank, same))
            for at in later.steps_of(*next(iter(later.rows_at(rank, number)))):
                assert at.step in later.steps(at.rank)


def shards() -> Iterator[Shard]:
    splits = [split.split for splits in manifest_of([(9, 1)], [(5, 1)], [(7, 1)]).row_group_splits for split in splits]
    for rounds in (1, 4):
        for missing in ((), (1,), (0, 2)):
            yield Shard(tuple(splits), rounds, missing)


@pytest.mark.parametrize("seed", [None, 3])
def test_a_shard_in_rounds_and_with_missing_files_says_which_row_is_where(seed: int | None) -> None:
    for shard in shards():
        order = ShardOrder(shard, seed=seed, epoch=2)
        expected = list(delivered_rows([ShardSlice(shard)], seed=seed, epoch=2))
        files, rows = order.rows(0, shard.rows)
        assert list(zip(files.tolist(), rows.tolist(), strict=True)) == expected
        for place, (path, row) in enumerate(expected):
            split = next(number for number, one in enumerate(shard.splits) if one.path == path)
            assert order.place_of(split, row - shard.splits[split].row_offset) == place
        assert np.array_equal(order.rows(3, 5).rows, rows[3:5])


LARGE: dict[str, PlanOptions] = {
    "in order": PlanOptions(2**27),
    "shards shuffled": PlanOptions(2**27, shuffle=True),
    "rows shuffled": PlanOptions(2**27, shuffle=True, shuffle_buffer_size=100_000),
    "rows shuffled in rounds": PlanOptions(2**27, shuffle=True, shuffle_buffer_size=500),
    "uneven dropped": PlanOptions(2**27, shuffle=True, uneven_ranks="drop", batch_size=512),
    "uneven padded": PlanOptions(2**27, shuffle=True, uneven_ranks="pad", batch_size=512),
}


@pytest.mark.soak
@pytest.mark.parametrize("order", LARGE)
def test_a_hundred_million_rows_in_a_hundred_thousand_row_groups_are_answered_both_ways(order: str) -> None:
    """The seconds that this takes are in the guide."""
    groups = tuple(RowGroup(1000, 100_000) for _ in range(100))
    files = tuple(DataFile(f"part-{number:04d}.parquet", 10**7, "", groups) for number in range(1000))
    manifest = Manifest("/data", files)
    options, topology = LARGE[order], Topology(8, 0, 4)
    plan = EpochPlanner(manifest, options, None, None).plan(0, topology)
    ledger = SegmentLedger(Segment(0, newest_algorithm(), options, topology, 512, drop_last=False), plan, manifest)
    for row in range(0, manifest.rows, 333_333):
        path, number = f"part-{row // 100_000:04d}.parquet", row % 100_000
        for at in ledger.steps_of(path, number):
            assert list(ledger.rows_at(at.rank, at.step))[at.place] == (path, number)
        assert ledger.plans(path, number)
    assert sum(len(ledger.steps(rank)) for rank in range(8)) >= manifest.rows // 512
