"""The run log: a directory with one file for each segment of a run, on any storage.

Object stores cannot append, so each segment is a file of its own, which is never written again. Its name begins with a
number that is higher than those which were there, and ends with a random part: neither clocks nor hosts matter.
"""

from __future__ import annotations

import json
import logging
import os
import posixpath
import re
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_dataloader_utils.checkpoint.epoch_record import EpochRecord
from torch_dataloader_utils.checkpoint.progress import Progress
from torch_dataloader_utils.checkpoint.run import Run
from torch_dataloader_utils.checkpoint.run_segments import (
    Began,
    Beginning,
    Loaded,
    Reached,
    Recorded,
    RunSegment,
    dump_segment,
    in_order,
    parse_segment,
    segment_of,
)
from torch_dataloader_utils.loader.iteration import Iteration
from torch_dataloader_utils.storage.atomic_write import write_atomically
from torch_dataloader_utils.storage.attempts import DEFAULT_TIMEOUT_SEC
from torch_dataloader_utils.storage.filesystem import Storage

LOG = logging.getLogger("torch_dataloader_utils")

NAME = re.compile(r"segment-(\d{8,})-[0-9a-f]{16}\.json")

READERS = 16
"""How many files are read at the same time."""


@dataclass(frozen=True, slots=True)
class RunLog:
    """What `run_log` of `create_dataloader` has recorded: which plan delivered which steps.

    Attributes:
        url: The directory.
        segments: The segments, oldest first, each with where it ends.
    """

    url: str
    segments: tuple[RunSegment, ...]

    @classmethod
    def read(cls, url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> RunLog:
        """Read a log.

        Args:
            url: Its directory, as a path or as a URL of any storage that fsspec opens.
            storage_options: fsspec's options for the storage, such as credentials.

        Returns:
            The log. It has no segments where the directory has none, or does not exist.

        Raises:
            UnreadableFileError: If a file cannot be read.
            ValueError: If a file is damaged or foreign, or two runs wrote into the directory at the same time.
        """
        files = RunLogFiles.at(url, storage_options)
        return cls(files.url, files.segments())

    def segment_of(self, epoch: int, step: int, rank: int = 0) -> RunSegment | None:
        """Return the segment in which a step of a rank counts; None where the log does not tell.

        Of an epoch that was delivered several times, that is its last pass.
        """
        return segment_of(self.segments, epoch, step, rank)


@dataclass(frozen=True)
class RunLogFiles:
    """The directory of a log. Errors name files, and hold no secret."""

    storage: Storage = field(repr=False)
    location: str = field(repr=False)

    @classmethod
    def at(
        cls,
        url: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None,
        timeout_sec: float = DEFAULT_TIMEOUT_SEC,
    ) -> RunLogFiles:
        """Return the directory at a URL. Nothing is accessed."""
        storage, [location] = Storage.for_urls([os.fspath(url)], storage_options, timeout_sec=timeout_sec)
        return cls(storage, location.rstrip("/"))

    @property
    def url(self) -> str:
        """The directory, for messages."""
        return self.storage.display(self.location)

    def segments(self) -> tuple[RunSegment, ...]:
        """Return all segments: see `RunLog`."""
        names = self._names()
        with ThreadPoolExecutor(max_workers=min(READERS, max(1, len(names)))) as readers:
            found = list(readers.map(self._read, names))
        try:
            return in_order(one for one in found if one is not None)
        except ValueError as error:
            raise ValueError(f"{self.url}: {error}") from None

    def append(self, dump: Callable[[int], dict[str, Any]]) -> int:
        """Write a segment into a new file, given what returns its content by its number; return the number."""
        number = max((_number(name) for name in self._names()), default=0) + 1
        location = f"{self.location}/segment-{number:08d}-{secrets.token_hex(8)}.json"
        content = json.dumps(dump(number)).encode()
        if self.storage.is_local:
            write_atomically(Path(location), content)
        else:
            with self.storage.errors(location):
                self.storage.call("pipe_file", location, content)
        return number

    def _names(self) -> list[str]:
        with self.storage.errors(self.location):
            self.storage.forget_listings()
            try:
                found = self.storage.call("ls", self.location, detail=False)
            except FileNotFoundError:
                return []
        return sorted(filter(NAME.fullmatch, (posixpath.basename(name.rstrip("/")) for name in found)))

    def _read(self, name: str) -> Recorded | None:
        """Return a segment, or None if its file is not whole: then it was not written before its first batch."""
        location = f"{self.location}/{name}"
        with self.storage.errors(location):
            content = bytes(self.storage.call("cat_file", location))
        try:
            raw = json.loads(content)
        except RecursionError:
            raise ValueError(f"{self.storage.display(location)} is nested too deeply") from None
        except ValueError:
            LOG.warning("%s is cut short: its run ended before the first step of it", self.storage.display(location))
            return None
        try:
            recorded = parse_segment(raw, name)
            if recorded.segment.number != _number(name):
                raise ValueError(f"it is segment {recorded.segment.number}")  # noqa: TRY301 - named below, as the others
        except ValueError as error:
            raise ValueError(f"{self.storage.display(location)} is damaged or foreign: {error}") from None
        return recorded


class RunLogWriter:
    """Writes the segments that this process begins into a log."""

    def __init__(self, files: RunLogFiles) -> None:
        self._files = files
        self._process = secrets.token_hex(8)
        self._number = 0
        self._iteration: Iteration | None = None  # that of the segment which was written last

    def write(
        self, run: Run, epoch: int, progress: Progress, record: EpochRecord, *, began: Began, loaded: Loaded | None
    ) -> None:
        """Write a segment that begins at some progress of an epoch.

        Raises:
            OSError: If it cannot be written, or the directory cannot be listed; the message names it.
        """
        reached, before = None, self._iteration
        if before is not None:
            reached = Reached(self._number, before.progress.batches_delivered, not before.progress.rows_left)
        beginning = Beginning(began, loaded, reached)

        def dump(number: int) -> dict[str, Any]:
            return dump_segment(run, epoch, progress, beginning, record, number=number, process=self._process)

        self._number, self._iteration = self._files.append(dump), None

    def follow(self, iteration: Iteration) -> None:
        """Note which iteration delivers the segment that was written last."""
        self._iteration = iteration

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the iteration, which is of this process: a copy in another one names another process."""
        return {**self.__dict__, "_process": secrets.token_hex(8), "_iteration": None}


def _number(name: str) -> int:
    return int(name.split("-")[1])
