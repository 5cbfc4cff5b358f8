"""s3fs with one attempt at each request, and with ranges of one version of an object."""

from __future__ import annotations

import time
import weakref
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fsspec.asyn import sync_wrapper
from s3fs import S3FileSystem

from torch_dataloader_utils.storage.attempts import within
from torch_dataloader_utils.storage.causes import require_same_version
from torch_dataloader_utils.storage.request_size import Answer

CONNECTIONS = 32
"""How many requests are made at once: as many as there are threads that fetch ranges, or read footers."""


class OneAttemptS3(S3FileSystem):  # type: ignore[misc]
    """s3fs without its own retries: `attempts` makes them. A class of its own leaves the user's instances alone."""

    retries = 1

    @classmethod
    def of(cls, fs: S3FileSystem) -> OneAttemptS3:
        """Return a filesystem with the same options.

        botocore does not try again, and keeps more connections than its 10, unless the options say something else.
        """
        options = dict(fs.storage_options)
        ours = {"retries": {"max_attempts": 0}, "max_pool_connections": CONNECTIONS}
        config = {**ours, **(options.get("config_kwargs") or {})}
        return cls(*fs.storage_args, **{**options, "config_kwargs": config})

    async def _walk(self, path: str, maxdepth: int | None = None, **options: Any) -> AsyncIterator[Any]:
        """Raise where a directory cannot be listed; fsspec would leave it out."""
        try:
            async for found in super()._walk(path, maxdepth=maxdepth, **{**options, "on_error": "raise"}):
                yield found
        except FileNotFoundError:
            return

    async def _head(self, location: str) -> Mapping[str, Any]:
        """Return what is known of an object, or raise a FileNotFoundError. A directory is none."""
        known: Mapping[str, Any] = await self._info(location)
        if known["type"] != "file":
            raise FileNotFoundError(location)
        return known

    head = sync_wrapper(_head)

    async def _get_range(self, location: str, start: int, stop: int, etag: str | None) -> tuple[bytes, Answer]:
        began = time.perf_counter()
        body = await self._request(location, start, stop, etag)
        answered = time.perf_counter()
        try:
            content = bytes(await body.read())
            return content, Answer(len(content), answered - began, time.perf_counter() - answered)
        finally:
            body.close()

    get_range = sync_wrapper(_get_range)

    async def _begin_range(self, location: str, start: int, stop: int, etag: str | None, part: int) -> S3Range:
        del part  # it receives as much as there is
        return S3Range(self.loop, await self._request(location, start, stop, etag))

    begin_range = sync_wrapper(_begin_range)

    async def _request(self, location: str, start: int, stop: int, etag: str | None) -> Any:
        """Request a range, of one version if there is an etag, and return the answer's body."""
        bucket, key, _ = self.split_path(location)
        match = {} if etag is None or getattr(self, "local_expiry_check", False) else {"IfMatch": f'"{etag}"'}
        response = await self._call_s3(
            "get_object", self.req_kw, Bucket=bucket, Key=key, Range=f"bytes={start}-{stop - 1}", **match
        )
        try:
            _require_same(response, start, stop, etag)
        except BaseException:
            response["Body"].close()
            raise
        return response["Body"]


class S3Range:
    """A range of an object that is received in parts.

    Attributes:
        close: Receives nothing more. It is called when nothing refers to the range, too.
    """

    def __init__(self, loop: Any, body: Any) -> None:
        self.loop = loop  # by this name fsspec finds it
        self._body = body
        self.close = weakref.finalize(self, loop.call_soon_threadsafe, body.close)
        self.close.atexit = False

    def read_into(self, memory: memoryview, seconds: float) -> int:
        """Fill memory with the next bytes, and return how many came; fewer only if the answer ends before them.

        Raises:
            TimeoutError: If they take longer.
        """
        size: int = within(seconds, self._read_all, memory)
        return size

    async def _read(self, memory: memoryview) -> int:
        size = len(memory)
        while memory and (part := await self._body.read(len(memory))):
            memory[: len(part)] = part
            memory = memory[len(part) :]
        return size - len(memory)

    _read_all = sync_wrapper(_read)


def _require_same(response: Mapping[str, Any], start: int, stop: int, etag: str | None) -> None:
    """Raise if an answer is of another version or another range than was requested."""
    require_same_version(etag, str(response.get("ETag", "")).strip('"'))
    content_range = str(response.get("ContentRange", ""))
    if content_range and not content_range.startswith(f"bytes {start}-{stop - 1}/"):
        raise OSError(f"{content_range!r} came back for bytes {start} to {stop - 1}")
    if not content_range and response.get("ContentLength") != stop - start:  # a server may ignore what is requested
        raise OSError(f"an answer that names no range came back for bytes {start} to {stop - 1}")
