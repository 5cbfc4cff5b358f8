"""What `torch.distributed.checkpoint` writes to and reads from, and what it has to find there."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Generator, Iterable, Mapping
from typing import Any

from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as FsspecFiles
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torch_dataloader_utils.errors import shown
from torch_dataloader_utils.storage.causes import chain_of
from torch_dataloader_utils.storage.listing import GLOB
from torch_dataloader_utils.storage.urls import is_s3


class _Writer(FileSystemWriter):
    """Copies the state before it is written in a thread, as new releases of torch do.

    In old ones (2.4 was seen) a tensor on the CPU stays the model's own, which the training changes meanwhile.
    """

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy on the CPU."""
        self.per_thread_copy_ahead = 0  # as FileSystemWriter does: nothing is left to copy
        staged = _create_cpu_state_dict(state_dict)
        _copy_state_dict(state_dict, staged, type_check=False)
        return staged

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write files. A full disk is an error that says so, in place of the one of torch that came after it."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:  # torch's format could not write to the end of a file
            first = next((link for link in chain_of(error) if isinstance(link, OSError)), None)
            if first is None:
                raise
            raise first from None


def writer_of(fs: Any, location: str) -> FileSystemWriter:
    """Return what writes into a new directory: of a fsspec filesystem or, where it is None, of this machine.

    On this machine files are flushed to the disk. `FsspecWriter` itself flushes all disks where it cannot flush a file.
    """
    writer = _Writer(location, sync_files=fs is None)
    return writer if fs is None else _with(writer, fs, location)


def reader_of(fs: Any, location: str) -> FileSystemReader:
    """Return what reads from a directory, of a fsspec filesystem or of this machine."""
    reader = FileSystemReader(location)
    return reader if fs is None else _with(reader, fs, location)


class _FsspecFiles(FsspecFiles):
    """Opens files of a given filesystem; in old releases of torch (2.4 was seen) it opens those of a URL."""

    def __init__(self, fs: Any) -> None:
        super().__init__()
        self.fs: Any = fs

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        """Open a file."""
        with self.fs.open(os.fspath(path), mode) as stream:
            yield stream

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Make a directory. s3fs would also make a bucket, of a name that may be misspelled."""
        if is_s3(self.fs):
            self.fs.mkdir(os.fspath(path), create_parents=False)  # only looks for the bucket
        else:
            super().mkdir(path)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file. fsspec's `mv`, by which the base does it, takes some names for patterns."""
        if not re.search(GLOB, os.fspath(path)):
            super().rename(path, new_path)
            return
        try:
            self.fs.cp_file(os.fspath(path), os.fspath(new_path))
        except NotImplementedError:  # a filesystem that cannot copy renames by a `mv` of its own
            super().rename(path, new_path)
        else:
            self.fs.rm_file(os.fspath(path))


def _with(opened: Any, fs: Any, location: str) -> Any:
    """Do what `FsspecWriter` and `FsspecReader` do with a URL, and in old releases without options for its storage."""
    opened.fs, opened.path = _FsspecFiles(fs), location
    return opened


def sizes_of(metadata: Metadata) -> dict[str, int]:
    """Return the files that were written, with their sizes."""
    sizes: dict[str, int] = {}
    for written in (metadata.storage_data or {}).values():
        end = written.offset + written.length
        sizes[written.relative_path] = max(end, sizes.get(written.relative_path, 0))
    return sizes


class WholeParts(DefaultLoadPlanner):
    """Loads what is asked for, and raises a ValueError where the checkpoint holds more of a part than is asked for.

    `torch.distributed.checkpoint` leaves that out without a word, such as the layers that a smaller model lacks.

    Args:
        parts: The names of the parts that are asked for. The state of a part may have no names of its own, as of a
            counter that has counted nothing.
    """

    def __init__(self, parts: Iterable[str]) -> None:
        super().__init__()
        self._parts = frozenset(parts)

    def create_local_plan(self) -> LoadPlan:
        """Return this rank's plan, with the names that it asks for."""
        return dataclasses.replace(super().create_local_plan(), planner_data=set(self.state_dict))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Compare the names of all ranks with those of the checkpoint."""
        asked = set().union(*(plan.planner_data for plan in global_plan))
        saved: Mapping[str, Any] = self.metadata.state_dict_metadata if self.metadata else {}
        left = sorted(name for name in saved if name not in asked and name.partition(".")[0] in self._parts)
        if left:
            raise ValueError(f"it holds {shown(left)}, which there is nothing to load into")
        return super().create_global_plan(global_plan)
