"""Resumable PyTorch data loading from Parquet and its like: every row exactly once, through crashes and shuffling."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    SkippedStepsWarning,
    SlowTransportWarning,
    SmallWeightWarning,
    StorageRetryWarning,
    TransformError,
    UnevenRanksWarning,
    UnreadableFileError,
    UnusedStateWarning,
    WorkerError,
)
from torch_dataloader_utils.gc_pause import count_new_as_old, without_gc

if TYPE_CHECKING:
    from torch_dataloader_utils.checkpoint.audit_result import Audit, FileAudit
    from torch_dataloader_utils.checkpoint.run_segments import RunSegment as RunSegment
    from torch_dataloader_utils.columns.options import Codes, ColumnFormat, Packing, Padded
    from torch_dataloader_utils.columns.ragged import PackedBytes
    from torch_dataloader_utils.dataset.mixed import MixedDataset
    from torch_dataloader_utils.dataset.structured import StructuredDataset
    from torch_dataloader_utils.distributed.audit import audit as audit
    from torch_dataloader_utils.distributed.store import CheckpointStore as CheckpointStore
    from torch_dataloader_utils.distributed.store_files import StoredCheckpoint as StoredCheckpoint
    from torch_dataloader_utils.loader.data_loader import StructuredDataLoader
    from torch_dataloader_utils.loader.device import to_device
    from torch_dataloader_utils.loader.events import Event, Hook
    from torch_dataloader_utils.loader.run_log import RunLog
    from torch_dataloader_utils.planning.ledger.row_steps import Rows, RowStep
    from torch_dataloader_utils.planning.manifest import DataFile, Manifest, RowGroup, Split
    from torch_dataloader_utils.planning.plan import Shard
    from torch_dataloader_utils.planning.strategy import SplitStrategy
    from torch_dataloader_utils.planning.token_budget import TokenBudget
    from torch_dataloader_utils.tables.delta import DeltaDataset as DeltaDataset
    from torch_dataloader_utils.tables.iceberg import IcebergDataset as IcebergDataset
    from torch_dataloader_utils.tables.source import Source

__all__ = [
    "Audit",
    "ChangedFilesWarning",
    "CheckpointMismatchError",
    "CheckpointStoreError",
    "Codes",
    "ColumnError",
    "ColumnFormat",
    "DataFile",
    "DatasetError",
    "Event",
    "FileAudit",
    "FooterMismatchWarning",
    "Hook",
    "HookWarning",
    "IterationEndedError",
    "LedgerUnknownError",
    "LostRowsWarning",
    "Manifest",
    "MetadataFileWarning",
    "MixedDataset",
    "PackedBytes",
    "Packing",
    "Padded",
    "ProgressUnknownError",
    "RankMismatchError",
    "RowGroup",
    "RowStep",
    "Rows",
    "RunLog",
    "RunSegment",
    "Shard",
    "SilentWorkerWarning",
    "SkippedStepsWarning",
    "SlowTransportWarning",
    "SmallWeightWarning",
    "Source",
    "Split",
    "SplitStrategy",
    "StorageRetryWarning",
    "StructuredDataLoader",
    "StructuredDataset",
    "TokenBudget",
    "TransformError",
    "UnevenRanksWarning",
    "UnreadableFileError",
    "UnusedStateWarning",
    "WorkerError",
    "to_device",
]

_LAZY = {
    "Audit": "checkpoint.audit_result",
    "CheckpointStore": "distributed.store",
    "Codes": "columns.options",
    "ColumnFormat": "columns.options",
    "DataFile": "planning.manifest",
    "DeltaDataset": "tables.delta",
    "Event": "loader.events",
    "FileAudit": "checkpoint.audit_result",
    "Hook": "loader.events",
    "IcebergDataset": "tables.iceberg",
    "Manifest": "planning.manifest",
    "MixedDataset": "dataset.mixed",
    "PackedBytes": "columns.ragged",
    "Packing": "columns.options",
    "Padded": "columns.options",
    "RowGroup": "planning.manifest",
    "RowStep": "planning.ledger.row_steps",
    "Rows": "planning.ledger.row_steps",
    "RunLog": "loader.run_log",
    "RunSegment": "checkpoint.run_segments",
    "Shard": "planning.plan",
    "Source": "tables.source",
    "Split": "planning.manifest",
    "SplitStrategy": "planning.strategy",
    "StoredCheckpoint": "distributed.store_files",
    "StructuredDataLoader": "loader.data_loader",
    "StructuredDataset": "dataset.structured",
    "TokenBudget": "planning.token_budget",
    "audit": "distributed.audit",
    "to_device": "loader.device",
}
"""Names that are imported when they are used, and their modules: so that ``tdu --help`` does without torch."""


def __getattr__(name: str) -> Any:
    """Import what is not needed by everyone, or takes long, when it is requested."""
    if name in _LAZY:
        value = getattr(_import(f"{__name__}.{_LAZY[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@without_gc
def _import(module: str) -> Any:
    """Import a module. What it takes along, torch perhaps, stays: to look through it now or soon would find little."""
    imported = import_module(module)
    count_new_as_old()
    return imported


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
