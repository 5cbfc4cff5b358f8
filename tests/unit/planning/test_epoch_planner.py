"""The planner: the same plans as `make_plan`, made once where the same plan is needed again."""

from __future__ import annotations

import pickle
from collections.abc import Iterable

from support import manifest_of

from torch_dataloader_utils.planning.manifest import Manifest
from torch_dataloader_utils.planning.plan import DeliveredBaseline, PlanOptions, Shard
from torch_dataloader_utils.planning.planner import EpochPlanner, make_plan
from torch_dataloader_utils.planning.topology import Topology

MANIFEST = manifest_of([(10, 100)] * 6, [(10, 100)] * 5)
OPTIONS = PlanOptions(300, shuffle=True, uneven_ranks="drop", batch_size=4)
TOPOLOGY = Topology(num_ranks=2, rank=0, num_workers=2)


class Counting:
    """A strategy of a shard for each row group, which counts how often it is called."""

    def __init__(self) -> None:
        self.calls = 0

    def shards(self, manifest: Manifest, epoch: int) -> Iterable[Shard]:  # noqa: ARG002 - the same in all epochs
        self.calls += 1
        return [Shard((group.split,)) for groups in manifest.row_group_splits for group in groups]


def test_a_plan_is_made_once_until_another_is_needed():
    planner = EpochPlanner(MANIFEST, OPTIONS, None, None)
    plan = planner.plan(1, TOPOLOGY)
    assert plan == make_plan(MANIFEST, OPTIONS, epoch=1, num_ranks=2, num_workers=2)
    assert planner.plan(1, Topology(2, rank=1, num_workers=2)) is plan, "it does not depend on the rank"
    baseline = DeliveredBaseline(done=(MANIFEST.row_group_splits[0][0].split,), partial=(), left_out=(), batches=3)
    others = [
        planner.plan(2, TOPOLOGY),
        planner.plan(1, Topology(2, 0, num_workers=3)),
        planner.plan(1, Topology(3, 0, num_workers=2)),
        planner.plan(1, Topology(2, 0, 2, virtual_ranks=4, virtual_workers=4)),
        planner.plan(1, TOPOLOGY, baseline),
    ]
    assert len({plan.digest, *(other.digest for other in others)}) == len(others) + 1
    assert planner.plan(1, TOPOLOGY) == plan


def test_a_strategy_runs_once_an_epoch():
    strategy = Counting()
    planner = EpochPlanner(MANIFEST, PlanOptions(300), None, strategy)
    for epoch in (0, 0, 1):
        planner.plan(epoch, TOPOLOGY)
        planner.plan(epoch, Topology(2, 0, num_workers=5))
        assert planner.strategy_digest(epoch).startswith(f"{Counting.__module__}.Counting ")
    assert strategy.calls == 2
    assert EpochPlanner(MANIFEST, PlanOptions(300), None, None).strategy_digest(0) is None


def test_uneven_rows_are_rows_of_the_files_and_their_number_is_what_balancing_says():
    planner = EpochPlanner(MANIFEST, OPTIONS, None, None)
    three = Topology(3, 0, num_workers=2)
    plan = planner.plan(0, three)
    rows = planner.uneven_rows(plan)
    assert len(rows["dropped"]) == MANIFEST.rows % 3 == 2
    assert rows["repeated"] == []
    assert all(0 <= row < MANIFEST.rows_of[path] for path, row in rows["dropped"])
    assert planner.uneven_rows(plan) is rows
    uneven = EpochPlanner(MANIFEST, PlanOptions(300), None, None)
    assert uneven.uneven_rows(uneven.plan(0, three)) == {}


def test_a_pickled_planner_leaves_its_plans_behind_and_makes_them_again():
    planner = EpochPlanner(MANIFEST, OPTIONS, None, None)
    before = len(pickle.dumps(planner))
    plan = planner.plan(0, TOPOLOGY)
    assert len(pickle.dumps(planner)) == before
    assert pickle.loads(pickle.dumps(planner)).plan(0, TOPOLOGY) == plan
