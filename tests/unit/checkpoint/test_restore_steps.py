"""A strict load in its three steps, at every step of an epoch: check the states, plan, place the states."""

from __future__ import annotations

from dataclasses import replace

import pytest
from deliveries import Delivery, deliveries, through_json
from hypothesis import given
from support import examples, manifest_of

from torch_dataloader_utils import CheckpointMismatchError
from torch_dataloader_utils.checkpoint.parse.states import parse_states
from torch_dataloader_utils.checkpoint.restore import check_states, place_states
from torch_dataloader_utils.checkpoint.run import Run
from torch_dataloader_utils.planning.plan import PlanOptions
from torch_dataloader_utils.planning.topology import Topology

MANIFEST = manifest_of([(10, 100)] * 3, [(10, 100)] * 4)


def delivery_of(topology: Topology, **options: object) -> Delivery:
    run = Run(MANIFEST, PlanOptions(200, **options), filter_digest=None, topology=topology)
    return Delivery(run, epoch=1, takes_every=0, batch_size=4, drop_last=False, tells_ends_late=False)


@given(deliveries())
@examples(40, least=12)
def test_at_every_step_the_placed_progress_leaves_exactly_the_batches_to_come(delivery):
    whole = delivery.batches_from(delivery.fresh())
    for count, (_, progress) in zip(range(12), delivery.go_on(delivery.fresh()), strict=False):
        state = through_json(delivery.state(progress))
        checked = check_states(parse_states(state), delivery.run)
        assert (checked.epoch, checked.baseline) == (delivery.epoch, None), count
        assert not checked.differences
        assert not checked.files
        placed = place_states(checked, delivery.plan(checked.epoch, checked.baseline))
        assert delivery.batches_from(placed) == whole[progress.batches_delivered :]


def test_a_check_keeps_the_differences_and_placing_raises_them_with_the_shard_that_the_plan_lacks():
    saved = delivery_of(Topology(1, 0, 1), shuffle=True, shuffle_buffer_size=30)
    first = next(progress for batch, progress in saved.go_on(saved.fresh()) if batch is not None)
    state = through_json(saved.state(first))
    now = delivery_of(Topology(1, 0, 2), shuffle=True, shuffle_buffer_size=20, shuffle_seed=7)
    checked = check_states(parse_states(state), now.run)
    changed = {"num_workers", "shuffle_seed", "shuffle_buffer_size"}
    assert {difference.name for difference in checked.differences} == changed
    with pytest.raises(CheckpointMismatchError) as raised:
        place_states(checked, now.plan(checked.epoch, checked.baseline))
    assert {difference.name for difference in raised.value.differences} == changed
    assert raised.value.shard == state["in_progress"][0]["splits"]


def test_of_all_states_of_a_virtual_topology_all_count_and_otherwise_this_ranks_alone():
    virtual = {"uneven_ranks": "drop", "batch_size": 4}
    groups = {
        ranks: [delivery_of(Topology(ranks, rank, 1, 4, 2), **virtual) for rank in range(ranks)] for ranks in (1, 2)
    }
    states = parse_states([through_json(delivery.state(delivery.fresh())) for delivery in groups[2]])
    checked = check_states(states, groups[1][0].run)
    assert (checked.of_all_ranks, len(checked.states)) == (True, 2)
    assert not checked.differences, "real ranks may differ under a virtual topology"
    same = check_states(states[1:], groups[2][1].run)
    assert (same.of_all_ranks, same.states) == (False, (states[1],))

    plain = [delivery_of(Topology(2, rank, 1)) for rank in range(2)]
    states = parse_states([through_json(delivery.state(delivery.fresh())) for delivery in plain])
    mine = check_states(states[::-1], plain[0].run)
    assert (mine.of_all_ranks, mine.states) == (False, (states[0],))


def test_two_states_that_record_one_range_are_refused():
    virtual = {"uneven_ranks": "drop", "batch_size": 4}
    delivery = delivery_of(Topology(2, 0, 1, 2, 1), **virtual)
    end = list(delivery.go_on(delivery.fresh()))[-1][1]
    state = {**through_json(delivery.state(end)), "in_progress": []}
    assert state["completed_shards"]
    states = parse_states([state, {**state, "rank": 1}])
    checked = check_states(states, replace(delivery.run, topology=Topology(1, 0, 1, 2, 1)))
    with pytest.raises(CheckpointMismatchError) as raised:
        place_states(checked, delivery.plan(1))
    assert raised.value.shard in [shard["splits"] for shard in state["completed_shards"]]
