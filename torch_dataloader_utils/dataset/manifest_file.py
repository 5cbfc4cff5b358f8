"""A dataset's files and their footers as bytes, so that one rank or one run reads them for all others."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

import pyarrow as pa

from torch_dataloader_utils.formats.base import KnownFooters
from torch_dataloader_utils.storage.filesystem import Storage, StoredFile
from torch_dataloader_utils.storage.listing import GLOB, Listing

__all__ = ["dump_manifest", "load_manifest"]

VERSION = 1
KEY = b"torch_dataloader_utils"
METADATA_FILE_KEY = b"torch_dataloader_utils:_metadata"
SCHEMA = pa.schema(
    {
        "path": pa.string(),
        "location": pa.string(),
        "size": pa.int64(),
        "etag": pa.string(),
        "modified": pa.float64(),
        "footer": pa.large_binary(),
    }
)


def dump_manifest(root: str, files: Sequence[StoredFile], known: KnownFooters) -> bytes:
    """Return files and footers as an Arrow IPC stream, compressed.

    Args:
        root: The directory that the files' paths are relative to, without credentials.
        files: The files.
        known: Their footers.

    Raises:
        ValueError: If a URL has a query or a user name: these may be secret, and the file cannot be found without
            them.
    """
    for file in files:
        if "://" in file.location and ("?" in file.location or "@" in urlsplit(file.location).netloc):
            msg = f"a manifest cannot hold {file.path!r}: its URL has a query or a user name, which may be secret"
            raise ValueError(msg)
    columns = {
        "path": [file.path for file in files],
        "location": [file.location for file in files],
        "size": [file.size for file in files],
        "etag": [file.etag for file in files],
        "modified": [file.modified for file in files],
        "footer": [None if known.metadata_file else known.footers[file.path] for file in files],
    }
    about = {KEY: json.dumps({"version": VERSION, "root": root}).encode()}
    if known.metadata_file:
        about[METADATA_FILE_KEY] = known.metadata_file
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, SCHEMA.with_metadata(about), options=options) as stream:
        stream.write_table(pa.table(columns, schema=SCHEMA))
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def load_manifest(content: bytes, storage: Storage, locations: Sequence[str]) -> tuple[Listing, KnownFooters]:
    """Return the files and footers that a manifest holds. The storage is not accessed.

    Args:
        content: A result of `dump_manifest`.
        storage: The files' storage.
        locations: The paths of the dataset, as the storage calls them.

    Raises:
        ValueError: If it is not a manifest, or belongs to other paths.
    """
    try:
        with pa.ipc.open_stream(pa.py_buffer(content)) as stream:
            table = stream.read_all()
        about = json.loads(table.schema.metadata[KEY])
        is_valid = about["version"] == VERSION and table.schema.remove_metadata() == SCHEMA and table.num_rows > 0
    except (pa.ArrowException, OSError, TypeError, KeyError, ValueError):
        is_valid = False
    if not is_valid:
        msg = f"the manifest is not a result of dataset.dump_manifest() of this release (version {VERSION})"
        raise ValueError(msg)
    files, footers = [], {}
    for row in table.to_pylist():
        footer = row.pop("footer")
        if footer is not None:
            footers[row["path"]] = footer
        files.append(StoredFile(**row))
        if not any(_is_at(row["location"], location) for location in locations):
            shown = " and ".join(map(storage.display, locations))
            msg = f"the manifest holds {storage.display(row['location'])}, which is not at {shown}"
            raise ValueError(msg)
    metadata_file = table.schema.metadata.get(METADATA_FILE_KEY)
    if metadata_file is None and len(footers) < len(files):
        msg = "the manifest lacks footers"
        raise ValueError(msg)
    return Listing(about["root"], tuple(files)), KnownFooters(footers, metadata_file)


def _is_at(location: str, given: str) -> bool:
    """Whether a file may be the given file, in the given directory, or match the given glob."""
    plain = re.split(GLOB, given, maxsplit=1)[0]
    return location == given or location.startswith(plain if plain != given else f"{given.rstrip('/')}/")
