"""Plans and states of all ranks, without files: an epoch is half delivered, and goes on with half as many ranks."""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from typing import Any

from benchmarks.contenders.harness import report
from benchmarks.contenders.scale.stages import Stages
from torch_dataloader_utils.checkpoint.dump import dump_state
from torch_dataloader_utils.checkpoint.merge.states import merge_states
from torch_dataloader_utils.checkpoint.parse.states import parse_states
from torch_dataloader_utils.checkpoint.progress import Progress, StreamProgress
from torch_dataloader_utils.checkpoint.run import Run
from torch_dataloader_utils.distributed.gather import SHARED_KEYS
from torch_dataloader_utils.gc_pause import without_gc
from torch_dataloader_utils.planning.manifest import DataFile, Manifest, RowGroup
from torch_dataloader_utils.planning.plan import Plan, PlanOptions
from torch_dataloader_utils.planning.planner import EpochPlanner
from torch_dataloader_utils.planning.topology import Topology

ROWS, BYTES = 100_000, 100_000_000
"""Of a row group."""

BATCH_SIZE = 512

OPTIONS = PlanOptions(2**27, shuffle=True)
"""Of row groups of 100 MB, each is a shard of its own."""


def main(files: int, groups: int, ranks: int, workers: int) -> None:
    """Measure it."""
    stages = Stages()
    manifest = stages.run("manifest", lambda: _manifest(files, groups))
    topology = Topology(ranks, 0, workers)

    @without_gc
    def plan_with(options: PlanOptions) -> Plan:
        return EpochPlanner(manifest, options, None, None).plan(0, topology)

    plan = stages.run("plan", lambda: plan_with(OPTIONS))
    even = replace(OPTIONS, uneven_ranks="drop", batch_size=BATCH_SIZE)
    stages.run("plan_even", lambda: plan_with(even))
    run = Run(manifest, OPTIONS, None, topology, batch_size=BATCH_SIZE, drop_last=False)
    progress = stages.run("own_share", lambda: _half_of(plan, topology))
    stages.run("state", lambda: dump_state(run, 0, progress, plan.digest))
    gathered = stages.run("all_states", lambda: pickle.dumps(_states(plan, run)))
    fewer = Topology(max(1, ranks // 2), 0, workers)

    @without_gc
    def load() -> Progress:
        target = Run(manifest, OPTIONS, None, fewer, batch_size=BATCH_SIZE, drop_last=False)
        merged = merge_states(parse_states(pickle.loads(gathered)), target)  # noqa: S301 - of this process
        left = EpochPlanner(manifest, OPTIONS, None, None).plan(0, fewer, merged.baseline)
        return Progress.fresh(fewer.own_streams(left), baseline=merged.baseline)

    resumed = stages.run("load_elastically", load)
    left = sum(stream.rows_left for stream in resumed.streams)
    report(stages=stages.figures, shards=len(plan.slices), states_bytes=len(gathered), rows_left_of_a_rank=left)


def _manifest(files: int, groups: int) -> Manifest:
    return Manifest("/data", tuple(_file(number, groups) for number in range(files)))


def _file(number: int, groups: int) -> DataFile:
    path = f"{number // 1000:04d}/part-{number % 1000:03d}.parquet"
    row_groups = tuple(RowGroup(ROWS + (number + group) % 1000, BYTES + number + group) for group in range(groups))
    return DataFile(path, BYTES * groups, f"{number:016x}", row_groups)


def _half_of(plan: Plan, topology: Topology) -> Progress:
    """Return the progress of a rank that has delivered half of the shards of each stream, and a part of the next."""
    progress = Progress.fresh(topology.own_streams(plan))
    streams = [
        StreamProgress(stream.planned, stream.slices, len(stream.slices) // 2, BATCH_SIZE if stream.slices else 0)
        for stream in progress.streams
    ]
    return progress._replace(streams=tuple(streams), batches_delivered=1)


def _states(plan: Plan, run: Run) -> list[dict[str, Any]]:
    """Return the states of all ranks as `gather_states` does: what is equal is one object."""
    states = []
    for rank in range(run.topology.num_ranks):
        own = replace(run, topology=replace(run.topology, rank=rank))
        states.append(dump_state(own, 0, _half_of(plan, own.topology), plan.digest))
        states[-1].update({key: states[0][key] for key in SHARED_KEYS})
    return states


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
