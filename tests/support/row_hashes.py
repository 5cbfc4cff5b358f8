"""The hash of delivered rows, computed from its definition, one row at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from torch_dataloader_utils.planning.row_hash import MULTIPLIERS, PRIMES, RowHash

WORD = 2**64


def splitmix64(seed: int, number: int) -> int:
    """Return an output of SplitMix64, counted from 0, as its authors' C code computes it."""
    mixed = (seed + (number + 1) * 0x9E3779B97F4A7C15) % WORD
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % WORD
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % WORD
    return mixed ^ mixed >> 31


def hash_of(marks: Iterable[int]) -> RowHash:
    """Return the hash of rows with these marks, by Horner's rule."""
    lanes, rows = [0] * len(PRIMES), 0
    for mark in marks:
        lanes = [(lane * m + mark) % p for lane, m, p in zip(lanes, MULTIPLIERS, PRIMES, strict=True)]
        rows += 1
    return RowHash(rows, tuple(lanes))


def key_of(size: int, digest: str) -> int:
    """Return the key of a file with this size and digest."""
    return int.from_bytes(hashlib.blake2b(f"{size}:{digest}".encode(), digest_size=8).digest(), "little")


def entry_of(files: Iterable[list[Any]], row_ids: Iterable[int], rank: int = 0) -> dict[str, Any]:
    """Return the entry of a rank that delivered these rows, by their ids; `files` are those of a state."""
    rows = [(key_of(size, digest), row) for _, size, digest, _, _, count in files for row in range(count)]
    found = hash_of(splitmix64(*rows[row]) for row in row_ids)
    return {"rank": rank, "rows": found.rows, "hash": found.digest}
