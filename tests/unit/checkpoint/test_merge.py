"""What is left of an epoch goes on under any other ranks and workers: each row once, balanced or in a grid too."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from deliveries import Delivery, through_json
from hypothesis import given
from hypothesis import strategies as st
from pairwise import covering
from rank_groups import RankGroup, journeys
from support import examples, manifest_of, manifests, plan_options

from torch_dataloader_utils import CheckpointMismatchError, RankMismatchError
from torch_dataloader_utils.planning.plan import PlanOptions


@given(journeys())
@examples(200, part=10)
def test_any_number_of_groups_one_after_the_other_deliver_each_row_once(journey):
    groups, stops = journey
    baseline = None
    delivered: list[int] = []
    repeats = drops = 0
    for number, (group, after) in enumerate(zip(groups, stops, strict=True)):
        last = number == len(groups) - 1
        rows, states = group.go_on(baseline, [10**6] * len(after) if last else after)
        delivered += rows
        planned = group.ranks[0].run.topology.planned_ranks
        uneven = group.ranks[0].run.options.uneven_ranks
        repeats += planned - 1 if uneven == "pad" else 0
        drops = planned - 1 if last and uneven == "drop" else 0
        if not last:
            baseline = groups[number + 1].base_of(states)
    counts = Counter(delivered)
    assert set(counts) <= set(group.rows)
    assert len(group.rows) - len(counts) <= drops
    assert counts.total() - len(counts) <= repeats


@given(journeys())
@examples(60, least=12, part=5)
def test_every_rank_of_a_group_that_is_balanced_makes_the_same_steps_also_of_what_was_left(journey):
    groups, stops = journey
    groups = [group for group in groups if group.ranks[0].run.options.uneven_ranks != "allow"]
    baseline = None
    for number, (group, after) in enumerate(zip(groups, stops, strict=False)):
        steps = [[len(batch) for batch in one.batches_from(one.fresh(baseline))] for one in group.ranks]
        assert all(one == steps[0] for one in steps)
        size = group.ranks[0].batch_size
        assert all(rows == size for rows in steps[0][:-1])
        counts = {one.fresh(baseline).batches(size, drop_last=False) for one in group.ranks}
        assert counts == {len(steps[0]) + (0 if baseline is None else baseline.batches)}
        _, states = group.go_on(baseline, [after[0]] * len(group.ranks))
        if number + 1 < len(groups):
            baseline = groups[number + 1].base_of(states)


GRIDS = [(4, 4), (2, 2), (6, 2)]


@given(manifests(), plan_options(), st.sampled_from(GRIDS), st.sampled_from(["drop", "pad"]), st.data())
@examples(60, least=12, part=5)
def test_a_virtual_topology_delivers_the_same_global_batches_under_all_its_topologies_and_when_they_change(
    manifest, options, grid, uneven, data
):
    def group(num_ranks: int, num_workers: int) -> RankGroup:
        counts = {"num_ranks": num_ranks, "num_workers": num_workers, "grid": grid}
        return RankGroup.of(manifest, options, **counts, uneven=uneven, batch_size=3)

    def divisors(count: int) -> list[int]:
        return [one for one in range(1, count + 1) if count % one == 0]

    def draw_group() -> RankGroup:
        return group(data.draw(st.sampled_from(divisors(grid[0]))), data.draw(st.sampled_from([0, *divisors(grid[1])])))

    def global_batches(batches: list[list[list[int]]]) -> list[list[int]]:
        return [[row for part in step for row in part] for step in zip(*batches, strict=True)]

    one = group(1, 0).ranks[0]
    whole = one.batches_from(one.fresh())
    states: list[dict[str, Any]] | None = None
    seen: list[list[int]] = []
    for _ in range(3):
        now = draw_group()
        begins = [rank.restored_from(states) if states else rank.fresh() for rank in now.ranks]
        rest = [rank.batches_from(begin) for rank, begin in zip(now.ranks, begins, strict=True)]
        assert seen + global_batches(rest) == whole
        steps = data.draw(st.integers(0, 8))
        parts = [stopped_after(rank, begin, steps) for rank, begin in zip(now.ranks, begins, strict=True)]
        seen += global_batches([batches for batches, _ in parts])
        states = [through_json(rank.state(progress)) for rank, (_, progress) in zip(now.ranks, parts, strict=True)]


def stopped_after(delivery: Delivery, progress: Any, steps: int) -> tuple[list[list[int]], Any]:
    """Deliver so many batches, or to the last."""
    batches = []
    for batch, now in delivery.go_on(progress):
        if batch is None:
            continue
        if len(batches) == steps:
            break
        batches.append(batch)
        progress = now
    return batches, progress


# Small cases -------------------------------------------------------------------------------------------------------

COUNTS = list(itertools.product(range(1, 6), range(4), (1, 2, 5)))
"""Ranks, workers and rows of a batch."""


@pytest.mark.parametrize(
    "counts",
    [covering(COUNTS), pytest.param(COUNTS, marks=pytest.mark.soak)],
    ids=["each with each other", "all of them"],
)
@pytest.mark.parametrize("rows", range(9))
@pytest.mark.parametrize("uneven", ["drop", "pad"])
def test_few_rows_are_balanced_over_any_ranks_and_workers(rows, uneven, counts):
    for groups in {(rows,), (1,) * rows, (max(0, rows - 1), min(1, rows))}:
        manifest = manifest_of([(count, 100) for count in groups])
        for num_ranks, num_workers, size in counts:
            those = {"num_ranks": num_ranks, "num_workers": num_workers}
            group = RankGroup.of(manifest, PlanOptions(1000), **those, uneven=uneven, batch_size=size)
            each = [rank.batches_from(rank.fresh()) for rank in group.ranks]
            lengths = [[len(batch) for batch in batches] for batches in each]
            assert all(one == lengths[0] for one in lengths)
            delivered = Counter(row for batches in each for batch in batches for row in batch)
            plan = group.ranks[0].plan(0)
            assert plan.balanced is not None
            dropped = [shard_slice.rows for shard_slice in plan.balanced.dropped]
            repeated = [shard_slice.rows for shard_slice in plan.balanced.repeated]
            assert sum(dropped) + len(delivered) == rows
            assert delivered.total() - len(delivered) == sum(repeated)
            assert sum(dropped) < num_ranks
            assert sum(repeated) < num_ranks
            assert (dropped if uneven == "pad" else repeated) == []


# What does not fit together ----------------------------------------------------------------------------------------

EVEN = manifest_of([(10, 100)] * 6, [(10, 100)] * 6)


def saved(group: RankGroup, after: int = 3) -> list[dict[str, Any]]:
    return group.go_on(None, [after] * len(group.ranks))[1]


def three_ranks(**options: Any) -> RankGroup:
    return RankGroup.of(EVEN, PlanOptions(300), num_ranks=3, num_workers=2, **options)


def refused(states: list[dict[str, Any]], error: type[Exception], match: str, today: RankGroup | None = None) -> None:
    today = today or RankGroup.of(EVEN, PlanOptions(300))
    with pytest.raises(error, match=match):
        today.base_of(states)


def test_a_missing_rank_is_named():
    states = saved(three_ranks())
    refused(states[:1], RankMismatchError, r"states of ranks \[1, 2\] are missing")
    refused([states[0], states[2]], RankMismatchError, r"states of ranks \[1\] are missing")


def test_a_rank_given_twice_is_named():
    states = saved(three_ranks())
    refused([states[0], states[1], states[1], states[2]], RankMismatchError, r"states of ranks \[1\] .* more than once")


def test_states_of_different_numbers_of_ranks_are_refused():
    states = saved(three_ranks())
    others = saved(RankGroup.of(EVEN, PlanOptions(300), num_ranks=2))
    refused([*states[:2], others[1]], RankMismatchError, r"rank 0 of 3, rank 1 of 3, rank 1 of 2")


def test_states_of_different_epochs_are_refused_with_the_ranks():
    states = saved(three_ranks())
    states[1] = saved(three_ranks(epoch=1))[1]
    refused(states, RankMismatchError, r"ranks \[1\] were saved under other epochs than rank 0")


def test_states_of_different_datasets_are_refused_with_the_ranks():
    states = saved(three_ranks())
    other = RankGroup.of(manifest_of([(10, 100)] * 12), PlanOptions(300), num_ranks=3, num_workers=2)
    states[2] = saved(other)[2]
    refused(states, RankMismatchError, r"ranks \[2\] were saved under other datasets than rank 0")


def test_states_of_different_resumes_are_refused_with_the_ranks():
    states = saved(three_ranks())
    baseline = three_ranks().base_of(states)
    _, later = three_ranks().go_on(baseline, [1, 1, 1])
    refused([states[0], later[1], later[2]], RankMismatchError, r"ranks \[1, 2\] .* other earlier progress than rank 0")


def test_overlapping_progress_is_refused_with_the_ranks():
    states = saved(three_ranks(), after=20)
    states[1]["completed_shards"] = [*states[1]["completed_shards"], states[0]["completed_shards"][0]]
    refused(states, RankMismatchError, r"the states overlap: rank 0 and rank 1 both record row")


def test_a_window_that_two_ranks_delivered_is_refused_with_the_ranks():
    manifest = manifest_of([(40, 100)])
    group = RankGroup.of(manifest, PlanOptions(300), num_ranks=2, uneven="drop")
    states = saved(group)
    assert [state["in_progress"][0].get("windows") for state in states] == [None, [[20, 32]]]
    states[1]["in_progress"][0]["windows"] = [[11, 23]]
    refused(
        states, RankMismatchError, r"rank 0 and rank 1 both record row 11", RankGroup.of(manifest, PlanOptions(300))
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("shuffle_seed", PlanOptions(300, shuffle_seed=1)),
        ("split_bytes", PlanOptions(200)),
        ("shuffle", PlanOptions(300, shuffle=True)),
    ],
)
def test_what_an_elastic_resume_cannot_change_is_named(name, options):
    refused(saved(three_ranks()), CheckpointMismatchError, rf"{name} changed", RankGroup.of(EVEN, options))


def test_a_range_that_is_no_union_of_row_groups_is_refused():
    states = saved(RankGroup.of(EVEN, PlanOptions(300)), after=20)
    states[0]["completed_shards"][0]["splits"][0]["row_length"] -= 1
    refused(states, CheckpointMismatchError, "is not in this rank's plan of today")


def test_a_strict_load_by_others_says_that_an_elastic_one_would_work():
    states = saved(three_ranks())
    with pytest.raises(
        CheckpointMismatchError, match=r"load_state_dict\(states, strict=False\) with the states of all"
    ):
        RankGroup.of(EVEN, PlanOptions(300), num_ranks=2, num_workers=1).ranks[0].restored(states[0])
