"""Writing files of this machine so that a crash leaves no part of one."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file of this machine: after a crash it is the old one or the new one."""
    unfinished = path.with_suffix(f".{uuid.uuid4().hex}.unfinished")  # processes that share a rank write at one time
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with unfinished.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def sync_directory(path: Path) -> None:
    """Flush a directory to the disk: what was created in it or renamed, too, is to survive."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
