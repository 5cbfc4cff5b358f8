"""Random numbers that a `collate_fn` draws: the same for the same batch, in an uninterrupted run and a resumed one."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from torch_dataloader_utils.planning.assignment import Assignment, Receipt

__all__ = ["Seeding"]


class Seeding:
    """Seeds Python's, NumPy's and torch's global generators for each batch that a process makes.

    A batch is known by its last row (the shard, and which of its delivered rows), which a resume does not change, and
    which no other batch of an epoch has. Its seeds are a keyed blake2b of that, the seed, the epoch, the rank and the
    worker.

    Args:
        seed: The shuffle seed.
        rank: The rank.
        assignment: What the process reads.
        keeps: Whether generators are put back after each batch: in the training process they are the training's own.
    """

    def __init__(self, seed: int, rank: int, assignment: Assignment, *, keeps: bool) -> None:
        text = f"collate|{seed}|{assignment.epoch}|{rank}|{assignment.worker}"
        self._key = hashlib.blake2b(text.encode(), digest_size=32).digest()
        self._pieces = {
            stream_assignment.stream: stream_assignment.slices for stream_assignment in assignment.stream_assignments
        }
        self._shards: dict[tuple[int, int], bytes] = {}  # many batches end in one
        self._own = np.random.MT19937() if keeps else None

    @contextmanager
    def of(self, receipt: Receipt) -> Iterator[None]:
        """Make the generators those of a batch, known by its receipt."""
        before = None if self._own is None else _put_in(self._own)
        position, row = receipt.last
        place = b"%s|%d" % (self._shard(receipt.stream, position), row)
        digest = hashlib.blake2b(place, key=self._key, digest_size=24).digest()
        random.seed(int.from_bytes(digest[:8], "little"))
        np.random.seed(np.frombuffer(digest[8:16], np.uint32))  # noqa: NPY002 - whatever generator is in use
        torch.default_generator.manual_seed(int.from_bytes(digest[16:], "little"))
        try:
            yield
        finally:
            if before is not None:
                _put_back(*before)

    def _shard(self, stream: int, position: int) -> bytes:
        """Return what stands for the shard of a shard_slice."""
        if (stream, position) not in self._shards:
            content = self._pieces[stream][position].shard.content()
            self._shards[stream, position] = hashlib.blake2b(content, digest_size=16).digest()
        return self._shards[stream, position]


def _put_in(own: np.random.BitGenerator) -> tuple[Any, np.random.BitGenerator, torch.Tensor]:
    """Return the generators as they are; NumPy's is exchanged for another, for its state takes long to copy."""
    numpys = np.random.get_bit_generator()  # type: ignore[attr-defined]  # NumPy's stubs leave it out
    np.random.set_bit_generator(own)  # type: ignore[attr-defined]  # NumPy's stubs leave it out
    return random.getstate(), numpys, torch.default_generator.get_state()


def _put_back(pythons: Any, numpys: np.random.BitGenerator, torchs: torch.Tensor) -> None:
    random.setstate(pythons)
    np.random.set_bit_generator(numpys)  # type: ignore[attr-defined]  # NumPy's stubs leave it out
    torch.default_generator.set_state(torchs)
