"""`audit`: what saved states say of each file, and whether today's files are still those of the states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch_dataloader_utils.checkpoint.audit import COUNTED, Today, audit_states, manifest_of_passes, unit_of
from torch_dataloader_utils.checkpoint.audit_result import Audit
from torch_dataloader_utils.checkpoint.compare import TOPOLOGY, compare_settings
from torch_dataloader_utils.checkpoint.file_changes import FileChanges
from torch_dataloader_utils.checkpoint.parse.states import parse_states
from torch_dataloader_utils.checkpoint.saved_state import SavedState
from torch_dataloader_utils.dataset.base import BatchDataset
from torch_dataloader_utils.dataset.discovery import Request
from torch_dataloader_utils.dataset.file_set import PathSet
from torch_dataloader_utils.distributed.read_states import read_states
from torch_dataloader_utils.formats.registry import choose_format
from torch_dataloader_utils.formats.text.footer import Cutting
from torch_dataloader_utils.loader.arguments import PathLike, parse_paths
from torch_dataloader_utils.loader.data_loader import StructuredDataLoader
from torch_dataloader_utils.storage.attempts import DEFAULT_TIMEOUT_SEC


def audit(
    states: Any,
    path_or_dataset: PathLike | Sequence[PathLike] | BatchDataset | StructuredDataLoader | None = None,
    storage_options: Mapping[str, Any] | None = None,
    *,
    key: str | None = None,
    storage_timeout: float = DEFAULT_TIMEOUT_SEC,
) -> Audit:
    """Count for each file the rows that states record: done, under way, left, missing, recorded twice.

    Nothing is changed, and no rows are read. With today's files, their footers are read and compared.

    Args:
        states: One rank's state or those of all ranks: anything that `read_states` takes, such as a checkpoint's path.
        path_or_dataset: Today's files, to compare them with those of the states: the path that
            `StructuredDataset.create_dataloader` gets, or a dataset or loader. A table, text that is parsed with
            `format_options`, and a filter that rules out row groups need the dataset. None compares nothing.
        storage_options: fsspec's options for the storage of states and files, such as credentials.
        key: The key of the states where a checkpoint holds those of several loaders, such as ``"loader"``.
        storage_timeout: Seconds that each operation of the storage may take, with all its attempts.

    Returns:
        The counts of all files together and of each file, and findings in words.

    Raises:
        FileNotFoundError: If there is no such checkpoint, or the path matches no file.
        CheckpointStoreError: If a store's checkpoint is incomplete or damaged.
        UnreadableFileError: If a file or its footer cannot be read.
        RankMismatchError: If the states are of several epochs, or of several lists of files.
        ValueError: If there is no state, or a state is damaged; or if the files cannot be compared by their path.
    """
    saved = parse_states(read_states(states, storage_options, key=key, storage_timeout=storage_timeout))
    if path_or_dataset is None:
        return audit_states(saved)
    opened = path_or_dataset.dataset if isinstance(path_or_dataset, StructuredDataLoader) else path_or_dataset
    if isinstance(opened, BatchDataset):
        return audit_states(saved, _opened(saved[0], opened))
    return audit_states(saved, _described(saved[0], opened, storage_options, storage_timeout))


def _opened(saved: SavedState, dataset: BatchDataset) -> Today:
    """Return a dataset's files, and how its settings differ from those of a state that may not differ."""
    run, selection = dataset.run_and_selection(None if saved.mixture is not None else saved.epoch)
    # Files that differ are told in other words; and with them their rows, and what a split strategy made of them.
    may_differ = (*TOPOLOGY, "weights", "rows", "split_strategy", "plan_algorithm")
    differences = compare_settings(saved, run, may_differ, FileChanges())
    manifest = run.manifest
    if saved.mixture is not None and run.mixture is not None:
        manifest = manifest_of_passes(saved.mixture, run.mixture)
    has_filter = saved.settings["filters"] is not None and run.filter_digest == saved.settings["filters"]
    return Today(manifest, selection if has_filter else None, tuple(map(str, differences)))


def _described(saved: SavedState, path: Any, storage_options: Mapping[str, Any] | None, timeout_sec: float) -> Today:
    """Return the files of a path, by their footers."""
    settings = saved.settings
    if saved.mixture is not None:
        raise ValueError("the states are of a mixture, which a path does not describe: pass its dataset or loader")
    for name, table in (("snapshot_id", "IcebergDataset"), ("version", "DeltaDataset")):
        if settings[name] is not None:
            msg = f"the states are of a table, which a path does not describe: open it with {table}.create_dataloader("
            raise ValueError(f"{msg}..., {name}={settings[name]}) and pass the dataset")
    # Rows of text are counted only where they are needed: that reads all of it. A run that counted them could shuffle
    # any file of them, so the buffer must not rule one out here.
    is_counted = str(settings["format_options"]).endswith(COUNTED)
    counts = saved.files is None and is_counted
    cutting = Cutting(settings["split_bytes"], None if is_counted else settings["shuffle_buffer_size"])
    file_format = choose_format(settings["format"], None, count_rows=counts, cutting=cutting, names_columns=False)
    request = Request(None, None, _keeps_nulls, timeout_sec, None)
    files = PathSet(parse_paths(path), file_format, storage_options, None, None)
    manifest = files.describe(request)
    return Today(manifest, has_rows=manifest.counts_rows == (unit_of(saved.settings) == "rows"))


def _keeps_nulls(_: Any) -> bool:
    return False
