"""Lists files, directories in depth, and globs, on any storage, in one order."""

from __future__ import annotations

import fnmatch
import itertools
import os
import posixpath
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any

from fsspec.utils import glob_translate

from torch_dataloader_utils.errors import UnreadableFileError
from torch_dataloader_utils.storage.filesystem import Storage
from torch_dataloader_utils.storage.redaction import is_http, without_query
from torch_dataloader_utils.storage.stored_file import StoredFile, etag_of
from torch_dataloader_utils.storage.zip_archives import require_readable

GLOB = r"[*?\[]"
"""The characters that make a path a pattern."""

METADATA_NAME = "_metadata"
"""Name of the file that holds the footers of all files of a directory."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The files that were found, sorted, and the root of their paths, as messages and states show it.

    `metadata_file` is the file `_metadata`, if a single directory was listed and has one.
    """

    root: str
    files: tuple[StoredFile, ...]
    metadata_file: StoredFile | None = None


def list_files(
    storage: Storage, locations: Sequence[str], suffixes: Sequence[str], hint: Callable[[str], str] = lambda _: ""
) -> Listing:
    """List files, directories in depth, and globs.

    Hidden files, files whose names begin with an underscore, and files with other endings are left out, unless a file
    is named in full. Links to files and directories are followed.

    Args:
        storage: Where they are.
        locations: What to list, as the storage calls it.
        suffixes: Endings of the format's files, in lower case.
        hint: Given a file of another ending, returns how it may be opened, for the end of a message; or nothing.

    Raises:
        FileNotFoundError: If a location matches no file; the message says what was searched for.
        PermissionError: If a directory cannot be listed.
        ValueError: If a file is listed twice, also through a link, or a link leads back to a directory that holds it.
        UnreadableFileError: If a location is neither a regular file nor a directory, such as a pipe; or a file is in a
            zip archive that this Python reads wrongly.
    """
    storage.forget_listings()
    found_at = []
    for location in locations:
        with storage.errors(location, ValueError):
            found_at.append(_list_one(storage, location, suffixes, hint))
    only = found_at[0] if len(found_at) == 1 else None
    root = only.base if only else _common_directory(part.base for part in found_at)
    found = sorted((info for part in found_at for info in part.files), key=lambda info: str(info["name"]))
    _refuse_twice(storage, found)
    files = sorted((_stored(storage, info, root) for info in found), key=lambda file: file.path)
    require_readable(storage.fs, (file.location for file in files), storage.display)
    for one, other in itertools.pairwise(files):
        if one.path == other.path:
            names = f"{storage.display(one.location)!r} and {storage.display(other.location)!r}"
            raise ValueError(f"the files {names} differ in slashes alone, and cannot be told apart: rename one")
    metadata_file = _stored(storage, only.metadata_file, root) if only and only.metadata_file else None
    return Listing(_shown_root(storage, root), tuple(files), metadata_file)


def list_known(storage: Storage, sizes: Sequence[tuple[str, int]], root: str) -> Listing:
    """Return a listing of files that a table has listed with their sizes, without a request to their storage.

    Their root is their common directory; if there is no file, the given one.

    Raises:
        ValueError: If a file is listed twice.
    """
    base = _common_directory(posixpath.dirname(location) for location, _ in sizes) if sizes else root
    for (location, _), (other, _) in itertools.pairwise(sorted(sizes)):
        if location == other:
            raise ValueError(f"the file {storage.display(location)!r} is named twice")
    found = (_stored(storage, {"name": location, "size": size}, base) for location, size in sizes)
    files = sorted(found, key=lambda file: file.path)
    return Listing(_shown_root(storage, base), tuple(files))


@dataclass(frozen=True, slots=True)
class _Found:
    """What is at a location: its root, the files, and the `_metadata` file if it is a directory that has one."""

    base: str
    files: Sequence[Mapping[str, Any]]
    metadata_file: Mapping[str, Any] | None = None


def _list_one(storage: Storage, location: str, suffixes: Sequence[str], hint: Callable[[str], str]) -> _Found:
    if storage.is_local:
        location = posixpath.normpath(location)  # so that a file has a single name
    finder = _LocalFinder(storage) if storage.is_local else _Finder(storage)
    info, below = _info_and_below(storage, location, suffixes)
    if info and info["type"] == "file":
        return _Found(posixpath.dirname(location), [info])
    if info and storage.is_local and info["type"] != "directory":
        raise UnreadableFileError(f"{storage.display(location)!r} is neither a regular file nor a directory")
    metadata_file = None
    if info:
        found, base = finder.directory(location) if below is None else finder.keep(below), location
        metadata_file = next((finder.info(path) for path in found if _relative(path, base) == METADATA_NAME), None)
    elif len(plain := re.split(r"[*\[]" if is_http(location) else GLOB, location, maxsplit=1)) > 1:
        found, base = finder.glob(location), posixpath.dirname(plain[0])
    else:
        raise FileNotFoundError(f"there is no file or directory {storage.display(location)!r}")
    wanted = [finder.info(path) for path in found if _is_data(_relative(path, base), suffixes)]
    if not wanted:
        example = next((path for path in found if hint(path)), next(iter(found), None))
        number = f"{len(found)} others, such as " if len(found) > 1 else ""
        others = f", only {number}{storage.display(example)!r}{hint(example)}" if example else ""
        raise FileNotFoundError(f"found no {' or '.join(suffixes)} file at {storage.display(location)!r}{others}")
    return _Found(base, wanted, metadata_file)


def _info_and_below(
    storage: Storage, location: str, suffixes: Sequence[str]
) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """Return what is known of a location, and what is below it if that came at the same time; None where nothing is.

    What is named like a file mostly is one, so its directory is not listed.
    """
    if not location.lower().endswith(tuple(suffixes)) and not re.search(GLOB, location):
        return storage.info_and_below(location)
    try:
        return storage.call("info", location), None
    except FileNotFoundError:
        return None, None


class _Finder:
    """Finds files by fsspec.

    fsspec's own `find` and `glob` leave out directories that cannot be listed, and files would be missing without a
    word. So directories are listed one by one, unless the filesystem brings a `find` of its own, as object stores do.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._infos: dict[str, Mapping[str, Any]] = {}

    def directory(self, location: str) -> list[str]:
        """Return the files below a directory, in depth."""
        if self._storage.finds:
            return self.keep(self._storage.call("find", location, detail=True))
        listed = {str(info["name"]): info for info in self._walk(location, None)}
        return self.keep({name: listed[name] for name in sorted(listed) if listed[name]["type"] != "directory"})

    def keep(self, found: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Keep what is said of files that were found, by their paths, and return these."""
        self._infos |= found
        return list(found)

    def glob(self, pattern: str) -> list[str]:
        """Return the files that a pattern matches, and those in directories that it matches."""
        if self._storage.finds:
            matches = self._storage.call("glob", pattern, detail=True).values()
        else:
            matches = self._globbed(pattern)
        for info in matches:
            if info["type"] == "directory":
                self.directory(info["name"])
            else:
                self._infos[str(info["name"])] = info
        return list(self._infos)

    def _globbed(self, pattern: str) -> list[Mapping[str, Any]]:
        """Return what a pattern matches, as fsspec's `glob` does."""
        wildcards = r"[*\[]" if is_http(pattern) else GLOB
        root = posixpath.dirname(re.split(wildcards, pattern, maxsplit=1)[0])
        depth = None if "**" in pattern else pattern[len(root) :].strip("/").count("/") + 1
        matching = re.compile(glob_translate(pattern))
        closed = "/" if pattern.endswith(("/", "/**")) else ""
        found = {str(info["name"]).rstrip("/"): info for info in self._walk(root, depth)}
        return [
            found[name]
            for name in sorted(found)
            if matching.match(name + closed if found[name]["type"] == "directory" else name)
        ]

    def _walk(self, directory: str, depth: int | None) -> Iterator[Mapping[str, Any]]:
        """Yield what is below a directory: files and directories, so many levels deep, or all if that is None."""
        for info in self._storage.call("ls", directory, detail=True):
            name = str(info["name"]).rstrip("/")
            if info["type"] != "directory":
                yield info
            elif name != directory.rstrip("/"):
                yield info
                if depth is None or depth > 1:
                    yield from self._walk(name, None if depth is None else depth - 1)

    def info(self, path: str) -> Mapping[str, Any]:
        """Return what the storage says of a file that was found."""
        return self._infos[path]


class _LocalFinder(_Finder):
    """Finds local files, also through links. fsspec would leave out linked and unreadable directories."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self._links: set[str] = set()

    def directory(self, location: str) -> list[str]:
        return list(self._matches(location, ["**"], ()))

    def glob(self, pattern: str) -> list[str]:
        plain = posixpath.dirname(re.split(GLOB, pattern, maxsplit=1)[0])
        return list(dict.fromkeys(self._matches(plain, pattern[len(plain) :].strip("/").split("/"), ())))

    def info(self, path: str) -> Mapping[str, Any]:
        status = os.stat(path)  # noqa: PTH116 - a tenth of the time, for each of many files
        return {"name": path, "size": status.st_size, "mtime": status.st_mtime, "islink": path in self._links}

    def _matches(self, directory: str, segments: list[str], above: tuple[str, ...]) -> Iterator[str]:
        """Yield the files that a pattern matches below a directory, and those in directories that it matches.

        `segments` are the rest of the pattern, split at slashes; ``**`` matches any number of directories. `above` are
        the real paths of the directories that led here.
        """
        real = os.path.realpath(directory)
        if real in above:
            raise ValueError(f"the link {directory!r} leads back to {real!r}, a directory that holds it")
        head, *rest = segments
        if head == "**" and rest:
            yield from self._matches(directory, rest, above)
        with os.scandir(directory) as entries:
            for entry in entries:
                if head != "**" and not _fits(entry.name, head):
                    continue
                if not entry.is_dir():
                    if entry.is_symlink():
                        self._links.add(entry.path)
                    yield from [] if rest else [entry.path]
                elif not _is_closed(entry.name) or entry.name == head:
                    below = segments if head == "**" else rest or ["**"]
                    yield from self._matches(entry.path, below, (*above, real))


def _fits(name: str, pattern: str) -> bool:
    """Whether a name matches a segment of a pattern; a wildcard does not match a leading dot."""
    return fnmatch.fnmatchcase(name, pattern) and (not name.startswith(".") or pattern.startswith("."))


def _refuse_twice(storage: Storage, found: Iterable[Mapping[str, Any]]) -> None:
    """Raise if a file is listed twice, by the same name or, through a link, by two names."""
    seen: dict[str, str] = {}
    real_directory = cache(os.path.realpath)
    is_local = storage.is_local
    for info in found:
        location = name = str(info["name"])
        if is_local and info["islink"]:
            name = os.path.realpath(location)
        elif is_local:
            directory, _, own_name = location.rpartition("/")
            name = f"{real_directory(directory or '/')}/{own_name}"
        if name in seen:
            one, other = storage.display(seen[name]), storage.display(location)
            also = "" if one == other else f", also as {one!r}"
            raise ValueError(f"the file {other!r} is named twice{also}")
        seen[name] = location


def _stored(storage: Storage, info: Mapping[str, Any], root: str) -> StoredFile:
    location = str(info["name"])
    if not location.isascii() and location != location.encode(errors="replace").decode():
        advice = "is not valid UTF-8: rename the file"
        if storage.is_local and (encoding := sys.getfilesystemencoding()) != "utf-8":
            advice = f"is not valid in this process' encoding of file names, {encoding}: set PYTHONUTF8=1, or rename it"
        raise UnreadableFileError(f"the file name {location!a} {advice}")
    size = info["size"]
    if size is None:
        raise UnreadableFileError(f"{storage.display(location)}: the storage does not say how large it is")
    modified = info.get("mtime") or info.get("LastModified") or info.get("last_modified")
    modified = modified.timestamp() if isinstance(modified, datetime) else modified
    modified = float(modified) if isinstance(modified, (int, float)) else None
    path = _relative(without_query(location) if is_http(location) else location, root)
    return StoredFile(path, location, int(size), etag_of(info), modified)


def _shown_root(storage: Storage, root: str) -> str:
    """Return the root as states and messages show it: without a slash at its end, unless it is the slash alone."""
    shown = storage.display(root or "/" if storage.is_local else root)
    bare = shown.rstrip("/")
    return shown if bare == "" or bare.endswith(":") else bare


def _is_closed(name: str) -> bool:
    """Whether a directory is not searched. Only the system may list lost+found, at the root of a disk."""
    return _is_hidden(name) or name == "lost+found"


def _is_hidden(name: str) -> bool:
    """Whether a name is left out; ``_date=1`` is a partition."""
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def _is_data(path: str, suffixes: Sequence[str]) -> bool:
    """Whether a listed path is data: it has no hidden part, and a known ending."""
    return not any(map(_is_hidden, path.split("/"))) and path.lower().endswith(tuple(suffixes))


def _common_directory(directories: Iterable[str]) -> str:
    """Return the directory that paths have in common; unlike os.path.commonpath, also of bucket/key."""
    segments = zip(*(directory.split("/") for directory in directories), strict=False)
    return "/".join(one[0] for one in itertools.takewhile(lambda one: len(set(one)) == 1, segments))


def _relative(location: str, root: str) -> str:
    return location.removeprefix(root).lstrip("/")
