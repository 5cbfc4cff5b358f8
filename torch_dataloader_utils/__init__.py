"""Resumable PyTorch data loading from Parquet: every row exactly once, through crashes and shuffling."""

from torch_dataloader_utils.columns.choices import Codes, ColumnFormat, Padded
from torch_dataloader_utils.columns.ragged import PackedBytes
from torch_dataloader_utils.dataset import StructuredDataset
from torch_dataloader_utils.errors import (
    ChangedFilesWarning,
    CheckpointMismatchError,
    ColumnError,
    DatasetError,
    IterationEndedError,
    LostRowsWarning,
    MetadataFileWarning,
    ProgressUnknownError,
    RankMismatchError,
    UnevenRanksWarning,
    UnreadableFileError,
)
from torch_dataloader_utils.loader import StructuredDataLoader
from torch_dataloader_utils.model import DataFile, Manifest, RowGroup, Shard, Split
from torch_dataloader_utils.strategies import SplitStrategy

__all__ = [
    "ChangedFilesWarning",
    "CheckpointMismatchError",
    "Codes",
    "ColumnError",
    "ColumnFormat",
    "DataFile",
    "DatasetError",
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
    "Split",
    "SplitStrategy",
    "StructuredDataLoader",
    "StructuredDataset",
    "UnevenRanksWarning",
    "UnreadableFileError",
]
