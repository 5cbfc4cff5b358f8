"""The arguments `transform` and `transform_id`: checked, and applied to opened files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa

from torch_dataloader_utils.dataset.discovery import require_no_column
from torch_dataloader_utils.formats.opened_files import OpenedFiles
from torch_dataloader_utils.formats.row_transform import RowTransform, Transform
from torch_dataloader_utils.loader import arguments


def parse_transform(given: Mapping[str, Any]) -> tuple[Transform, str | None] | None:
    """Return the transform and what the user calls it, if nothing else is asked for that needs the rows themselves."""
    transform, transform_id = given["transform"], given["transform_id"]
    arguments.require_callable(transform, "transform")
    if transform_id is not None and not isinstance(transform_id, str):
        raise TypeError(f"transform_id={transform_id!r:.80} is {type(transform_id).__name__}, expected a string")
    if transform_id == "" or (transform_id is not None and transform is None):
        raise ValueError(
            f"transform_id={transform_id!r}: it is what you call the `transform`, and needs one and a name"
        )
    if transform is None:
        return None
    if given["fingerprint"] is True:
        raise ValueError(
            "fingerprint=True hashes which rows of files are delivered, and a transform makes others of them"
        )
    return transform, transform_id


def with_transform(
    opened: OpenedFiles, function: Transform, transform_id: str | None, row_id_column: str | None
) -> OpenedFiles:
    """Return the same files with a transform, which is called once with no rows.

    Raises:
        TransformError: If it fails, or what it returns cannot be delivered.
        ColumnError: If the row id column, which it sees, has the name of another column.
    """
    require_no_column(row_id_column, (*opened.schema.names, *opened.filter_columns))
    added = [] if row_id_column is None else [pa.field(row_id_column, pa.int64())]
    transform = RowTransform.opened(function, transform_id, pa.schema([*opened.schema, *added]))
    return replace(opened, transform=transform)
