"""Blocks of shared memory in which batches travel from a worker to the training process, used again and again.

A block is free or belongs to one process:

1. The worker acquires a free block, fills it and sends its number in a message. Then it leaves the block alone.
2. The training process holds the block from the moment it unpacks the message until the last tensor or array that
   views the memory is garbage-collected. Then the block is free.
3. An iteration that is abandoned leaves blocks that are never unpacked. They are freed before the worker gets its next
   assignment.

So no lock between processes is needed: a byte for each block says whether it is in use.

The memory is anonymous (``memfd_create``): it appears in no file system, does not count against the size of
``/dev/shm``, and is gone with the last process that has it, however that process ends.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import threading
import weakref
from multiprocessing import reduction
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
"""Memory as an array of bytes."""

FLAGS_BYTES = mmap.ALLOCATIONGRANULARITY
"""The memory begins with one byte for each block: whether it is in use. Mappings start at multiples of this size."""

SPACING = 1 << 36
"""Bytes from the start of one block to the start of the next. No block is as large; unused pages cost nothing."""

MAX_BLOCKS = 64
"""If no block is free, a message takes its bytes along."""

BLOCK_GROWTH = 1 << 20
"""Blocks grow by multiples of this many bytes, since each growth maps the block once more."""

_keys = itertools.count()

_pools: weakref.WeakValueDictionary[int, SharedMemoryPool] = weakref.WeakValueDictionary()
"""The pools of this process by their keys, which messages carry in place of the pools themselves."""


class SharedPage:
    """A page of anonymous memory that a process shares with those that it starts. Nothing of it is in `/dev/shm`.

    Attributes:
        memory: The page, whose bytes are 0 at first.
    """

    def __init__(self, fd: int | None = None) -> None:
        if fd is None:
            fd = _new_memory(FLAGS_BYTES)
        self._fd = fd
        self.memory = mmap.mmap(fd, FLAGS_BYTES)
        weakref.finalize(self, os.close, fd).atexit = False

    @classmethod
    def if_possible(cls) -> SharedPage | None:
        """Return a page, or None if the system has or grants no such memory."""
        if not hasattr(os, "memfd_create"):  # Linux has it
            return None
        try:
            return cls()
        except OSError:  # a limit on the size of files, or a sandbox
            return None

    @property
    def integers(self) -> memoryview:
        """The page as integers of 64 bits."""
        return memoryview(self.memory).cast("q")

    def write_text(self, text: str) -> None:
        """Write a text, cut to the size of the page, over the one before."""
        content = text.encode()[: FLAGS_BYTES - 2]
        self.memory[: 2 + len(content)] = len(content).to_bytes(2, "little") + content

    def read_text(self) -> str:
        """Return the text that was written last, also by a process that was killed within the writing."""
        size = int.from_bytes(self.memory[:2], "little")
        return self.memory[2 : 2 + size].decode(errors="replace")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_page, (reduction.DupFd(self._fd),)


def _rebuild_page(fd: Any) -> SharedPage:
    return SharedPage(fd.detach())


class SharedMemoryPool:
    """The blocks of one worker. It is made in the training process, before the worker starts.

    Args:
        count: Number of blocks.
        copied: In the worker, the memory's file descriptor and the pool's key.
    """

    def __init__(self, count: int, copied: tuple[int, int] | None = None) -> None:
        self._count = count
        self._fd, self.key = copied or (_new_memory(FLAGS_BYTES + count * SPACING), next(_keys))
        self._flags = mmap.mmap(self._fd, FLAGS_BYTES)
        self._maps: dict[int, mmap.mmap] = {}
        self._held: set[int] = set()
        self._acquired: set[int] = set()
        # Reentrant: batches are garbage-collected in any thread, also in one that has the lock at that moment.
        self._lock = threading.RLock()
        self.close = weakref.finalize(self, os.close, self._fd)
        if copied is None:
            _pools[self.key] = self

    @classmethod
    def if_possible(cls, count: int) -> SharedMemoryPool | None:
        """Return a pool of at most `MAX_BLOCKS` blocks, or None if the system has or grants no such memory."""
        if not hasattr(os, "memfd_create"):  # Linux has it
            return None
        try:
            return cls(min(count, MAX_BLOCKS))
        except OSError:  # a limit on the size of files, or a sandbox
            return None

    @property
    def num_held(self) -> int:
        """Number of blocks that the training process holds."""
        return len(self._held)

    @staticmethod
    def by_key(key: int) -> SharedMemoryPool:
        """Return a pool of this process by its key; a KeyError if its loader is gone."""
        return _pools[key]

    def acquire(self) -> int | None:
        """Mark a free block as in use, in the worker, and return its number; None if no block is free."""
        for block in range(self._count):
            if not self._flags[block]:
                self._flags[block] = 1
                self._acquired.add(block)
                return block
        return None

    def release_unused(self) -> None:
        """Return the memory of free blocks that were not acquired since the last call, in the worker, to the system.

        How many blocks are in use at once depends on who waits for whom. So an epoch may need more of them than others.
        """
        for block in set(self._maps) - self._acquired:
            if not self._flags[block]:
                with contextlib.suppress(OSError):  # a sandbox may not have it
                    self._maps[block].madvise(mmap.MADV_REMOVE)
                    del self._maps[block]
        self._acquired.clear()

    def memory(self, block: int, size: int) -> Bytes:
        """Return a block's first bytes, in either process."""
        mapped = self._maps.get(block)
        if mapped is None or len(mapped) < size:
            length = -(-max(size, 1) // BLOCK_GROWTH) * BLOCK_GROWTH
            try:
                mapped = self._maps[block] = mmap.mmap(self._fd, length, offset=FLAGS_BYTES + block * SPACING)
            except OSError as error:
                msg = f"there is no memory for the {length:,} bytes of a block, in which workers send batches "
                raise OSError(error.errno, f"{msg}({error.strerror}): use fewer workers or smaller batches") from error
        return np.frombuffer(mapped, np.uint8, size)

    def hold(self, block: int, size: int) -> Bytes:
        """Return a block's first bytes, in the training process; the block is free once no view of them is left."""
        memory = self.memory(block, size)
        with self._lock:
            self._held.add(block)
        # Views keep this array alive. Not at exit: no worker is left then that could use the block.
        weakref.finalize(memory, _free, self._flags, self._held, self._lock, block, os.getpid()).atexit = False
        return memory

    def free_unheld(self) -> None:
        """Free the blocks of messages that were never unpacked, while the worker acquires none."""
        with self._lock:
            for block in range(self._count):
                if block not in self._held:
                    self._flags[block] = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._count, reduction.DupFd(self._fd), self.key)


def _free(flags: mmap.mmap, held: set[int], lock: Any, block: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked process drops copies of batches, while the originals are still in use
        with lock:  # or free_unheld may free the block in between, and this once more, after the worker acquired it
            held.discard(block)
            flags[block] = 0


def _new_memory(size: int) -> int:
    fd = os.memfd_create("torch_dataloader_utils", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        raise
    return fd


def _rebuild(count: int, fd: Any, key: int) -> SharedMemoryPool:
    return SharedMemoryPool(count, (fd.detach(), key))
