"""The checksum of a state: a state that was damaged or edited is refused, not misread. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_dataloader_utils.planning.manifest import json_digest

KEYS = (
    "base",
    "batch_size",
    "batches_delivered",
    "completed_rows",
    "completed_shards",
    "delivered_hash",
    "drop_last",
    "epoch",
    "excluded",
    "files",
    "in_progress",
    "mixture",
    "next_worker",
    "num_ranks",
    "_num_workers",
    "plan",
    "plan_algorithm",
    "plan_digest",
    "rank",
    "refused_by_dcp",
    "_shuffle_seed",
    "skipped",
    "version",
)
"""The keys of a state that its checksum covers. Frameworks may add keys of their own."""


def checksum_of(state: Mapping[str, Any], known: Mapping[str, bytes] | None = None) -> str:
    """Return the checksum of a state, which does not cover itself: 32 hexadecimal characters.

    It is the digest of its parts' digests. `known` are digests of parts that were computed before.

    Raises:
        TypeError: If a value is no JSON value.
        ValueError: If a value contains itself.
        OverflowError: If a row number has more than 64 bits.
        RecursionError: If a value is nested too deeply.
    """
    known = known or {}
    checksum = hashlib.blake2b(digest_size=16)
    for key in KEYS:
        if key in state:
            checksum.update(key.encode())
            checksum.update(known.get(key) or part_digest(key, state[key]))
    return checksum.hexdigest()


def part_digest(key: str, value: Any) -> bytes:
    """Return the digest of a part of a state.

    Raises:
        TypeError: If it is no JSON value.
        ValueError: If it contains itself.
        OverflowError: If a row number has more than 64 bits.
        RecursionError: If it is nested too deeply.
    """
    if key == "completed_rows":
        return numbers_digest(value)
    if key == "excluded" and value is not None:
        delivered = {"delivered": numbers_digest(value["delivered"]).hex()} if "delivered" in value else {}
        rows = [{**entry, "rows": _digest_of(entry)} for entry in value["rows"]]
        return json_digest({**value, "rows": rows, **delivered})
    if key == "base" and value is not None and "completed_rows" in value:
        return baseline_digest(value, numbers_digest(value["completed_rows"]))
    return json_digest(value)


def _digest_of(entry: Mapping[str, Any]) -> str:
    return numbers_digest(entry["rows"]).hex()


def baseline_digest(baseline: Mapping[str, Any], completed_rows: bytes) -> bytes:
    """Return the digest of a state's ``base``, given that of its row numbers."""
    return json_digest({**baseline, "completed_rows": completed_rows.hex()})


def numbers_digest(numbers: Sequence[int] | npt.NDArray[np.int64]) -> bytes:
    """Return the digest of row numbers: as 64-bit integers, because as JSON a million of them would take 100 ms."""
    return hashlib.blake2b(np.asarray(numbers, dtype="<i8").tobytes(), digest_size=16).digest()
