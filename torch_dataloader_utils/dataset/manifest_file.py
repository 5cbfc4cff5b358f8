"""A dataset's files and their footers as bytes, so that one rank or one run reads them for all others."""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa

from torch_dataloader_utils.dataset.kept_rows import KeptRows
from torch_dataloader_utils.errors import cut
from torch_dataloader_utils.formats.base import KnownFooters
from torch_dataloader_utils.formats.opened_files import OpenedFiles
from torch_dataloader_utils.planning.token_counts import Lengths, TokenCounts
from torch_dataloader_utils.storage.filesystem import Storage
from torch_dataloader_utils.storage.listing import GLOB, Listing
from torch_dataloader_utils.storage.redaction import REDACTED
from torch_dataloader_utils.storage.stored_file import StoredFile

VERSION = 2
VERSION_WITHOUT_DIGEST = 1
MAGIC = b"TDUM"
DIGEST_SIZE = 16
KEY = b"torch_dataloader_utils"
METADATA_FILE_KEY = b"torch_dataloader_utils:_metadata"
TOKENS_KEY = b"torch_dataloader_utils:tokens"
KEPT_ROWS_KEY = b"torch_dataloader_utils:kept_rows"
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


def dump_opened(opened: OpenedFiles, *, kept: KeptRows | None = None, tokens: TokenCounts | None = None) -> bytes:
    """Return the manifest of opened files, as `dump_manifest` does.

    Raises:
        ValueError: As `dump_manifest`.
    """
    return dump_manifest(
        opened.manifest.root,
        tuple(opened.files.values()),
        KnownFooters(opened.footers, opened.metadata_file),
        opened.storage,
        format_name=opened.format.name,
        kept=kept,
        tokens=tokens,
    )


def dump_manifest(
    root: str,
    files: Sequence[StoredFile],
    known: KnownFooters,
    storage: Storage,
    *,
    format_name: str,
    kept: KeptRows | None = None,
    tokens: TokenCounts | None = None,
) -> bytes:
    """Return files of a format and their footers as an Arrow IPC stream, compressed, after a digest of it.

    `kept` are the rows that a filter keeps, or a transform makes, and `tokens` those of documents, if counted.

    Raises:
        ValueError: If a URL has a query or a user name that may be secret: the file cannot be found without it.
    """
    for file in files:
        is_url = "://" in file.location and ("?" in file.location or "@" in urlsplit(file.location).netloc)
        if is_url or REDACTED in storage.display(file.location):
            msg = f"a manifest cannot hold {file.path!r}: its URL has a query or a user name, which may be secret"
            raise ValueError(msg)
    columns = {name: [getattr(file, name) for file in files] for name in SCHEMA.names[:-1]}
    columns["footer"] = [None if known.metadata_file else known.footers[file.path] for file in files]
    about = {KEY: json.dumps({"version": VERSION, "root": root, "format": format_name}).encode()}
    if known.metadata_file:
        about[METADATA_FILE_KEY] = known.metadata_file
    if kept is not None:
        counts = {"filter": kept.filter_digest, "binding": kept.filter_binding, "rows": kept.rows}
        if kept.made is not None:
            counts["made"] = kept.made
        about[KEPT_ROWS_KEY] = json.dumps(counts).encode()
    if tokens is not None:
        about[TOKENS_KEY] = _dump_tokens(tokens)
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, SCHEMA.with_metadata(about), options=options) as stream:
        stream.write_table(pa.table(columns, schema=SCHEMA))
    return sealed(sink.getvalue().to_pybytes())


def sealed(stream: bytes) -> bytes:
    """Return a manifest's stream with its digest before it: Arrow would read many damaged streams as other values."""
    return _seal_of(stream) + stream


def _unsealed(content: bytes) -> tuple[int, memoryview]:
    """Return a manifest's version and its stream, or raise a ValueError if its digest is not that of the stream.

    Manifests of the first version are a stream alone.
    """
    whole = memoryview(content)
    if whole[: len(MAGIC)] != MAGIC:
        return VERSION_WITHOUT_DIGEST, whole
    size = len(MAGIC) + DIGEST_SIZE
    if whole[:size] != _seal_of(whole[size:]):
        raise ValueError("the manifest is damaged")
    return VERSION, whole[size:]


def _seal_of(stream: bytes | memoryview) -> bytes:
    return MAGIC + hashlib.blake2b(stream, digest_size=DIGEST_SIZE).digest()


def load_manifest(
    content: bytes, storage: Storage, locations: Sequence[str], format_name: str
) -> tuple[Listing, KnownFooters]:
    """Return the files and footers that a result of `dump_manifest` holds. The storage is not accessed.

    `locations` are the paths of the dataset, as the storage calls them.

    Raises:
        ValueError: If it is not a manifest, is damaged, or belongs to other paths or to files of another format.
    """
    listing, known = parse_manifest(content)
    held = _format_of(content)
    if held is not None and held != format_name:
        raise ValueError(f"the manifest is of files with the format {held!r}: pass format={held!r}")
    given = list(map(posixpath.normpath, locations)) if storage.is_local else locations  # as listings do
    for file in listing.files:
        if not any(_is_at(file.location, location) for location in given):
            shown = cut(" and ".join(map(storage.display, locations)))
            raise ValueError(f"the manifest holds {cut(storage.display(file.location))}, which is not at {shown}")
    return listing, known


def _format_of(content: bytes) -> str | None:
    """Return the format of a manifest's files; None for one that was made before manifests had it."""
    with pa.ipc.open_stream(pa.py_buffer(_unsealed(content)[1])) as stream:
        held: str | None = json.loads(stream.schema.metadata[KEY]).get("format")
    return held


def parse_kept_rows(content: bytes) -> KeptRows | None:
    """Return the rows that were counted of each row group, if a manifest holds them.

    `parse_manifest` has to have accepted it.
    """
    with pa.ipc.open_stream(pa.py_buffer(_unsealed(content)[1])) as stream:
        counts = (stream.schema.metadata or {}).get(KEPT_ROWS_KEY)
    if counts is None:
        return None
    held = json.loads(counts)
    rows = {path: tuple(of_file) for path, of_file in held["rows"].items()}
    return KeptRows(held["filter"], held["binding"], rows, held.get("made"))


def _dump_tokens(tokens: TokenCounts) -> bytes:
    """Return counted tokens: a line of JSON, and the lengths of all documents, compressed, if they are known."""
    about: dict[str, Any] = {
        "column": tokens.column,
        "length_column": tokens.length_column,
        "rows": dict(tokens.rows),
        "sums": dict(tokens.sums),
    }
    lengths = b""
    if tokens.lengths is not None:
        whole = np.concatenate([np.empty(0, np.int32), *map(tokens.lengths.__getitem__, tokens.rows)]).astype("<i4")
        about["documents"] = len(whole)
        lengths = pa.compress(whole.tobytes(), codec="zstd", asbytes=True)
    return json.dumps(about).encode() + b"\n" + lengths


def parse_tokens(content: bytes) -> TokenCounts | None:
    """Return the counted tokens, if a manifest holds them. `parse_manifest` has to have accepted it."""
    with pa.ipc.open_stream(pa.py_buffer(_unsealed(content)[1])) as stream:
        stored = (stream.schema.metadata or {}).get(TOKENS_KEY)
    if stored is None:
        return None
    text, compressed = stored.split(b"\n", 1)
    held = json.loads(text)
    rows, sums = ({path: tuple(of_file) for path, of_file in held[name].items()} for name in ("rows", "sums"))
    lengths: dict[str, Lengths] | None = None
    if "documents" in held:
        raw = pa.decompress(compressed, held["documents"] * 4, codec="zstd", asbytes=True)
        bounds = np.cumsum([sum(of_file) for of_file in rows.values()])[:-1]
        lengths = dict(zip(rows, np.split(np.frombuffer(raw, "<i4"), bounds), strict=True))
    return TokenCounts(held["column"], held["length_column"], rows, sums, lengths)


def parse_manifest(content: bytes) -> tuple[Listing, KnownFooters]:
    """Return the files and footers that a result of `dump_manifest` holds.

    Raises:
        ValueError: If it is not a manifest, or is damaged.
    """
    try:
        version, stored = _unsealed(content)
        with pa.ipc.open_stream(pa.py_buffer(stored)) as stream:
            table = stream.read_all()
        about = json.loads(table.schema.metadata[KEY])
        table.validate(full=True)
        is_valid = about["version"] == version and _is_valid(about, table)
    except (pa.ArrowException, OSError, TypeError, KeyError, ValueError, RecursionError):
        is_valid = False
    if not is_valid:
        msg = f"the manifest is not a result of dataset.dump_manifest() of this release (version {VERSION}), or damaged"
        raise ValueError(msg)
    files, footers = [], {}
    for row in table.to_pylist():
        footer = row.pop("footer")
        if footer is not None:
            footers[row["path"]] = footer
        files.append(StoredFile(**row))
    metadata_file = table.schema.metadata.get(METADATA_FILE_KEY)
    if metadata_file is None and len(footers) < len(files):
        raise ValueError("the manifest lacks footers")
    return Listing(about["root"], tuple(files)), KnownFooters(footers, metadata_file)


def _is_valid(about: dict[str, Any], table: pa.Table) -> bool:
    """Whether the values are such that `dump_manifest` can have written them."""
    if not isinstance(about["root"], str) or not isinstance(about.get("format", ""), str):
        return False
    if table.schema.remove_metadata() != SCHEMA or not table.num_rows:
        return False
    paths, sizes = table["path"].to_pylist(), table["size"].to_pylist()
    is_complete = not any(table[name].null_count for name in ("path", "location", "size"))
    return is_complete and min(sizes) >= 0 and all(path < following for path, following in pairwise(paths))


def _is_at(location: str, given: str) -> bool:
    """Whether a file may be the given file, in the given directory, or match the given glob."""
    if ".." in location.split("/"):  # it would lead out of the directory
        return location == given
    return location == given or location.startswith(f"{given.rstrip('/')}/") or _matches(location, given)


def _matches(location: str, pattern: str) -> bool:
    """Whether a glob matches a file, or a directory that holds it: such a directory is searched in depth."""
    names, patterns = location.split("/"), pattern.rstrip("/").split("/")
    reached = {0}
    for part in patterns if re.search(GLOB, pattern) else ():
        if part == "**":
            reached = set(range(min(reached, default=len(names) + 1), len(names) + 1))
        else:
            reached = {index + 1 for index in reached if index < len(names) and fnmatchcase(names[index], part)}
    return bool(reached - {0})
