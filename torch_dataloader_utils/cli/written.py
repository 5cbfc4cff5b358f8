"""Files that commands write: a path of this machine, or a URL of any storage that fsspec opens."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_dataloader_utils.cli.options import TIMEOUT_SEC


def require_writable(path: str | None, storage_options: Mapping[str, Any] | None) -> None:
    """Raise what `write_file` would raise, as far as that is known before: a command may work for minutes first.

    Raises:
        OSError: If the directory is missing or read-only, or the path is a directory; the message names it.
        ValueError: If no storage has such URLs.
    """
    if path is None:
        return
    if "://" in path:
        from torch_dataloader_utils.storage.filesystem import Storage

        Storage.for_urls([path], storage_options)
        return
    file = Path(path)
    if file.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not file.parent.is_dir():
        number = errno.ENOTDIR if file.parent.exists() else errno.ENOENT
        raise OSError(number, os.strerror(number), path)
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)


def write_file(path: str, content: bytes, storage_options: Mapping[str, Any] | None) -> None:
    """Write a file, on another storage in one request.

    Raises:
        OSError: If it cannot be written; the message names it.
    """
    if "://" not in path:
        Path(path).write_bytes(content)
        return
    from torch_dataloader_utils.storage.filesystem import Storage

    storage, [location] = Storage.for_urls([path], storage_options, timeout_sec=TIMEOUT_SEC)
    with storage.errors(location):
        storage.call("pipe_file", location, content)
