"""Files that commands write: a path of this machine, or a URL of any storage that fsspec opens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_file(path: str, content: bytes, storage_options: Mapping[str, Any] | None) -> None:
    """Write a file, on another storage in one request.

    Raises:
        OSError: If it cannot be written; the message names it.
    """
    if "://" not in path:
        Path(path).write_bytes(content)
        return
    from torch_dataloader_utils.storage.filesystem import Storage

    storage, [location] = Storage.for_urls([path], storage_options)
    with storage.errors(location):
        storage.call("pipe_file", location, content)
