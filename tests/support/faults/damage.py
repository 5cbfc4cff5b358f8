"""Files to damage, and damage: what it is follows from a seed."""

from __future__ import annotations

import gzip
import io
import json
import random
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.orc as pa_orc
import pyarrow.parquet as pq

ROWS = 400
GROUP = 150
LONGEST_BLOCK = 512

Change: TypeAlias = Callable[[bytearray, random.Random], None]


def flip(content: bytearray, chance: random.Random) -> None:
    """Flip one to three bits."""
    for _ in range(chance.randint(1, 3)):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)


def cut(content: bytearray, chance: random.Random) -> None:
    """Cut the end off."""
    del content[chance.randrange(len(content)) :]


def zero(content: bytearray, chance: random.Random) -> None:
    """Write zeros over a block, as a disk does that lost it."""
    start, stop = _block(content, chance)
    content[start:stop] = bytes(stop - start)


def duplicate(content: bytearray, chance: random.Random) -> None:
    """Insert a block a second time."""
    start, stop = _block(content, chance)
    content[stop:stop] = content[start:stop]


def swap(content: bytearray, chance: random.Random) -> None:
    """Let two blocks of equal length change places."""
    size = chance.randint(1, min(LONGEST_BLOCK, len(content) // 2))
    first = chance.randint(0, len(content) - 2 * size)
    second = chance.randint(first + size, len(content) - size)
    one, other = content[first : first + size], content[second : second + size]
    content[first : first + size], content[second : second + size] = other, one


CHANGES: tuple[Change, ...] = (flip, cut, zero, duplicate, swap)


def _block(content: bytearray, chance: random.Random) -> tuple[int, int]:
    start = chance.randrange(len(content))
    return start, min(len(content), start + chance.randint(1, LONGEST_BLOCK))


def damaged(content: bytes, seed: int, *, within: tuple[int, int] | None = None) -> tuple[bytes, str]:
    """Return a file's damaged content, and the name of what was done to it.

    Args:
        content: The sound file.
        seed: What the damage follows from.
        within: The range of bytes that is damaged, whose length stays the same; None for the whole file.
    """
    chance = random.Random(seed)
    changes = CHANGES if within is None else (flip, zero, swap)
    change = changes[seed % len(changes)]
    start, stop = within or (0, len(content))
    part = bytearray(content[start:stop])
    change(part, chance)
    return content[:start] + bytes(part) + content[stop:], change.__name__


# Files ---------------------------------------------------------------------------------------------------------------


def table_of_many_types() -> pa.Table:
    """Return rows of numbers, strings, lists and nulls."""
    chance = np.random.default_rng(0)
    scores = pa.array(chance.random(ROWS), mask=chance.random(ROWS) < 0.1)
    lists = [None if row % 11 == 0 else list(range(row % 5)) for row in range(ROWS)]
    return pa.table(
        {
            "row": pa.array(np.arange(ROWS)),
            "score": scores,
            "name": [f"row {row % 37}" for row in range(ROWS)],
            "text": [None if row % 7 == 0 else "lorem ipsum "[: row % 12] * 3 for row in range(ROWS)],
            "list": pa.array(lists, pa.list_(pa.int32())),
        }
    )


def parquet_files() -> Iterator[bytes]:
    """Yield the same rows written in several ways, without checksums."""
    for options in (
        {"compression": "snappy"},
        {"compression": "none", "use_dictionary": False},
        {"compression": "zstd", "data_page_version": "2.0"},
        {"compression": "gzip", "data_page_size": 500},
    ):
        yield _parquet(options)


def checked_parquet_files() -> Iterator[bytes]:
    """Yield the same with a checksum in each page."""
    for options in ({"compression": "none", "use_dictionary": False}, {"compression": "snappy"}):
        yield _parquet({**options, "write_page_checksum": True})


def _parquet(options: dict[str, object]) -> bytes:
    stream = io.BytesIO()
    pq.write_table(table_of_many_types(), stream, row_group_size=GROUP, **options)
    return stream.getvalue()


def orc_files() -> Iterator[bytes]:
    """Yield the same rows as ORC."""
    for compression in ("uncompressed", "zlib", "zstd", "snappy"):
        stream = io.BytesIO()
        pa_orc.write_table(table_of_many_types(), stream, compression=compression, stripe_size=4096)
        yield stream.getvalue()


def csv_files() -> Iterator[bytes]:
    """Yield CSV, with values that are quoted and without."""
    yield b"row,score,name\n" + b"".join(b"%d,%g,row %d\n" % (row, row / 8, row) for row in range(ROWS))
    yield b"row,score,name\n" + b"".join(
        b'%d,%s,"row, ""%d"""\n' % (row, b"" if row % 3 else b"%d" % row, row) for row in range(ROWS)
    )


def jsonl_files() -> Iterator[bytes]:
    """Yield JSON Lines, flat and nested."""
    flat = ({"row": row, "score": row / 8, "name": f"row {row}"} for row in range(ROWS))
    nested = (
        {"row": row, "list": [row, row + 1], "of": {"name": f"é{row}", "is": row % 2 == 0}} for row in range(ROWS)
    )
    for rows in (flat, nested):
        yield "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def gzip_files() -> Iterator[bytes]:
    """Yield gzip-ed CSV."""
    yield from (gzip.compress(content, mtime=0) for content in csv_files())


def zstd_files() -> Iterator[bytes]:
    """Yield JSON Lines compressed by zstd, which has no checksum unless it is asked for."""
    yield from (pa.compress(content, "zstd", asbytes=True) for content in jsonl_files())


FILES: dict[str, Callable[[], Iterator[bytes]]] = {
    "parquet": parquet_files,
    "orc": orc_files,
    "csv": csv_files,
    "jsonl": jsonl_files,
    "csv.gz": gzip_files,
    "jsonl.zst": zstd_files,
}
"""Sound files, by the end of their names."""
