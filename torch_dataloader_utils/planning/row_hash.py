"""A hash of a sequence of rows, which is combined from the hashes of its parts. Pure.

A row has a mark: 64 bits that stand for its file's content and its number in the file. The hash of rows with the marks
``x[0], ..., x[n-1]`` is the polynomial ``x[0] * m**(n-1) + ... + x[n-1]`` modulo a prime (Karp and Rabin, "Efficient
randomized pattern-matching algorithms", 1987), four times, with four primes below 2**32. So the hash of two sequences,
one after the other, follows from their hashes and lengths, and it does not matter where a sequence is cut into batches.

Everything is arithmetic of integers, so that the hash is the same on every machine and in every NumPy release.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from torch_dataloader_utils.planning.manifest import DataFile

Marks: TypeAlias = npt.NDArray[np.uint64]

PRIMES = (4294967291, 4294967279, 4294967231, 4294967197)
"""The largest primes below 2**32."""

MULTIPLIERS = (3390340624, 4078138343, 4020214184, 2491888571)
"""The multiplier for each prime: the outputs of SplitMix64 from the seed 0, each reduced by its prime, without those
that are no primitive root of it. So the powers of a multiplier repeat only after ``prime - 1`` rows."""

GAMMA, FIRST_FACTOR, SECOND_FACTOR = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""The constants of SplitMix64."""

LANE = 32
"""Bits of each of the four hashes."""

BLOCK = 4096
"""Rows whose terms are added before they are reduced: 4096 products of 32 and 16 bits are less than 2**64."""

HALF = np.uint64(16)
LOW_HALF = np.uint64(0xFFFF)
LOW_WORD = np.uint64(0xFFFFFFFF)


class RowHash(NamedTuple):
    """The hash of a sequence of rows.

    Attributes:
        rows: The number of rows.
        lanes: The hash by each of the primes.
    """

    rows: int
    lanes: tuple[int, ...]

    def __add__(self, following: RowHash) -> RowHash:  # type: ignore[override] # not the sum of two tuples
        """Return the hash of these rows and, after them, the following ones."""
        shifts = _shifts(following.rows)
        parts = zip(self.lanes, shifts, following.lanes, PRIMES, strict=True)
        return RowHash(self.rows + following.rows, tuple((h * shift + g) % p for h, shift, g, p in parts))

    @property
    def digest(self) -> str:
        """The hash as 32 hexadecimal characters."""
        return "".join(f"{lane:08x}" for lane in self.lanes)

    @classmethod
    def of_digest(cls, rows: int, digest: str) -> RowHash | None:
        """Return the hash whose digest this is, or None if none has it."""
        try:
            value = int(digest, 16)
        except ValueError:
            return None
        lanes = tuple(value >> shift & (1 << LANE) - 1 for shift in range(3 * LANE, -1, -LANE))
        found = cls(rows, lanes)
        is_reduced = all(lane < prime for lane, prime in zip(lanes, PRIMES, strict=True))
        return found if is_reduced and found.digest == digest else None


RankHashes: TypeAlias = tuple[tuple[int, RowHash], ...]
"""Planned ranks, each with the hash of the rows that it has delivered."""

NO_ROWS = RowHash(0, (0,) * len(PRIMES))


def file_key(file: DataFile) -> int:
    """Return the 64 bits that stand for a file's content in the marks of its rows.

    They are the BLAKE2b digest of its size and its digest, so that a file may be moved or renamed.
    """
    return int.from_bytes(hashlib.blake2b(f"{file.size}:{file.digest}".encode(), digest_size=8).digest(), "little")


def row_marks(key: int, first: int, count: int) -> Marks:
    """Return the marks of consecutive rows of a file, from the row with the number `first` on.

    Row r has the output number r of SplitMix64, counted from 0, with the file's key as its seed (Steele, Lea and Flood,
    "Fast splittable pseudorandom number generators", 2014).
    """
    marks = np.arange(first + 1, first + count + 1, dtype=np.uint64)
    marks *= np.uint64(GAMMA)
    marks += np.uint64(key)
    marks ^= marks >> np.uint64(30)
    marks *= np.uint64(FIRST_FACTOR)
    marks ^= marks >> np.uint64(27)
    marks *= np.uint64(SECOND_FACTOR)
    marks ^= marks >> np.uint64(31)
    return marks


def hash_batches(marks: Marks, sizes: Sequence[int]) -> list[RowHash]:
    """Return the hash of each of several consecutive batches of these sizes, which use up all marks."""
    if not sizes:
        return []
    size = sizes[0]
    if 0 < size <= BLOCK and all(other == size for other in sizes):
        return _hash_blocks(marks.reshape(-1, size))
    ends = np.cumsum(sizes).tolist()
    return [_hash_long(marks[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def _hash_long(marks: Marks) -> RowHash:
    """Return the hash of a batch of any size."""
    head = len(marks) % BLOCK
    blocks = _hash_blocks(marks[:head].reshape(1, -1)) if head else []
    blocks += _hash_blocks(marks[head:].reshape(-1, BLOCK))
    return sum(blocks, NO_ROWS)


def _hash_blocks(blocks: Marks) -> list[RowHash]:
    """Return the hash of each row of a matrix of at most `BLOCK` columns."""
    size = blocks.shape[1]
    powers = _powers()[:, BLOCK - size :]
    lanes = len(PRIMES)
    primes = np.array(PRIMES, dtype=np.uint64)
    total = np.zeros((len(blocks), lanes), dtype=np.uint64)
    for word in (blocks >> np.uint64(LANE), blocks & LOW_WORD):
        sums = np.einsum("ij,kj->ik", word, powers) % np.concatenate([primes, primes])
        high, low = sums[:, :lanes], sums[:, lanes:]
        of_word = ((high << HALF) + low) % primes
        total = ((total << np.uint64(LANE)) + of_word) % primes
    return [RowHash(size, tuple(row)) for row in total.tolist()]


@cache
def _powers() -> Marks:
    """Return the powers of the multipliers with falling exponents, down to 0.

    There is a row for each prime with the powers' upper halves, then one for each with their lower halves.
    """
    rows = []
    for multiplier, prime in zip(MULTIPLIERS, PRIMES, strict=True):
        powers = np.ones(1, dtype=np.uint64)
        while len(powers) < BLOCK:
            step = np.uint64(pow(multiplier, len(powers), prime))
            powers = np.concatenate([powers * step % np.uint64(prime), powers])
        rows.append(powers)
    falling = np.stack(rows)
    return np.concatenate([falling >> HALF, falling & LOW_HALF])


@lru_cache(maxsize=1024)
def _shifts(rows: int) -> tuple[int, ...]:
    """Return by what a hash is multiplied when so many rows follow: few numbers are needed again and again."""
    return tuple(pow(multiplier, rows, prime) for multiplier, prime in zip(MULTIPLIERS, PRIMES, strict=True))
