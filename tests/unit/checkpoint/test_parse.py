"""States of many ranks share large parts, which are checked and digested once, and mean the same as apart."""

from __future__ import annotations

import copy

import pytest
from deliveries import through_json
from hypothesis import given
from rank_groups import RankGroup, journeys
from support import examples, manifest_of

from torch_dataloader_utils.checkpoint.checksum import checksum_of
from torch_dataloader_utils.checkpoint.parse import states as parse
from torch_dataloader_utils.checkpoint.parse.states import parse_state, parse_states
from torch_dataloader_utils.planning.plan import PlanOptions

SHARED = ("files", "base")


def sharing(states):
    """Return the states as a pickle of all of them holds them: what is equal is one object."""
    states = copy.deepcopy(states)
    for state in states[1:]:
        for key in SHARED:
            if state[key] == states[0][key]:
                state[key] = states[0][key]
    return states


@pytest.fixture(scope="module")
def states():
    """States of eight ranks that go on after an elastic load."""
    group = RankGroup.of(manifest_of([(8, 64)] * 2, [(8, 64)] * 3, [(8, 64)] * 19), PlanOptions(64), num_ranks=8)
    _, first = group.go_on(None, [2] * 8)
    _, later = group.go_on(group.base_of(first), [1] * 8)
    assert later[0]["base"]
    return [state | {"checksum": checksum_of(state)} for state in through_json(later)]


@given(journeys())
@examples(60)
def test_states_that_share_objects_mean_the_same_as_each_of_them_alone(journey):
    groups, stops = journey
    baseline = None
    for number, (group, after) in enumerate(zip(groups[:-1], stops, strict=False)):
        _, states = group.go_on(baseline, after)
        alone = [parse_state(state) for state in states]
        assert parse_states(sharing(states)) == alone
        assert parse_states(through_json(states)) == alone
        baseline = groups[number + 1].base_of(states)


@pytest.mark.parametrize("part", SHARED)
def test_what_ranks_share_is_checked_and_digested_once(states, part, monkeypatch):
    checked, digested = [], []
    names = {"files": "parse_listed_files", "base": "_baseline"}
    check, digest = getattr(parse, names[part]), parse.part_digest
    monkeypatch.setattr(parse, names[part], lambda *args: checked.append(args) or check(*args))
    monkeypatch.setattr(parse, "part_digest", lambda key, value: digested.append(key) or digest(key, value))
    parse_states(sharing(states))
    assert len(checked) == digested.count(part) == 1


@pytest.mark.parametrize("part", SHARED)
@pytest.mark.parametrize("rank", [0, 1, 7])
def test_a_shared_part_that_one_rank_has_damaged_is_refused(states, part, rank):
    shared = sharing(states)
    shared[rank][part] = copy.deepcopy(shared[rank][part])
    if part == "files":
        shared[rank][part][0][1] += 1
    else:
        shared[rank][part]["batches_delivered"] += 1
    with pytest.raises(ValueError, match="checksum"):
        parse_states(shared)


@pytest.mark.parametrize("part", SHARED)
def test_a_shared_part_that_is_damaged_in_all_ranks_is_refused(states, part):
    shared = sharing(states)
    if part == "files":
        shared[0][part][0][2] += "0"
    else:
        shared[0][part]["batches_delivered"] += 1
    with pytest.raises(ValueError, match="checksum"):
        parse_states(shared)


def test_numbers_of_another_type_in_one_rank_are_refused_though_they_are_equal(states):
    others = copy.deepcopy(states)
    for state in others:
        del state["checksum"]  # as in states of earlier releases
    base = others[1]["base"]
    assert base["completed_rows"]
    base["completed_rows"] = list(map(float, base["completed_rows"]))
    with pytest.raises(ValueError, match="completed_rows"):
        parse_states(others)
