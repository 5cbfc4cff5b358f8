"""This library's loader with another S3 client to read data with: s3fs, Arrow's, or obstore.

All else stays the same: s3fs lists and reads footers, and the same ranges are requested, as many at once. A client is
put in as fsspec lets anyone do: a filesystem for s3:// URLs, here s3fs with another way to open files.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import fsspec
from batches import kind_of, rows_of, sum_of
from fsspec.spec import AbstractBufferedFile
from harness import Job, deliver, read_job
from ours.loader import loader_of
from s3fs import S3FileSystem

Read = Callable[[int, int], bytes]
"""Reads a range of an object, from a start to a stop."""


def pyarrow_client(access: dict[str, str]) -> Callable[[dict[str, Any]], Read]:
    """Return what opens objects by Arrow's client, which asks for the size of each."""
    from pyarrow import fs  # noqa: PLC0415 - what it takes to load a client is part of its start

    @cache
    def client(_process: int) -> fs.S3FileSystem:
        return fs.S3FileSystem(
            access_key=access["key"],
            secret_key=access["secret"],
            endpoint_override=access["endpoint"].removeprefix("http://"),
            scheme="http",
            region=access["region"],
        )

    def opened(info: dict[str, Any]) -> Read:
        remote = client(os.getpid()).open_input_file(info["name"])
        return lambda start, stop: bytes(remote.read_at(stop - start, start))

    return opened


def obstore_client(access: dict[str, str]) -> Callable[[dict[str, Any]], Read]:
    """Return what opens objects by obstore, written in Rust: it reads the listed version only, as s3fs does."""
    import obstore  # noqa: PLC0415
    from obstore.store import S3Store  # noqa: PLC0415

    @cache
    def store(_process: int, bucket: str) -> S3Store:
        return S3Store(
            bucket,
            endpoint=access["endpoint"],
            access_key_id=access["key"],
            secret_access_key=access["secret"],
            region=access["region"],
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )

    def opened(info: dict[str, Any]) -> Read:
        bucket, key = info["name"].split("/", 1)

        def read(start: int, stop: int) -> bytes:
            options: Any = {"range": (start, stop), "if_match": info["ETag"]}
            return bytes(obstore.get(store(os.getpid(), bucket), key, options=options).bytes())

        return read

    return opened


CLIENTS = {"pyarrow": pyarrow_client, "obstore": obstore_client}


class ClientFile(AbstractBufferedFile):
    """A file that another client reads.

    Args:
        fs: Its filesystem.
        info: What the listing says of it.
        read: Reads ranges of it.
    """

    def __init__(self, fs: Any, info: dict[str, Any], read: Read) -> None:
        super().__init__(fs, info["name"], cache_type="none", size=info["size"])
        self.details = info
        self._read = read

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self._read(start, end)


class ClientFileSystem(S3FileSystem):
    """s3fs, but that another client opens files."""

    client: ClassVar[Callable[[dict[str, Any]], Read]]
    listed: ClassVar[dict[str, dict[str, Any]]] = {}
    """What was listed, of the class so that a forked worker has it and need not ask for sizes."""

    def find(self, path: str, **options: Any) -> Any:
        """List the files below a path, and keep what the listing says of them."""
        found = super().find(path, **options)
        self.listed.update(found)
        return found

    def _open(self, path: str, *_: Any, **_options: Any) -> ClientFile:
        info = self.listed[path]
        return ClientFile(self, info, type(self).client(info))


def loader_with_client(job: Job) -> Any:
    """Make the loader, and let the client that the job names open files."""
    client = job.options.pop("client")
    if client != "s3fs":
        assert job.s3 is not None
        ClientFileSystem.client = CLIENTS[client](job.s3)
        fsspec.register_implementation("s3", ClientFileSystem, clobber=True)
    return loader_of(job)


if __name__ == "__main__":
    job = read_job()
    deliver(job, lambda: loader_with_client(job), rows_of, sum_of, kind_of)
