"""Resumable PyTorch data loading from Parquet and its like: every row exactly once, through crashes and shuffling."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch_dataloader_utils.columns.options import Codes, ColumnFormat, Padded
from torch_dataloader_utils.columns.ragged import PackedBytes
from torch_dataloader_utils.dataset.structured import StructuredDataset
from torch_dataloader_utils.errors import (
    ChangedFilesWarning,
    CheckpointMismatchError,
    ColumnError,
    DatasetError,
    FooterMismatchWarning,
    IterationEndedError,
    LostRowsWarning,
    MetadataFileWarning,
    ProgressUnknownError,
    RankMismatchError,
    SilentWorkerWarning,
    SlowTransportWarning,
    StorageRetryWarning,
    UnevenRanksWarning,
    UnreadableFileError,
    WorkerError,
)
from torch_dataloader_utils.loader.data_loader import StructuredDataLoader
from torch_dataloader_utils.loader.device import to_device
from torch_dataloader_utils.planning.manifest import DataFile, Manifest, RowGroup, Split
from torch_dataloader_utils.planning.plan import Shard
from torch_dataloader_utils.planning.strategy import SplitStrategy

if TYPE_CHECKING:
    from torch_dataloader_utils.tables.delta import DeltaDataset as DeltaDataset
    from torch_dataloader_utils.tables.iceberg import IcebergDataset as IcebergDataset

__all__ = [
    "ChangedFilesWarning",
    "CheckpointMismatchError",
    "Codes",
    "ColumnError",
    "ColumnFormat",
    "DataFile",
    "DatasetError",
    "FooterMismatchWarning",
    "IterationEndedError",
    "LostRowsWarning",
    "Manifest",
    "MetadataFileWarning",
    "PackedBytes",
    "Padded",
    "ProgressUnknownError",
    "RankMismatchError",
    "RowGroup",
    "Shard",
    "SilentWorkerWarning",
    "SlowTransportWarning",
    "Split",
    "SplitStrategy",
    "StorageRetryWarning",
    "StructuredDataLoader",
    "StructuredDataset",
    "UnevenRanksWarning",
    "UnreadableFileError",
    "WorkerError",
    "to_device",
]

_TABLES = {"DeltaDataset": "tables.delta", "IcebergDataset": "tables.iceberg"}
"""Classes that need another package, and the modules that they are in."""


def __getattr__(name: str) -> Any:
    """Import what needs another package when it is requested."""
    if name in _TABLES:
        return getattr(import_module(f"{__name__}.{_TABLES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_TABLES])
