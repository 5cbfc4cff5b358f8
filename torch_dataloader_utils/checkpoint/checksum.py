"""The checksum of a state: a state that was damaged or edited is refused, not misread. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from torch_dataloader_utils.planning.manifest import json_digest

KEYS = (
    "base",
    "batches_delivered",
    "completed_rows",
    "completed_shards",
    "epoch",
    "files",
    "in_progress",
    "next_worker",
    "num_ranks",
    "_num_workers",
    "plan",
    "plan_algorithm",
    "plan_digest",
    "rank",
    "_shuffle_seed",
    "version",
)
"""The keys of a state that its checksum covers. Frameworks may add keys of their own."""


def checksum_of(state: Mapping[str, Any], files: bytes | None = None) -> str:
    """Return the checksum of a state, which does not cover itself: 32 hexadecimal characters.

    `files` is the digest of the file table, where it is known: the table is the largest part, and the same in all
    states of an epoch.

    Raises:
        TypeError: If a value is no JSON value.
        ValueError: If a value contains itself.
        RecursionError: If a value is nested too deeply.
    """
    checksum = hashlib.blake2b(digest_size=16)
    for key in KEYS:
        if key in state:
            checksum.update(key.encode())
            checksum.update(json_digest(state[key]) if key != "files" or files is None else files)
    return checksum.hexdigest()
