"""Paths and URLs: which filesystem they are on, what reads it, and what it calls each of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, Literal, TypeAlias

import fsspec
from fsspec.implementations.cached import CachingFileSystem

from torch_dataloader_utils.storage.obstore import s3 as obstore_s3
from torch_dataloader_utils.storage.obstore.options import options_of
from torch_dataloader_utils.storage.redaction import Redactor

Client: TypeAlias = Literal["s3fs", "obstore", "obstore in other processes"]
"""What reads objects of S3: see `filesystem.Storage.for_urls`."""

S3_MODULE = "torch_dataloader_utils.storage.s3"
S3_MODULES = {S3_MODULE, obstore_s3.__name__}


def filesystem_of(urls: Sequence[str], options: Mapping[str, Any], redactor: Redactor) -> tuple[Any, list[str]]:
    """Return the filesystem that some paths or URLs are on, without retries of its own, and their locations in it.

    Raises:
        ValueError: If they are on several storages.
    """
    first: Any = None
    locations = []
    for url in urls:
        with redactor.errors(partial(str, url), ValueError, ImportError):
            # A filesystem may log in as it is made. The log of a table must not choose where to.
            fs, location = _locate(url, options) if _may_share(url, urls[0], options) else (None, "")
        if first is None:
            first = fs
        if fs is None:
            msg = f"{redactor.clean(url)} and {redactor.clean(urls[0])} are on two storages: a dataset has only one"
            raise ValueError(msg)
        locations.append(location)
    return _without_retries(first), locations


def obstore_of(
    urls: Sequence[str], options: Mapping[str, Any], timeout_sec: float, client: Client
) -> obstore_s3.ObstoreS3 | None:
    """Return what reads some URLs by obstore, with options of s3fs; None where s3fs has to read them everywhere."""
    mapped = options_of(urls, options)
    if mapped is None:
        return None
    obstore = obstore_s3.ObstoreS3(mapped, options, timeout_sec / 2)  # an attempt has half of the time
    if client == "obstore":
        return obstore.for_this_process()
    return replace(obstore, runs_in="another process" if obstore_s3.is_installed() else None)


def is_s3(fs: Any) -> bool:
    """Whether a filesystem is one of ours that read S3."""
    return type(fs).__module__ in S3_MODULES


def _may_share(url: str, other: str, options: Mapping[str, Any]) -> bool:
    """Whether two URLs have the same protocols, and the same host, archive or root where a storage belongs to one."""

    def storages_of(url: str) -> Iterator[tuple[Any, dict[str, Any], str]]:
        is_fixed = False
        for fs_class, link in _links(url):
            kwargs = {**fs_class._get_kwargs_from_urls(link), **options}  # noqa: SLF001 - as fsspec.core does it
            yield fs_class, kwargs, fs_class._strip_protocol(link) if is_fixed else ""  # noqa: SLF001 - the same
            # What follows an archive or a root is where that is. What follows a cache is what the cache is asked for.
            is_fixed = is_fixed or not issubclass(fs_class, CachingFileSystem)

    return list(storages_of(url)) == list(storages_of(other))


def _links(url: str) -> Iterator[tuple[Any, str]]:
    """Yield the links of a URL, which may be chained, each with the class of its filesystem."""
    is_plain, protocols = _is_plain_path(url), {*fsspec.available_protocols(), *fsspec.registry}
    for link in [url] if is_plain else url.split("::"):
        protocol, mark, _ = link.partition("://")
        is_path = not mark and (is_plain or link not in protocols)
        yield fsspec.get_filesystem_class("file" if is_path else protocol), link


def _is_plain_path(url: str) -> bool:
    """Whether it is a path, in which two colons are a part of a name."""
    protocol, mark, _ = url.partition("::")
    return "://" not in url and (not mark or protocol not in fsspec.available_protocols())


def _locate(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return a URL's filesystem and location."""
    if _is_plain_path(url):
        fs = fsspec.filesystem("file", **options)
        return fs, str(fs._strip_protocol(url))  # noqa: SLF001 - fsspec's documented way to a path
    fs, location = fsspec.core.url_to_fs(url, **options)
    return fs, str(location)


def _without_retries(fs: Any) -> Any:
    """Return s3fs without its own retries; another filesystem as it is."""
    if f"{type(fs).__module__}.{type(fs).__qualname__}" == "s3fs.core.S3FileSystem":
        return import_module(S3_MODULE).OneAttemptS3.of(fs)  # where s3fs is imported anyway
    return fs
