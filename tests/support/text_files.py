"""Text files whose rows count through all of them, plain or compressed."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

from torch_dataloader_utils import StructuredDataset

FILES = (40, 3, 61, 26)
ROWS = sum(FILES)
SUFFIXES = {"csv": "csv", "jsonl": "jsonl"}
SMALL = {"split_bytes": 300}
"""Files of some hundred bytes are cut into ranges of ten or twenty rows."""


def open_text(path: Any, **options: Any) -> tuple[Any, Any]:
    return StructuredDataset.create_dataloader(
        path, **{"batch_size": 8, "num_workers": 0, "output_format": "dict", **options}
    )


def csv_of(rows: Iterable[int]) -> bytes:
    return b"row,score,name\n" + b"".join(b"%d,%g,row %d\n" % (row, row / 8, row) for row in rows)


def jsonl_of(rows: Iterable[int]) -> bytes:
    lines = [json.dumps({"row": row, "score": row / 8, "name": f"row {row}"}) for row in rows]
    return "".join(f"{line}\n" for line in lines).encode()


WRITERS = {"csv": csv_of, "jsonl": jsonl_of}
COMPRESSORS = {"": bytes, ".gz": gzip.compress, ".zst": lambda text: pa.compress(text, "zstd", asbytes=True)}


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file as writers should: a process that has the old file open goes on reading that."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def write_text(directory: Path, kind: str, files: Iterable[int] = FILES, suffixes: Iterable[str] = ("",) * 4) -> Path:
    """Write files whose column `row` counts through all of them."""
    directory.mkdir(exist_ok=True)
    first = 0
    for number, (rows, suffix) in enumerate(zip(files, suffixes, strict=False)):
        text = WRITERS[kind](range(first, first + rows))
        replace_file(directory / f"part-{number}.{kind}{suffix}", COMPRESSORS[suffix](text))
        first += rows
    return directory


def rows_of(batches: Iterable[Any]) -> list[int]:
    return [row for batch in batches for row in batch["row"]]
