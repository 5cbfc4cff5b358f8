"""The ranks of a job, of which the last one differs from the others: what each place where ranks meet does about it.

Its argument, JSON: ``data``, the directory that the tests made; ``report``, the file to which each rank appends its own
number; and ``cells``: pairs of a place and a difference.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.compute as pc
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from jobs.groups import leave_group

from torch_dataloader_utils import (
    CheckpointMismatchError,
    RankMismatchError,
    StructuredDataset,
    UnevenRanksWarning,
)
from torch_dataloader_utils.distributed import CheckpointEntry, gather_states, in_step, own_state, require_same_plan

LIMIT_SEC = 240
"""A rank that waits longer for the others ends with an error of torch's. No rank that comes takes as long."""


class TaggedFileSystem(LocalFileSystem):
    """A storage with etags, of local files: the digest of a file's content, as S3 has it."""

    protocol = "tagged"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        """Return a path; old releases of fsspec know only the protocols of local files."""
        stripped = [str(one).removeprefix("tagged://") for one in (path if isinstance(path, list) else [path])]
        return super()._strip_protocol(stripped if isinstance(path, list) else stripped[0])

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        """Return what is known of a file."""
        found: dict[str, Any] = super().info(path, **options)
        if found["type"] == "file":
            found["ETag"] = hashlib.md5(Path(found["name"]).read_bytes(), usedforsecurity=False).hexdigest()
        return found

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        """Return the files of a directory."""
        names = super().ls(path, detail=False, **options)
        return [self.info(name) for name in names] if detail else names


fsspec.register_implementation("tagged", TaggedFileSystem)


def differences(data: Path) -> dict[str, dict[str, Any]]:
    """Return what the last rank is told that the others are not, by the difference's name."""
    files = sorted(map(str, (data / "first").iterdir()))
    return {
        "nothing": {},
        "CPUs": {"cpus": 1},
        "a file more": {"path": [*files, str(data / "more.parquet")]},
        "a file less": {"path": files[1:]},
        "another order of the same files": {"path": files[::-1]},
        "another mount point": {"path": str(data / "copy")},
        "a file with other rows": {"path": str(data / "other")},
        "a version with another etag": {"path": f"tagged://{data}/second"},
        "the seed": {"shuffle_seed": 43},
        "the order": {"shuffle": False, "shuffle_buffer_size": None},
        "the shuffle buffer": {"shuffle_buffer_size": 41},
        "no shuffle buffer": {"shuffle_buffer_size": None},
        "the row groups mixed": {"shuffle_interleave": 3},
        "split_bytes": {"split_bytes": 2000},
        "split_rows": {"split_rows": 33},
        "workers": {"num_workers": 2},
        "the filter": {"filters": pc.field("value") > 5},
        "columns": {"columns": ["value"]},
        "the batch size": {"batch_size": 9},
        "the short batch dropped": {"drop_last": True},
        "balanced ranks": {"uneven_ranks": "drop"},
        "virtual ranks": {"uneven_ranks": "drop", "virtual_ranks": 12, "virtual_workers": 1, "batch_size": 24},
        "checksums of pages": {"format_options": {"page_checksum_verification": False}},
        "read ahead": {"read_ahead_bytes": 1},
        "uneven steps": {"uneven": "pad"},
        "the epoch": {"epoch": 1},
        "one rank twice": {"rank": 0},
        "ranks that do not know of each other": {"rank": 0, "num_ranks": 1},
    }


def open_loader(data: Path, name: str) -> tuple[Any, StructuredDataset, str]:
    """Open this rank's loader, which differs if this is the last rank, and say what `in_step` is to do at the end."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    changes = dict(differences(data)[name])
    cpus, epoch = changes.pop("cpus", None), changes.pop("epoch", 0)
    if name == "one rank twice":
        changes["num_ranks"] = dist.get_world_size()
    if name == "ranks that do not know of each other":
        is_last = True  # so are all
    options = {"path": f"tagged://{data}/first" if "etag" in name else str(data / "first"), "num_workers": 0}
    options |= {"batch_size": 8, "shuffle": True, "shuffle_buffer_size": 40, "row_id_column": "row"}
    uneven = changes.pop("uneven", "drop")
    options |= changes if is_last else {}
    usable = os.sched_getaffinity(0)
    if cpus is not None:
        options["num_workers"] = None
        os.sched_setaffinity(0, sorted(usable)[: 1 if is_last else len(usable)])
    try:
        loader, dataset = StructuredDataset.create_dataloader(**options)
    finally:
        os.sched_setaffinity(0, usable)
    dataset.set_epoch(epoch if is_last else 0)
    return loader, dataset, uneven if is_last else "drop"


def states_of_all(loader: Any) -> list[dict[str, Any]]:
    """Return the states of all ranks, compared by nobody."""
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, loader.state_dict())
    return states


def first_steps(loader: Any, uneven: Any) -> list[int]:
    """Make all steps together, and return their rows."""
    return [int(row) for batch in in_step(loader, uneven=uneven) for row in batch["row"]]


PLACES: dict[str, Callable[[Any, StructuredDataset, str], Any]] = {
    "require_same_plan": lambda _, dataset, __: require_same_plan(dataset),
    "gather_states": lambda loader, *_: gather_states(loader),
    "in_step": lambda loader, _, uneven: first_steps(loader, uneven),
    "CheckpointEntry": lambda loader, *_: CheckpointEntry(loader).state_dict(),
    "own_state": lambda loader, *_: own_state(states_of_all(loader)),
    "an elastic load": lambda loader, *_: loader.load_state_dict(states_of_all(loader), strict=False),
}


def tried(data: Path, place: str, name: str) -> dict[str, Any]:
    """Deliver some batches, meet the others, and deliver the rest unless that was refused."""
    loader, dataset, uneven = open_loader(data, name)
    batches = iter(loader)
    rows = [int(row) for _, batch in zip(range(2), batches, strict=False) for row in batch["row"]]
    began = time.monotonic()
    if place == "in_step":
        loader.load_state_dict(loader.state_dict())
    try:
        found = PLACES[place](loader, dataset, uneven)
    except (RankMismatchError, CheckpointMismatchError) as error:
        return {"refused": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - began, "rows": rows}
    seconds = time.monotonic() - began
    if place == "in_step":
        rows += found
    if place in {"in_step", "own_state", "gather_states"}:
        loader.load_state_dict(loader.state_dict())  # the rest, as a resumed run would deliver it
        batches = iter(loader)
    elif place == "an elastic load":
        batches = iter(loader)
    rows += [int(row) for batch in batches for row in batch["row"]]
    return {"refused": None, "seconds": seconds, "rows": rows}


def main() -> None:
    """Try every cell, and write what this rank found."""
    arguments = json.loads(sys.argv[1])
    warnings.simplefilter("ignore", UnevenRanksWarning)
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_SEC))
    found = [tried(Path(arguments["data"]), place, name) for place, name in arguments["cells"]]
    Path(f"{arguments['report']}-{dist.get_rank()}").write_text(json.dumps(found))
    leave_group()


if __name__ == "__main__":
    main()
