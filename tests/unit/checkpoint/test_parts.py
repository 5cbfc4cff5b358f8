"""The parts of an epoch with skipped steps: each row is in a part or in a skipped step, and places lead back to it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from deliveries import deliveries, stopped, stops
from hypothesis import given
from hypothesis import strategies as st
from support import examples

from torch_dataloader_utils.checkpoint.parts import own_parts, restored_parts, schedule_of, with_skips
from torch_dataloader_utils.checkpoint.progress import Progress
from torch_dataloader_utils.checkpoint.skipped_steps import between, place_after
from torch_dataloader_utils.planning.assignment import Receipt
from torch_dataloader_utils.planning.manifest import Split
from torch_dataloader_utils.planning.plan import Shard, ShardSlice
from torch_dataloader_utils.planning.row_ranges import merged

RANGES = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=4).map(
    lambda pairs: merged((start, start + count) for start, count in pairs)
)


@given(deliveries().filter(lambda delivery: not delivery.takes_every), stops, RANGES)
@examples(200, part=10)
def test_each_step_that_is_left_is_in_a_part_or_skipped_with_the_batch_that_it_has_without_skips(
    delivery, after, ranges
):
    _, progress = stopped(delivery, delivery.fresh(), after)
    progress = progress.rebased()
    first = progress.batches_delivered
    batches = dict(enumerate(delivery.batches_from(progress), start=first))
    schedule = schedule_of(progress, delivery.batch_size, drop_last=delivery.drop_last)
    assert list(schedule.steps) == list(batches)
    skipping = with_skips(progress, ranges, schedule)

    wanted = {step for start, stop in ranges for step in range(start, stop)} & set(batches)
    assert {step for skip in skipping.skips_ahead for step in skip.steps} == wanted
    for skip in skipping.skips:
        rows = sorted(row for step in skip.steps for row in batches[step])
        assert sorted(_rows(delivery, skip.slices(skipping.planned))) == rows
    in_parts = [_rows(delivery, part.slices) for part in own_parts(skipping)]
    left = [row for stream in progress.streams for part in stream.left for row in delivery.rows_in(part)]
    skipped = [row for step in wanted for row in batches[step]]
    assert sorted([row for rows in in_parts for row in rows] + skipped) == sorted(left)
    assert len(in_parts) == len(skipping.skips_ahead) + 1
    assert skipping.batches(delivery.batch_size, drop_last=delivery.drop_last) == first + len(batches) - len(wanted)
    restoring = skipping._replace(restores=True)
    assert restoring.batches(delivery.batch_size, drop_last=delivery.drop_last) == first + len(batches)
    assert [_rows(delivery, part.slices) for part in restored_parts(restoring)] == [
        _rows(delivery, skip.slices(skipping.planned)) for skip in skipping.skips
    ]


def _rows(delivery, streams):
    return [row for slices in streams for part in slices for row in delivery.rows_in(part)]


SLICES = tuple(ShardSlice(Shard((Split("a", 100 * number, 10),)), start, 10) for number, start in enumerate([4, 0, 7]))


@pytest.mark.parametrize("rows", range(20))
def test_a_place_is_so_many_rows_after_another_one(rows):
    everything = [(part.shard, row) for part in SLICES for row in range(part.start, part.stop)]
    for first in range(20):
        begin = place_after(SLICES, (0, 0), first)
        end = place_after(SLICES, begin, rows)
        found = [(part.shard, row) for part in between(SLICES, begin, end) for row in range(part.start, part.stop)]
        assert found == everything[first : first + rows]


def test_receipts_of_a_part_are_placed_among_the_slices_of_the_iteration():
    progress = Progress.fresh([SLICES])
    skipping = with_skips(progress, ((2, 3),), schedule_of(progress, 3, drop_last=False))
    before, after = own_parts(skipping)
    assert before.slices == ((SLICES[0],),)
    assert before.placed(Receipt(0, 1, 0, 3)) == Receipt(0, 1, 0, 3)
    assert after.slices == ((replace(SLICES[1], start=3), SLICES[2]),)
    assert after.placed(Receipt(0, 0, 6, 3)) == Receipt(0, 1, 6, 3)
    assert after.placed(Receipt(0, 1, 9, 3)) == Receipt(0, 2, 9, 3)
    assert after.placed(Receipt(0, 2, 0, 0)) == Receipt(0, 3, 0, 0)
