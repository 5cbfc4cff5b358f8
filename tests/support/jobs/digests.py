"""Print what must be the same in every process, whatever its hash seed: digests of plans, orders of rows, filters."""

from __future__ import annotations

import sys

from torch_dataloader_utils.dataset.options import parse_filters
from torch_dataloader_utils.planning.manifest import DataFile, Manifest, RowGroup
from torch_dataloader_utils.planning.plan import PlanOptions
from torch_dataloader_utils.planning.planner import make_plan
from torch_dataloader_utils.planning.shuffle import permutation

MANIFEST = Manifest("", tuple(DataFile(f"{name}.parquet", 1, "", (RowGroup(10, 100),) * 30) for name in "abc"))
OPTIONS = [
    PlanOptions(1000),
    PlanOptions(1000, shuffle=True),
    PlanOptions(1000, split_rows=30, shuffle=True, shuffle_seed=-7),
    PlanOptions(2**27, shuffle=True, shuffle_buffer_size=100, shuffle_seed=2**90),
]


def lines() -> list[str]:
    """Return all of it."""
    found = [MANIFEST.fingerprint]
    for options in OPTIONS:
        for epoch in (0, 5):
            plan = make_plan(MANIFEST, options, epoch=epoch, num_ranks=2, num_workers=3)
            shard = plan.slices[0].shard
            rows = permutation(50, seed=options.shuffle_seed, epoch=epoch, shard=shard)
            found.append(f"{plan.digest} {rows.tolist()}")
    found.append(
        ascii(str(parse_filters([("x", "in", {"a", "b", "c", "d", "e"}), ("y", "not in", {"v", "w", "z", None})])))
    )
    return found


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines()))
