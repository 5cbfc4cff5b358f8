"""Iceberg tables, read by pyiceberg as far as they are metadata, and by this package where it is rows."""

try:
    import pyiceberg  # noqa: F401 - so that its absence says what to do
except ImportError as error:
    msg = 'IcebergDataset needs pyiceberg: pip install "torch-dataloader-utils[iceberg]"'
    raise ImportError(msg) from error

from torch_dataloader_utils.tables.iceberg.table import IcebergDataset

__all__ = ["IcebergDataset"]
