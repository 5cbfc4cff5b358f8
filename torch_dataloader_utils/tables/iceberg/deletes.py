"""Rows deleted by position: Parquet files of paths and row numbers, and deletion vectors in Puffin files.

The formats are at https://iceberg.apache.org/spec/#position-delete-files and
https://iceberg.apache.org/puffin-spec/#deletion-vector-v1-blob-type.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.manifest import DataFile, FileFormat
from pyiceberg.table import FileScanTask
from pyiceberg.table.puffin import PuffinFile
from pyroaring import BitMap64

from torch_dataloader_utils.errors import UnreadableFileError
from torch_dataloader_utils.storage.filesystem import Storage
from torch_dataloader_utils.storage.stored_file import StoredFile

THREADS = 16
"""Number of delete files that are read at the same time."""

VECTOR = "deletion-vector-v1"
VECTOR_MAGIC = b"\xd1\xd3\x39\x64"
Positions = npt.NDArray[np.int64]


def read_deletes(
    storage: Storage, tasks: Mapping[str, FileScanTask], locations: Mapping[str, str]
) -> dict[str, Positions]:
    """Return the numbers of deleted rows in data files, ascending, by the files' paths.

    Args:
        storage: The files' storage.
        tasks: The data files by their paths, each with the delete files that apply to it.
        locations: What the storage calls files, by their names in the table's metadata.

    Raises:
        UnreadableFileError: If a delete file cannot be read; the message names it.
    """
    urls: dict[DataFile, set[str]] = {}
    for task in tasks.values():
        for file in task.delete_files:
            urls.setdefault(file, set()).add(task.file.file_path)
    if not urls:
        return {}
    with ThreadPoolExecutor(min(THREADS, len(urls)), thread_name_prefix="deletes") as threads:
        read = dict(zip(urls, threads.map(partial(_read, storage, locations), urls, urls.values()), strict=True))
    deleted = {}
    for path, task in tasks.items():
        url = task.file.file_path
        found = [read[file][url] for file in task.delete_files if url in read[file]]
        if found:
            deleted[path] = np.unique(np.concatenate(found))
    return deleted


def _read(storage: Storage, locations: Mapping[str, str], file: DataFile, urls: set[str]) -> dict[str, Positions]:
    """Return the row numbers that a delete file lists for some data files, in any order."""
    location, size = locations[file.file_path], file.file_size_in_bytes
    content = storage.read(StoredFile(location, location, size, None, None), 0, size)
    with storage.errors(location):
        if len(content) != size:
            raise OSError(f"the delete file has {len(content)} bytes, not {size} as the table says")
        if file.file_format == FileFormat.PARQUET:
            return _from_parquet(content, urls)
        if file.file_format == FileFormat.PUFFIN:
            return _from_puffin(content, urls)
    msg = f"the delete file {storage.display(location)} is {file.file_format.name}, which is not supported"
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
        raise ValueError("a deletion vector is damaged: its magic or its checksum is wrong")
    return np.fromiter(BitMap64.deserialize(vector[4:]), dtype=np.int64)
