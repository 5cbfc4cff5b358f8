"""Write two real texts as Parquet files: Python's reference ("prose") and its standard library ("code").

    python examples/mixture/make_data.py /tmp/corpora

Both are in every installation of Python, under the PSF license, so nothing is downloaded: the texts that `help()` shows
about the language, and the source of the library's modules. Each row is a passage of 128 bytes:

    passage: list of 128 uint8
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

PASSAGE_BYTES = 128
ROWS_PER_FILE = 2_000
ROWS_PER_ROW_GROUP = 250


def prose() -> bytes:
    """Return what `help()` shows about the language."""
    return "\n\n".join(text for _, text in sorted(topics.items())).encode()


def code() -> bytes:
    """Return the source of the modules at the top of the standard library."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return b"\n\n".join(module.read_bytes() for module in modules)


def write(folder: Path, text: bytes, rows: int | None) -> int:
    """Write a text as passages, no more than so many, and return how many there are."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = len(text) // PASSAGE_BYTES if rows is None else min(rows, len(text) // PASSAGE_BYTES)
    content = np.frombuffer(text, np.uint8, whole * PASSAGE_BYTES)
    table = pa.table({"passage": pa.FixedSizeListArray.from_arrays(pa.array(content), PASSAGE_BYTES)})
    for number, start in enumerate(range(0, whole, ROWS_PER_FILE)):
        part = table.slice(start, ROWS_PER_FILE)
        pq.write_table(part, folder / f"part-{number:03d}.parquet", row_group_size=ROWS_PER_ROW_GROUP)
    return whole


def main() -> None:
    """Write both texts, each into a folder of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, help="passages of each text, at most")
    arguments = parser.parse_args()
    for name, text in (("prose", prose()), ("code", code())):
        rows = write(arguments.folder / name, text, arguments.rows)
        print(f"{name}: {rows:,} passages of {PASSAGE_BYTES} bytes")


if __name__ == "__main__":
    main()
