"""A file as its storage lists it, and the version of it that the storage names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class StoredFile(NamedTuple):
    """A file as its storage lists it: its path relative to the listing's root, and its location in the storage.

    `etag` is what the storage calls this version, if it does. `modified` is in seconds since 1970, if it is known.
    """

    path: str
    location: str
    size: int
    etag: str | None
    modified: float | None

    def __repr__(self) -> str:
        """Leave out the location, which may hold credentials."""
        shown = f"path={self.path!r}, size={self.size}, etag={self.etag!r}, modified={self.modified!r}"
        return f"StoredFile({shown})"


def etag_of(info: Mapping[str, Any]) -> str | None:
    """Return a file version's etag, if the storage has one."""
    etag = info.get("ETag") or info.get("etag")
    return str(etag).strip('"') if etag else None
