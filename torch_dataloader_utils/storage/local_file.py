"""Local files that are open for reading: mapped into memory, or read by ranges; and which of the two is safe."""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from functools import cache
from typing import Any

import pyarrow as pa

LOCAL_FILESYSTEMS = {
    0xEF53: "ext2, ext3 or ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x794C7630: "overlayfs",
    0x2FC12FC1: "zfs",
    0xF2F52010: "f2fs",
    0xCA451A4E: "bcachefs",
    0x3153464A: "jfs",
    0x52654973: "reiserfs",
    0x73717368: "squashfs",
    0xE0F5E1E2: "erofs",
}
"""File systems whose bytes are on this machine, by the `f_type` that statfs(2) returns.

The numbers are those of that manual page and of Linux's `include/uapi/linux/magic.h`; of zfs, bcachefs and f2fs, which
are not all there, those of their own sources. All others count as remote: NFS, SMB, Lustre, Ceph, GPFS, BeeGFS, 9p, and
FUSE, whatever is behind it.
"""

StatFs = ctypes.c_char * 256
"""More than a `struct statfs` has on any machine; it begins with `f_type`."""


READ_ONLY = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
"""Flags to open a file for reading: its bytes as they are, also on Windows; a pipe in its place without waiting for a
writer. Python lets no child inherit it."""

LOCKED_BYTES = 1 << 24
"""Bytes of one read where reads need a lock."""

_position = threading.Lock()
"""Held while the position of an open file matters."""


def filesystem_type(path: str) -> int | None:
    """Return the number of the type of the file system that a file is on; None if the system does not tell.

    `os.statvfs` leaves it out. `/proc/self/mountinfo` has names instead of numbers, but by device numbers that files of
    btrfs and overlayfs do not have.
    """
    if sys.platform != "linux":
        return None
    content = StatFs()
    if _libc().statfs(os.fsencode(path), content) != 0:
        return None
    return int(ctypes.c_ulong.from_buffer(content).value & 0xFFFFFFFF)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def may_be_mapped(filesystem: int | None) -> bool:
    """Whether files of a file system, by its type's number, are mapped into memory. Pure (no I/O).

    A failed read of a mapped file kills the process by SIGBUS. On a network such reads fail now and then; those of a
    disk of this machine hardly do.
    """
    return filesystem in LOCAL_FILESYSTEMS


def size_of(path: str) -> int:
    """Return the size of a file, or raise an OSError if it is none: to open a pipe would wait for a writer."""
    status = os.stat(path)  # noqa: PTH116 - the path as fsspec takes it
    if not stat.S_ISREG(status.st_mode):
        raise OSError("this is no regular file any more")
    return status.st_size


class LocalFile(ABC):
    """An open local file, and whether it is still as it was when it was opened.

    Attributes:
        modified: Its modification time when it was opened: seconds since 1970, as in listings.
        size: Its size in bytes at that time.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.modified = os.stat(path).st_mtime  # noqa: PTH116 - as listings ask
        self._version = self._stat()
        self.size = self._version[0]

    @abstractmethod
    def ends_with(self, content: bytes) -> bool:
        """Whether these are its last bytes."""

    def require_unchanged(self) -> None:
        """Raise an OSError if the file was written since it was opened: what was read may be neither old nor new."""
        if self._stat() != self._version:
            raise OSError("the file was written while it was read")

    def will_need(self, start: int, stop: int) -> None:  # noqa: B027 - only maps are prepared
        """Prepare to decode a range."""

    def forget(self, start: int, stop: int) -> None:  # noqa: B027 - only maps hold what was read
        """Free the memory of a range."""

    def held_by_arrow(self) -> list[weakref.ref[Any]]:
        """Return the objects that Arrow's threads may still refer to once it is closed."""
        return []

    def _stat(self) -> tuple[int, int, int, int]:
        status = os.stat(self._path)  # noqa: PTH116 - of the path: a file that takes its place is a change, too
        return status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino


class RangedFile(LocalFile):
    """A local file of which ranges are read, by several threads. It is closed when nothing refers to it."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._number = os.open(path, READ_ONLY)
        weakref.finalize(self, os.close, self._number).atexit = False

    def ends_with(self, content: bytes) -> bool:
        """Whether these are its last bytes."""
        found = bytearray(len(content))
        read_into(self._number, self.size - len(content), found)
        return found == content

    def read(self, start: int, stop: int) -> pa.Buffer:
        """Read a range; an OSError where it comes back short, or the file was written since it was opened."""
        content = pa.allocate_buffer(stop - start)  # of Arrow's pool, whose memory is used again
        read_into(self._number, start, content)
        self.require_unchanged()
        return content


class MappedFile(LocalFile):
    """A local file that is mapped into memory.

    Reading a mapped file beyond its end kills the process. So its size is checked before every read; a file that
    shrinks during a read still kills the process.

    Attributes:
        file: It, for pyarrow.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        with open(path, "rb") as file:  # noqa: PTH123 - the path as fsspec and os.stat take it
            self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.file = pa.BufferReader(pa.py_buffer(self._mapped))

    def held_by_arrow(self) -> list[weakref.ref[Any]]:
        """Return the objects that Arrow's threads may still refer to once it is closed."""
        return [weakref.ref(self._mapped)]

    def ends_with(self, content: bytes) -> bool:
        """Whether these are its last bytes."""
        return self._mapped[self.size - len(content) : self.size] == content

    def will_need(self, start: int, stop: int) -> None:
        """Let the system read a range from disk, unless it is in memory."""
        self._advise("MADV_WILLNEED", start, stop)

    def forget(self, start: int, stop: int) -> None:
        """Release the pages of a range: as long as they are mapped they count as this process's memory."""
        self._advise("MADV_DONTNEED", start, stop)

    def _advise(self, advice: str, start: int, stop: int) -> None:
        first = start - start % mmap.PAGESIZE
        if stop > first and hasattr(mmap, advice):  # not on Windows
            self._mapped.madvise(getattr(mmap, advice), first, stop - first)


def read_local(location: str, start: int, stop: int) -> bytes:
    """Read a range of a local file at once; an OSError if the range comes back short."""
    number = os.open(location, READ_ONLY)
    try:
        content = os.pread(number, stop - start, start) if hasattr(os, "pread") else b""
        if len(content) == stop - start:
            return content
        rest = bytearray(stop - start)
        read_into(number, start, rest)
        return bytes(rest)
    finally:
        os.close(number)


def read_into(number: int, start: int, content: bytearray | pa.Buffer) -> None:
    """Fill memory with a range of an open file; an OSError if the range comes back short.

    One call returns at most some 2 GB (read(2)), and a network file system may return less than was asked for.
    """
    rest = memoryview(content).cast("B")
    stop = start + len(rest)
    while rest and (count := _read_at(number, rest, stop - len(rest))):
        rest = rest[count:]
    if rest:
        size = stop - start - len(rest)
        raise OSError(f"{size} bytes came back of bytes {start} to {stop}: the file was cut short")


def _read_at(number: int, memory: memoryview, start: int) -> int:
    """Fill the beginning of the memory with bytes of an open file, and return how many came."""
    if hasattr(os, "preadv"):
        return os.preadv(number, [memory], start)
    with _position:  # Windows and old releases of macOS read at the file's position, which threads share
        os.lseek(number, start, os.SEEK_SET)
        content = os.read(number, min(len(memory), LOCKED_BYTES))
    memory[: len(content)] = content
    return len(content)
