"""s3fs with one attempt at each request, and with ranges of one version of an object."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fsspec.asyn import sync_wrapper
from s3fs import S3FileSystem

from torch_dataloader_utils.storage.causes import require_same_version
from torch_dataloader_utils.storage.request_size import Answer


class OneAttemptS3(S3FileSystem):  # type: ignore[misc]
    """s3fs without its own retries: `attempts` makes them. A class of its own leaves the user's instances alone."""

    retries = 1

    @classmethod
    def of(cls, fs: S3FileSystem) -> OneAttemptS3:
        """Return a filesystem with the same options. botocore does not try again, unless the options say so."""
        options = dict(fs.storage_options)
        config = {"retries": {"max_attempts": 0}, **(options.get("config_kwargs") or {})}
        return cls(*fs.storage_args, **{**options, "config_kwargs": config})

    async def _walk(self, path: str, maxdepth: int | None = None, **options: Any) -> AsyncIterator[Any]:
        """Raise where a directory cannot be listed; fsspec would leave it out."""
        try:
            async for found in super()._walk(path, maxdepth=maxdepth, **{**options, "on_error": "raise"}):
                yield found
        except FileNotFoundError:
            return

    async def _get_range(self, location: str, start: int, stop: int, etag: str | None) -> tuple[bytes, Answer]:
        began = time.perf_counter()
        bucket, key, _ = self.split_path(location)
        match = {} if etag is None or getattr(self, "local_expiry_check", False) else {"IfMatch": f'"{etag}"'}
        response = await self._call_s3(
            "get_object", self.req_kw, Bucket=bucket, Key=key, Range=f"bytes={start}-{stop - 1}", **match
        )
        answered = time.perf_counter()
        try:
            _require_same(response, start, stop, etag)
            content = bytes(await response["Body"].read())
            return content, Answer(len(content), answered - began, time.perf_counter() - answered)
        finally:
            response["Body"].close()

    get_range = sync_wrapper(_get_range)


def _require_same(response: Mapping[str, Any], start: int, stop: int, etag: str | None) -> None:
    """Raise if an answer is of another version or another range than was requested."""
    require_same_version(etag, str(response.get("ETag", "")).strip('"'))
    content_range = str(response.get("ContentRange", ""))
    if content_range and not content_range.startswith(f"bytes {start}-{stop - 1}/"):
        raise OSError(f"{content_range!r} came back for bytes {start} to {stop - 1}")
