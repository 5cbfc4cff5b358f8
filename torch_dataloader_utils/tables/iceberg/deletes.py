"""Rows deleted by position: Parquet files of paths and places, and deletion vectors in Puffin files.

The columns are those of https://iceberg.apache.org/spec/#position-delete-files, the vectors those of
https://iceberg.apache.org/puffin-spec/#deletion-vector-v1-blob-type.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.manifest import DataFile, FileFormat
from pyiceberg.table.puffin import PuffinFile
from pyroaring import BitMap64

from torch_dataloader_utils.errors import UnreadableFileError
from torch_dataloader_utils.storage.filesystem import Storage, StoredFile

__all__ = ["DeleteFile", "Deletions", "read_deletes"]


THREADS = 16
"""How many delete files are read at once."""


VECTOR = "deletion-vector-v1"


VECTOR_MAGIC = b"\xd1\xd3\x39\x64"


Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DeleteFile:
    """A file that deletes rows by their place.

    Attributes:
        url: What the table calls it.
        location: What its storage calls it.
        size: Its size in bytes, by the table's metadata.
        format: Its format.
    """

    url: str
    location: str
    size: int
    format: FileFormat

    @classmethod
    def of(cls, file: DataFile, location: str) -> DeleteFile:
        """Return a delete file of a table.

        Args:
            file: What the table says of it.
            location: What its storage calls it.
        """
        return cls(file.file_path, location, file.file_size_in_bytes, file.file_format)


@dataclass(frozen=True, slots=True)
class Deletions:
    """Which files delete rows of a data file.

    Attributes:
        url: What the table calls the data file.
        files: The delete files that apply to it.
    """

    url: str
    files: tuple[DeleteFile, ...]


def read_deletes(storage: Storage, deletions: Mapping[str, Deletions]) -> dict[str, Positions]:
    """Return the places of deleted rows in data files, rising, by their path.

    Args:
        storage: Where the files lie.
        deletions: Which files delete rows of each data file, by its path.

    Raises:
        UnreadableFileError: If a delete file cannot be read; the message names it.
    """
    urls: dict[DeleteFile, set[str]] = {}
    for own in deletions.values():
        for file in own.files:
            urls.setdefault(file, set()).add(own.url)
    if not urls:
        return {}
    with ThreadPoolExecutor(min(THREADS, len(urls)), thread_name_prefix="deletes") as threads:
        read = dict(zip(urls, threads.map(partial(_read, storage), urls, urls.values()), strict=True))
    deleted = {}
    for path, own in deletions.items():
        found = [read[file][own.url] for file in own.files if own.url in read[file]]
        if found:
            deleted[path] = np.unique(np.concatenate(found))
    return deleted


def _read(storage: Storage, file: DeleteFile, urls: set[str]) -> dict[str, Positions]:
    """Return the places that a delete file names in some data files, in any order."""
    content = storage.read(StoredFile(file.location, file.location, file.size, None, None), 0, file.size)
    with storage.errors(file.location):
        if len(content) != file.size:
            msg = f"the delete file has {len(content)} bytes, not {file.size} as the table says"
            raise OSError(msg)
        if file.format == FileFormat.PARQUET:
            return _from_parquet(content, urls)
        if file.format == FileFormat.PUFFIN:
            return _from_puffin(content, urls)
    msg = f"{storage.display(file.location)} deletes rows in {file.format.name}, which is not supported"
    raise UnreadableFileError(msg)


def _from_parquet(content: bytes, urls: set[str]) -> dict[str, Positions]:
    parquet = pq.ParquetFile(pa.BufferReader(content), read_dictionary=["file_path"])
    table = parquet.read(["file_path", "pos"])
    if table.column_names != ["file_path", "pos"]:
        msg = f"it has the columns {', '.join(parquet.schema_arrow.names)}, not file_path and pos"
        raise ValueError(msg)
    table = table.unify_dictionaries().combine_chunks()
    if not len(table):
        return {}
    paths = table["file_path"].chunk(0)
    codes = paths.indices.to_numpy(zero_copy_only=False)
    positions = table["pos"].to_numpy().astype(np.int64)
    order = np.argsort(codes, kind="stable")
    codes, positions = codes[order], positions[order]
    names = paths.dictionary.to_pylist()
    bounds = np.searchsorted(codes, np.arange(len(names) + 1))
    return {name: positions[bounds[code] : bounds[code + 1]] for code, name in enumerate(names) if name in urls}


def _from_puffin(content: bytes, urls: set[str]) -> dict[str, Positions]:
    puffin = PuffinFile(content)
    return {
        url: _from_vector(content[blob.offset : blob.offset + blob.length])  # such a blob is never compressed
        for blob in puffin.footer.blobs
        if blob.type == VECTOR and (url := blob.properties.get("referenced-data-file")) in urls
    }


def _from_vector(blob: bytes) -> Positions:
    """Return the places in a vector: its length and checksum are big-endian, what lies between is not."""
    length = int.from_bytes(blob[:4], "big")
    vector, checksum = blob[4 : 4 + length], blob[4 + length : 8 + length]
    if vector[:4] != VECTOR_MAGIC or zlib.crc32(vector) != int.from_bytes(checksum, "big"):
        msg = "a deletion vector is damaged: its magic or its checksum is wrong"
        raise ValueError(msg)
    return np.fromiter(BitMap64.deserialize(vector[4:]), dtype=np.int64)
