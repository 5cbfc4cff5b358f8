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

from torch_dataloader_utils.planning.ledger import RankStart, Segment, SegmentLedger
from torch_dataloader_utils.planning.manifest import Manifest
from torch_dataloader_utils.planning.plan import DeliveredBaseline, Shard, ShardSlice
from torch_dataloader_utils.planning.shard_order import ShardOrder
from torch_dataloader_utils.planning.shuffle import delivered_rows


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
@examples(120)
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
