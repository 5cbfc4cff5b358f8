"""Shards that deliver another number of rows than they have, which only reading tells: each row once, at any stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from deliveries import Delivery, plain_delivery, stopped, through_json
from hypothesis import given
from hypothesis import strategies as st
from rank_groups import RankGroup, journeys
from support import edited, examples, manifest_of

from torch_dataloader_utils import CheckpointMismatchError
from torch_dataloader_utils.checkpoint.audit import audit_states
from torch_dataloader_utils.checkpoint.parse.states import parse_state
from torch_dataloader_utils.planning.plan import TO_THE_END, PlanOptions, Shard, ShardSlice

MADE: dict[str, Callable[[int], int]] = {
    "three of each": lambda _: 3,
    "none at all": lambda _: 0,
    "none of some row groups": lambda row: 0 if row // 10 % 2 else 2,
    "a hundred of one": lambda row: 100 if row % 17 == 3 else row % 2,
}
MOST_MADE = 1000
OPEN: dict[str, Any] = {"unit": "transformed rows", "is_open_ended": True}


@dataclass(frozen=True)
class Making(Delivery):
    """Delivers what is made of rows: a part of a row is its number times 1000 and the part's."""

    makes: str = "three of each"

    def rows_of(self, shard: Shard) -> list[int]:
        made = MADE[self.makes]
        return [row * MOST_MADE + part for row in super().rows_of(shard) for part in range(made(row))]


def making(delivery: Delivery, makes: str) -> Making:
    """Return the same delivery of what is made of its rows."""
    run, topology = delivery.run, delivery.run.topology
    size = delivery.batch_size // topology.streams_per_turn
    options = replace(run.options, uneven_ranks="allow", batch_size=None, **OPEN)
    run = replace(run, options=options, topology=replace(topology, virtual_ranks=None, virtual_workers=None))
    return Making(run, delivery.epoch, 0, size, drop_last=False, tells_ends_late=delivery.tells_ends_late, makes=makes)


@given(journeys(takes_every=0), st.sampled_from(sorted(MADE)), st.booleans())
@examples(120, least=10, part=12)
def test_what_is_made_of_rows_is_delivered_once_by_any_ranks_and_workers_one_after_the_other(journey, makes, late):
    plain, stops = journey
    groups = [
        RankGroup(tuple(replace(making(one, makes), tells_ends_late=late) for one in group.ranks)) for group in plain
    ]
    baseline = None
    delivered: list[int] = []
    for number, (group, after) in enumerate(zip(groups, stops, strict=True)):
        last = number == len(groups) - 1
        rows, states = group.go_on(baseline, [10**6] * len(after) if last else after)
        delivered += rows
        if not last:
            baseline = groups[number + 1].base_of(states)
    every_row = range(plain[0].ranks[0].run.manifest.rows)
    assert sorted(delivered) == [row * MOST_MADE + part for row in every_row for part in range(MADE[makes](row))]


MANIFEST = manifest_of([(10, 100)] * 3, [(10, 100)] * 4)


def stopped_in_a_shard(makes: str = "three of each") -> tuple[Making, dict[str, Any]]:
    """Return a delivery and its state after two batches of seven."""
    delivery = making(plain_delivery(MANIFEST, PlanOptions(300)), makes)
    return delivery, through_json(delivery.state(stopped(delivery, delivery.fresh(), 2)[1]))


def numbers_in(value: Any) -> list[int]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for inner in value for number in numbers_in(inner)]
    return [value] if isinstance(value, int) else []


def test_a_state_writes_an_open_end_as_null_and_never_as_a_huge_number():
    """Also in a baseline, where the end of a shard was delivered and its beginning was not."""
    delivery, state = stopped_in_a_shard()
    (part,) = state["in_progress"]
    assert (part["rows_delivered"], "windows" in part) == (14, False)
    assert state["plan"]["unit"] == "transformed rows"
    group = RankGroup((delivery,))
    baseline = group.base_of([state])
    (partial,) = baseline.partial
    assert partial.windows == ((0, 14),)
    rest = delivery.fresh(baseline)
    _, done = stopped(delivery, rest, 10**6)
    assert max(numbers_in(through_json(delivery.state(done)))) < TO_THE_END
    late = replace(baseline, partial=(replace(partial, windows=((14, TO_THE_END),)),))
    state = through_json(delivery.state(delivery.fresh(late)))
    (written,) = state["base"]["in_progress"]
    assert (written["rows_delivered"], written["windows"]) == (0, [[14, None]])
    assert max(numbers_in(state)) < TO_THE_END
    assert delivery.restored(state).baseline == late
    before = [row for batch in delivery.batches_from(delivery.restored(state)) for row in batch]
    shard = partial.shard
    assert sorted(set(delivery.rows_of(shard)) & set(before)) == sorted(delivery.rows_in(ShardSlice(shard, 0, 14)))


def test_a_state_of_rows_does_not_load_where_rows_are_made_and_the_other_way_round():
    delivery, made = stopped_in_a_shard()
    plain = plain_delivery(MANIFEST, PlanOptions(300))
    state = through_json(plain.state(stopped(plain, plain.fresh(), 2)[1]))
    assert "unit" not in state["plan"]
    for loading, saved in ((plain, made), (delivery, state)):
        with pytest.raises(CheckpointMismatchError, match="unit changed") as raised:
            loading.restored(saved)
        assert [difference.name for difference in raised.value.differences] == ["unit"]
        with pytest.raises(CheckpointMismatchError, match="unit changed"):
            RankGroup((loading,)).base_of([saved])


def test_another_transform_id_is_a_difference_of_that_name():
    delivery, state = stopped_in_a_shard()
    other = replace(delivery, run=replace(delivery.run, transform_id="v2"))
    with pytest.raises(CheckpointMismatchError, match="transform_id changed: checkpoint=None, current='v2'"):
        other.restored(state)


@pytest.mark.parametrize(
    "window",
    [[3, 3], [3, None, 4], [TO_THE_END, TO_THE_END + 1], [None, None]],
    ids=["empty", "three bounds", "beyond the end", "no start"],
)
def test_a_damaged_window_is_refused(window):
    _, state = stopped_in_a_shard()
    shard = {**state["in_progress"][0], "windows": [window], "rows_delivered": 0}
    with pytest.raises(ValueError, match="not a state of this package"):
        parse_state(edited(state, in_progress=[shard]))


def test_an_open_end_is_refused_where_shards_deliver_their_rows():
    plain = plain_delivery(MANIFEST, PlanOptions(300))
    state = through_json(plain.state(stopped(plain, plain.fresh(), 2)[1]))
    shard = {**state["in_progress"][0], "windows": [[3, None]], "rows_delivered": 0}
    with pytest.raises(ValueError, match="windows"):
        parse_state(edited(state, in_progress=[shard]))


def test_an_audit_counts_the_rows_of_files_and_says_so():
    _, state = stopped_in_a_shard()
    audit = audit_states([parse_state(state)])
    assert (audit.total.under_way, audit.total.left, audit.ranks[0].rows) == (10, 60, 14)
    assert any("transformed rows" in note for note in audit.notes)
