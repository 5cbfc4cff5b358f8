"""The dataset of a checkpoint, opened with the settings that its states record."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch_dataloader_utils.checkpoint.parse.states import parse_states
from torch_dataloader_utils.checkpoint.saved_state import SavedState
from torch_dataloader_utils.cli.options import TIMEOUT_SEC, storage_options
from torch_dataloader_utils.dataset.structured import StructuredDataset
from torch_dataloader_utils.distributed.read_states import read_states
from torch_dataloader_utils.errors import CheckpointMismatchError, UnevenRanksWarning, shown
from torch_dataloader_utils.loader.run_log import RunLogFiles
from torch_dataloader_utils.planning.manifest import root_prefix

SAME_NAMES = (
    "num_workers",
    "num_ranks",
    "rank",
    "shuffle",
    "shuffle_seed",
    "shuffle_buffer_size",
    "shuffle_interleave",
    "split_bytes",
    "split_rows",
    "uneven_ranks",
    "virtual_ranks",
    "virtual_workers",
)
"""Settings of a state that are parameters of ``create_dataloader``."""

OF_FILES = ("format", "partitioning", "count_rows", "format_options")
"""Parameters that a table does not have: it determines them."""

COUNTED = " counted"
"""How the digest of a text format's options ends where rows are counted."""


@dataclass(frozen=True)
class CheckpointDataset:
    """A dataset that has loaded the states of a checkpoint, and these states."""

    dataset: StructuredDataset
    states: Sequence[SavedState]

    @property
    def root(self) -> str:
        """The directory that paths are relative to."""
        return self.states[0].root

    def delivered(self, epoch: int, step: int, rank: int) -> bool | None:
        """Return whether a rank had delivered a step when the checkpoint was saved; None if that is not known."""
        batches = next((state.batches_delivered for state in self.states if state.rank == rank), None)
        if batches is None or epoch != self.dataset.epoch:
            return None
        return step < batches and not self.skips(epoch, step)

    def skips(self, epoch: int, step: int) -> bool:
        """Return whether the checkpoint records that a step is skipped."""
        saved = self.states[0]
        before = () if saved.baseline is None or saved.baseline.skipped is None else saved.baseline.skipped[1]
        steps = (*before, *(() if saved.skips is None else saved.skips.steps))
        return epoch == self.dataset.epoch and any(start <= step < stop for start, stop in steps)


def open_checkpoint(arguments: argparse.Namespace) -> CheckpointDataset:
    """Open the dataset of a checkpoint, and load the checkpoint.

    Raises:
        ValueError: If the states lack a setting that no option gave. The message names the option.
        CheckpointMismatchError: If the files, or what options say, are not those of the checkpoint.
    """
    options = storage_options(arguments)
    raw = read_states(arguments.checkpoint, options, key=arguments.key, storage_timeout=TIMEOUT_SEC)
    states = parse_states(raw)
    saved = next((state for state in states if state.rank == arguments.rank), states[0])
    parameters = _parameters(saved, arguments)
    if arguments.run_log is not None:
        _require_segments(arguments.run_log, options)
    paths: list[Any] = [saved.root if arguments.path is None else arguments.path]
    if arguments.path is None and _lists_files_below(saved):  # it may have been given as a glob, or as a list of files
        paths.append([root_prefix(saved.root) + file.path for file in saved.files or ()])
    for path in paths:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnevenRanksWarning)
            dataset = _opened(path, saved, parameters, options)
        try:
            dataset.load_state_dict(raw if len(raw) > 1 else raw[0])
        except CheckpointMismatchError as error:
            if not error.files_added or path is paths[-1]:
                raise
        else:
            break
    return CheckpointDataset(dataset, states)


def _require_segments(url: str, options: Any) -> None:
    """Raise if there is no run log: without one, an earlier run of other ranks would be taken for one of these."""
    log = RunLogFiles.at(url, options if "://" in url else None, TIMEOUT_SEC)
    if not log.segments():
        raise FileNotFoundError(f"--run-log: there is no run log in {log.url}, or the run has not made its first step")


def _lists_files_below(saved: SavedState) -> bool:
    """Whether a state lists files, all of them below its root."""
    return saved.files is not None and not any(".." in file.path.split("/") for file in saved.files)


def _opened(path: Any, saved: SavedState, parameters: dict[str, Any], options: Any) -> StructuredDataset:
    """Open files, or a version of a Delta Lake table."""
    version = saved.settings["version"]
    if version is None:
        _, dataset = StructuredDataset.create_dataloader(path, storage_options=options, **parameters)
        return dataset
    from torch_dataloader_utils.tables.delta import DeltaDataset

    of_table = {name: value for name, value in parameters.items() if name not in OF_FILES}
    _, table = DeltaDataset.create_dataloader(path, version=version, storage_options=options, **of_table)
    return table


def _parameters(saved: SavedState, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what ``create_dataloader`` takes, as the state records it or options give it."""
    settings = saved.settings
    if saved.mixture is not None:
        sources = ", ".join(source.name for source in saved.mixture.sources)
        msg = f"{arguments.checkpoint} is of a mixture of the sources {sources}: ask in Python, with dataset.rows_at "
        raise ValueError(f"{msg}or dataset.step_of; tdu verify and tdu diff read it")
    if settings["snapshot_id"] is not None:
        msg = f"{arguments.checkpoint} is of an Iceberg table, which needs a catalog: ask in Python, with "
        raise ValueError(f"{msg}IcebergDataset.create_dataloader(..., snapshot_id={settings['snapshot_id']})")
    if settings["split_strategy"] is not None:
        msg = f"{arguments.checkpoint} was saved with split_strategy {shown(settings['split_strategy'])}, which is "
        raise ValueError(msg + "code: ask in Python, with dataset.rows_at or dataset.step_of")
    if settings["unit"] == "sequences":
        msg = (
            f"{arguments.checkpoint} was saved with packing: only reading tells of which rows its sequences are made; "
        )
        raise ValueError(f"{msg}tdu verify and tdu diff read it")
    if settings["transform_id"] is not None:
        msg = f"{arguments.checkpoint} was saved with a transform: of which rows of files a step is made is not known"
        raise ValueError(msg)
    if settings["filters"] is not None and arguments.filter is None:
        msg = f"{arguments.checkpoint} was saved with a filter, of which it holds a digest alone: pass it, as in "
        raise ValueError(msg + '--filter \'[["x", ">", 3]]\'')
    if saved.has_unequal_batches:
        msg = f"{arguments.checkpoint} was saved with a TokenBudget: only reading tells which rows its steps have, "
        raise ValueError(f"{msg}and row_id_column delivers with each row which one it is")
    counts = str(settings["format_options"]).endswith(COUNTED)
    drop_last = arguments.drop_last if saved.drop_last is None else saved.drop_last
    return {name: settings[name] for name in SAME_NAMES} | {
        "format": settings["format"],
        "batch_size": _batch_size(saved, arguments),
        "drop_last": drop_last,
        "count_rows": counts,
        "filters": arguments.filter,
        "run_log": arguments.run_log,
        "storage_timeout": TIMEOUT_SEC,
        "partitioning": arguments.partitioning,
        "format_options": dict(arguments.format_option) if arguments.format_option else None,
    }


def _batch_size(saved: SavedState, arguments: argparse.Namespace) -> int:
    """Return the rows of a batch of a rank: those of the state, else as specified."""
    of_all = saved.settings["global_batch_size"]
    if saved.batch_size is not None:
        return saved.batch_size
    if of_all is not None:
        return int(of_all) // saved.num_ranks
    if arguments.batch_size is None:
        raise ValueError(f"{arguments.checkpoint} does not hold the batch size: pass it with --batch-size")
    return int(arguments.batch_size)
