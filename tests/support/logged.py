"""A file system that logs what is opened and read of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileOpener, LocalFileSystem


class LoggedFile(LocalFileOpener):
    """A file whose reads are logged."""

    def read(self, length: int = -1) -> bytes:
        start = self.tell()
        content: bytes = super().read(length)
        self.fs.log("read", self.path, start, start + len(content))
        return content


class LoggedFileSystem(LocalFileSystem):
    """Local files under another protocol; every process appends what it opens and reads to one log."""

    protocol = ("logged",)

    def __init__(self, log: str, **options: Any) -> None:
        super().__init__(**options)
        self.log_path = log

    def log(self, *words: Any) -> None:
        file = os.open(self.log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{json.dumps(words)}\n".encode())
        os.close(file)

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        self.log("open", path)
        return LoggedFile(path, mode, fs=self)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> Any:
        self.log("range", self._strip_protocol(path), start, end)
        return Path(path).read_bytes()[start:end]

    @classmethod
    def _strip_protocol(cls, path: str) -> Any:
        return super()._strip_protocol(str(path).removeprefix("logged://"))

    def unstrip_protocol(self, name: str) -> str:
        return f"logged://{self._strip_protocol(name)}"
