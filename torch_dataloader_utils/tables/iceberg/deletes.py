"""Rows deleted by position: Parquet files of paths and row numbers, and deletion vectors in Puffin files.

The formats are at https://iceberg.apache.org/spec/#position-delete-files and
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
"""Number of delete files that are read at the same time."""

VECTOR = "deletion-vector-v1"
VECTOR_MAGIC = b"\xd1\xd3\x39\x64"
Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DeleteFile:
    """A file that deletes rows by their position.

    Attributes:
        url: Its name in the table's metadata.
        location: Its name in the storage.
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
            file: The file in the table's metadata.
            location: Its name in the storage.
        """
        return cls(file.file_path, location, file.file_size_in_bytes, file.file_format)


@dataclass(frozen=True, slots=True)
class Deletions:
    """Which files delete rows of a data file.

    Attributes:
        url: The data file's name in the table's metadata.
        files: The delete files that apply to it.
    """

    url: str
    files: tuple[DeleteFile, ...]


def read_deletes(storage: Storage, deletions: Mapping[str, Deletions]) -> dict[str, Positions]:
    """Return the numbers of deleted rows in data files, ascending, by the files' paths.

    Args:
        storage: The files' storage.
        deletions: Which files delete rows of each data file, by its path.

    Raises:
        UnreadableFileError: If a delete file cannot be read; the message names it.
    """
    urls: dict[DeleteFile, set[str]] = {}
    for deletion in deletions.values():
        for file in deletion.files:
            urls.setdefault(file, set()).add(deletion.url)
    if not urls:
        return {}
    with ThreadPoolExecutor(min(THREADS, len(urls)), thread_name_prefix="deletes") as threads:
        read = dict(zip(urls, threads.map(partial(_read, storage), urls, urls.values()), strict=True))
    deleted = {}
    for path, deletion in deletions.items():
        found = [read[file][deletion.url] for file in deletion.files if deletion.url in read[file]]
        if found:
            deleted[path] = np.unique(np.concatenate(found))
    return deleted


def _read(storage: Storage, file: DeleteFile, urls: set[str]) -> dict[str, Positions]:
    """Return the row numbers that a delete file lists for some data files, in any order."""
    content = storage.read(StoredFile(file.location, file.location, file.size, None, None), 0, file.size)
    with storage.errors(file.location):
        if len(content) != file.size:
            msg = f"the delete file has {len(content)} bytes, not {file.size} as the table says"
            raise OSError(msg)
        if file.format == FileFormat.PARQUET:
            return _from_parquet(content, urls)
        if file.format == FileFormat.PUFFIN:
            return _from_puffin(content, urls)
    msg = f"the delete file {storage.display(file.location)} is {file.format.name}, which is not supported"
    raise UnreadableFileError(msg)


def _from_parquet(content: bytes, urls: set[str]) -> dict[str, Positions]:
    parquet = pq.ParquetFile(pa.BufferReader(content), read_dictionary=["file_path"])
    table = parquet.read(["file_path", "pos"])
    if table.column_names != ["file_path", "pos"]:
        msg = f"the delete file has the columns {', '.join(parquet.schema_arrow.names)}, not file_path and pos"
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
        url: _from_vector(content[blob.offset : blob.offset + blob.length])  # the specification forbids compression
        for blob in puffin.footer.blobs
        if blob.type == VECTOR and (url := blob.properties.get("referenced-data-file")) in urls
    }


def _from_vector(blob: bytes) -> Positions:
    """Return the row numbers in a vector. Its length and checksum are big-endian, its bitmap is little-endian."""
    length = int.from_bytes(blob[:4], "big")
    vector, checksum = blob[4 : 4 + length], blob[4 + length : 8 + length]
    if vector[:4] != VECTOR_MAGIC or zlib.crc32(vector) != int.from_bytes(checksum, "big"):
        msg = "a deletion vector is damaged: its magic or its checksum is wrong"
        raise ValueError(msg)
    return np.fromiter(BitMap64.deserialize(vector[4:]), dtype=np.int64)
