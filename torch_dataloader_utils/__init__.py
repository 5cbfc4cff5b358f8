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
    CheckpointStoreError,
    ColumnError,
    DatasetError,
    FooterMismatchWarning,
    HookWarning,
    IterationEndedError,
    LedgerUnknownError,
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
from torch_dataloader_utils.loader.events import Event, Hook
from torch_dataloader_utils.planning.ledger import Rows, RowStep
from torch_dataloader_utils.planning.manifest import DataFile, Manifest, RowGroup, Split
from torch_dataloader_utils.planning.plan import Shard
from torch_dataloader_utils.planning.strategy import SplitStrategy

if TYPE_CHECKING:
    from torch_dataloader_utils.distributed.store import CheckpointStore as CheckpointStore
    from torch_dataloader_utils.distributed.store_files import StoredCheckpoint as StoredCheckpoint
    from torch_dataloader_utils.tables.delta import DeltaDataset as DeltaDataset
    from torch_dataloader_utils.tables.iceberg import IcebergDataset as IcebergDataset

__all__ = [
    "ChangedFilesWarning",
    "CheckpointMismatchError",
    "CheckpointStoreError",
    "Codes",
    "ColumnError",
    "ColumnFormat",
    "DataFile",
    "DatasetError",
    "Event",
    "FooterMismatchWarning",
    "Hook",
    "HookWarning",
    "IterationEndedError",
    "LedgerUnknownError",
    "LostRowsWarning",
    "Manifest",
    "MetadataFileWarning",
    "PackedBytes",
    "Padded",
    "ProgressUnknownError",
    "RankMismatchError",
    "RowGroup",
    "RowStep",
    "Rows",
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

_LAZY = {
    "CheckpointStore": "distributed.store",
    "DeltaDataset": "tables.delta",
    "IcebergDataset": "tables.iceberg",
    "StoredCheckpoint": "distributed.store_files",
}
"""Classes that need another package or torch.distributed.checkpoint, and the modules that they are in."""


def __getattr__(name: str) -> Any:
    """Import what not everyone needs when it is requested."""
    if name in _LAZY:
        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
