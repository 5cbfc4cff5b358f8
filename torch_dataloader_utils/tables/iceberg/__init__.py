"""Iceberg tables: pyiceberg reads their metadata, this package their rows."""

try:
    import pyiceberg  # noqa: F401 - so that the message below says what to install
except ImportError as error:
    raise ImportError("IcebergDataset needs pyiceberg: pip install pyiceberg") from error

from torch_dataloader_utils.tables.iceberg.table import IcebergDataset

__all__ = ["IcebergDataset"]
