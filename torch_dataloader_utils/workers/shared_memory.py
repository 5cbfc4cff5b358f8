"""SharedMemoryPool of shared memory that a worker fills and the training process reads, used again and again.

They are anonymous (``memfd_create``): they appear in no file system, do not count against the size of ``/dev/shm``,
and are gone with the last process that has them, however it ends.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import weakref
from multiprocessing import reduction
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Bytes", "SharedMemoryPool"]


Bytes = npt.NDArray[np.uint8]
"""Memory as an array of bytes."""


FLAGS_BYTES = mmap.ALLOCATIONGRANULARITY
"""The beginning of the memory says of each block whether it is in use, a byte each."""


SPACING = 1 << 36
"""Bytes from the beginning of one block to that of the next: none is as large, and what is not used takes no memory."""


MOST_BLOCKS = 64
"""What does not find a free block travels as bytes."""


GROWTH = 1 << 20
"""SharedMemoryPool grow by multiples of this many bytes."""


_keys = itertools.count()


_by_key: weakref.WeakValueDictionary[int, SharedMemoryPool] = weakref.WeakValueDictionary()


class SharedMemoryPool:
    """The pool of one worker. Made in the training process, before the worker is started.

    The worker marks a block as used when it takes it, the training process as free when nothing there looks at it any
    more. No block is used by both at a time, so a byte each is enough to agree.

    Args:
        count: How many.
    """

    def __init__(self, count: int) -> None:
        fd = os.memfd_create("torch_dataloader_utils", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, FLAGS_BYTES + count * SPACING)
        except OSError:
            os.close(fd)
            raise
        self._prepare(count, fd, next(_keys))
        _by_key[self.key] = self

    @classmethod
    def if_possible(cls, count: int) -> SharedMemoryPool | None:
        """Return pool, at most `MOST_BLOCKS`; None where the system has or grants no such memory."""
        if not hasattr(os, "memfd_create"):  # Linux has it
            return None
        try:
            return cls(min(count, MOST_BLOCKS))
        except OSError:  # a limit on the size of files, or a sandbox
            return None

    def _prepare(self, count: int, fd: int, key: int) -> None:
        self._count, self._fd, self.key = count, fd, key
        self._flags = mmap.mmap(self._fd, FLAGS_BYTES)
        self._maps: dict[int, mmap.mmap] = {}
        self._held: set[int] = set()
        self._lock = threading.RLock()  # batches may die in any thread, and while this one has the lock
        self.close = weakref.finalize(self, os.close, self._fd)

    @property
    def held(self) -> int:
        """How many pool the training process looks at."""
        return len(self._held)

    @staticmethod
    def by_key(key: int) -> SharedMemoryPool:
        """Return the pool with a key, in the training process that made them; a KeyError if they are gone."""
        return _by_key[key]

    def take(self) -> int | None:
        """Take a block, in the worker, that nobody uses; None if there is none."""
        for block in range(self._count):
            if not self._flags[block]:
                self._flags[block] = 1
                return block
        return None

    def memory(self, block: int, size: int) -> Bytes:
        """Return a block's first bytes, in either process."""
        mapped = self._maps.get(block)
        if mapped is None or len(mapped) < size:
            length = -(-max(size, 1) // GROWTH) * GROWTH
            mapped = self._maps[block] = mmap.mmap(self._fd, length, offset=FLAGS_BYTES + block * SPACING)
        return np.frombuffer(mapped, np.uint8, size)

    def hold(self, block: int, size: int) -> Bytes:
        """Return a block's first bytes, in the training process; it is free when the last view of them has died."""
        memory = self.memory(block, size)
        with self._lock:
            self._held.add(block)
        weakref.finalize(memory, _free, self._flags, self._held, self._lock, block, os.getpid()).atexit = False
        return memory

    def free_all_but_held(self) -> None:
        """Free, while the worker takes none, the pool that were filled for nobody."""
        with self._lock:
            for block in range(self._count):
                if block not in self._held:
                    self._flags[block] = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self._count, reduction.DupFd(self._fd), self.key)


def _free(flags: mmap.mmap, held: set[int], lock: Any, block: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked copy of a batch says nothing of the batch itself
        with lock:  # or the block would be freed a second time, after the worker took it
            held.discard(block)
            flags[block] = 0


def _rebuilt(count: int, fd: Any, key: int) -> SharedMemoryPool:
    pool = SharedMemoryPool.__new__(SharedMemoryPool)
    pool._prepare(count, fd.detach(), key)  # noqa: SLF001 - what __init__ does, with memory that is there already
    return pool
