"""This library's loader with another S3 client in the place where it opens remote files: s3fs, Arrow's, or obstore.

Everything else stays: listing and footers by s3fs, the same ranges, as many in flight.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

from batches import kind_of, rows_of, sum_of
from harness import Job, deliver, read_job
from ours.loader import loader_of

from torch_dataloader_utils.storage import Storage, StoredFile

Open = Callable[[Storage, StoredFile], Any]


def pyarrow_client(access: dict[str, str]) -> Open:
    """Return what opens files by Arrow's client, which asks for the size of each."""
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

    def opened(_storage: Storage, file: StoredFile) -> Any:
        remote = client(os.getpid()).open_input_file(file.location)
        return SimpleNamespace(read=lambda start, stop: remote.read_at(stop - start, start))

    return opened


def obstore_client(access: dict[str, str]) -> Open:
    """Return what opens files by obstore, written in Rust: reads are bound to the listed version, as s3fs's are."""
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

    def opened(_storage: Storage, file: StoredFile) -> Any:
        bucket, key = file.location.split("/", 1)

        def read(start: int, stop: int) -> Any:
            options: Any = {"range": (start, stop), "if_match": f'"{file.etag}"'}
            return obstore.get(store(os.getpid(), bucket), key, options=options).bytes()

        return SimpleNamespace(read=read)

    return opened


CLIENTS = {"pyarrow": pyarrow_client, "obstore": obstore_client}


def loader_with_client(job: Job) -> Any:
    """Make the loader, and let it open remote files by the client that the job names."""
    client = job.options.pop("client")
    if client != "s3fs":
        assert job.s3 is not None
        Storage.open_remote = CLIENTS[client](job.s3)  # type: ignore[assignment,method-assign]
    return loader_of(job)


if __name__ == "__main__":
    job = read_job()
    deliver(job, lambda: loader_with_client(job), rows_of, sum_of, kind_of)
