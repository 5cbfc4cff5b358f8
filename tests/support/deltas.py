"""Delta tables with what deltalake does not write: deletion vectors and mapped columns, by the Delta protocol.

https://github.com/delta-io/delta/blob/master/PROTOCOL.md
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from pyroaring import BitMap64

MAGIC = (1681511377).to_bytes(4, "little")

BASE85 = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
Z85 = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def commit(table: Path, version: int, actions: Sequence[Mapping[str, Any]]) -> None:
    """Write a version's actions to the log."""
    log = table / "_delta_log"
    log.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(action) for action in actions]
    (log / f"{version:020d}.json").write_text("\n".join(lines) + "\n")


def vector_on_disk(table: Path, places: Sequence[int]) -> dict[str, Any]:
    """Write a deletion vector to a file of the table and return what describes it."""
    name = uuid4()
    vector = MAGIC + BitMap64(places).serialize()
    content = b"\x01" + len(vector).to_bytes(4, "big") + vector + zlib.crc32(vector).to_bytes(4, "big")
    (table / f"deletion_vector_{name}.bin").write_bytes(content)
    return {
        "storageType": "u",
        "pathOrInlineDv": _z85(name.bytes),
        "offset": 1,
        "sizeInBytes": len(vector),
        "cardinality": len(places),
    }


def vector_inline(places: Sequence[int]) -> dict[str, Any]:
    """Return a description that holds the deletion vector itself."""
    vector = MAGIC + BitMap64(places).serialize()
    return {
        "storageType": "i",
        "pathOrInlineDv": _z85(vector + bytes(-len(vector) % 4)),
        "sizeInBytes": len(vector),
        "cardinality": len(places),
    }


def _z85(content: bytes) -> str:
    return base64.b85encode(content).translate(bytes.maketrans(BASE85, Z85)).decode()
