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


class Seeding:
    """Seeds the global generators of Python, NumPy and torch for each batch that a process makes.

    A batch is identified by its last row: the shard, and the row's number among those that the shard delivers. A resume
    does not change it, and no other batch of the epoch has it. The seeds are a blake2b hash of it, keyed with the seed,
    the epoch, the rank and the worker. `restores` says to restore the generators after each batch: in the training
    process training uses them, too.
    """

    def __init__(self, seed: int, rank: int, assignment: Assignment, *, restores: bool) -> None:
        key = f"collate|{seed}|{assignment.epoch}|{rank}|{assignment.worker}"
        self._key = hashlib.blake2b(key.encode(), digest_size=32).digest()
        self._slices = {stream.stream: stream.slices for stream in assignment.stream_assignments}
        self._shards: dict[tuple[int, int], bytes] = {}  # digests, since many batches end in the same shard
        self._generator = np.random.MT19937() if restores else None

    @contextmanager
    def of(self, receipt: Receipt) -> Iterator[None]:
        """Seed the generators for the batch that a receipt belongs to."""
        before = None if self._generator is None else _exchange(self._generator)
        position, row = receipt.last
        last_row = b"%s|%d" % (self._shard(receipt.stream, position), row)
        digest = hashlib.blake2b(last_row, key=self._key, digest_size=24).digest()
        random.seed(int.from_bytes(digest[:8], "little"))
        np.random.seed(np.frombuffer(digest[8:16], np.uint32))  # noqa: NPY002 - the global one, which users draw from
        torch.default_generator.manual_seed(int.from_bytes(digest[16:], "little"))
        try:
            yield
        finally:
            if before is not None:
                _restore(*before)

    def _shard(self, stream: int, position: int) -> bytes:
        """Return a digest of the shard's files and rows; a resume changes its position in the stream, but not this."""
        if (stream, position) not in self._shards:
            content = self._slices[stream][position].shard.content()
            self._shards[stream, position] = hashlib.blake2b(content, digest_size=16).digest()
        return self._shards[stream, position]


def _exchange(generator: np.random.BitGenerator) -> tuple[Any, np.random.BitGenerator, torch.Tensor]:
    """Return the state of all generators; NumPy's is exchanged for another one, since copying its state is slow."""
    numpys = np.random.get_bit_generator()  # type: ignore[attr-defined]  # NumPy's stubs leave it out
    np.random.set_bit_generator(generator)  # type: ignore[attr-defined]  # NumPy's stubs leave it out
    return random.getstate(), numpys, torch.default_generator.get_state()


def _restore(pythons: Any, numpys: np.random.BitGenerator, torchs: torch.Tensor) -> None:
    random.setstate(pythons)
    np.random.set_bit_generator(numpys)  # type: ignore[attr-defined]  # NumPy's stubs leave it out
    torch.default_generator.set_state(torchs)
