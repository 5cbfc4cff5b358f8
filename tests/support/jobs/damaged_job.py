"""Read damaged files by this package and by pyarrow, each in a process of its own.

Its arguments: ``DIRECTORY`` has the sound files, ``ENDING`` says what they are, ``PART`` what of them is damaged
(``whole`` or ``pages``), ``FIRST`` and ``COUNT`` which seeds are tried, and after ``SECONDS`` no other one begins. Each
line that is printed is a verdict in JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pyarrow.orc as pa_orc
import pyarrow.parquet as pq
from faults.damage import damaged

from torch_dataloader_utils import StructuredDataset

MEMORY = 4 << 30
"""Bytes of addresses that a reader may take besides those of the process that it was forked from.

Threads take most of them: each has its stack and its heap.
"""

SECONDS = 120
PERTURB = -6
"""M_PERTURB of mallopt(3)."""

END_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of prctl(2)."""

FORMATS = {"parquet": "parquet", "orc": "orc", "csv": "csv", "jsonl": "jsonl", "csv.gz": "csv", "jsonl.zst": "jsonl"}

Columns = dict[str, str]
"""A digest of each column's values."""


def by_us(path: Path, ending: str, *, memory_map: bool = True) -> Iterable[pa.Table]:
    """Read a file by this package."""
    loader, _ = StructuredDataset.create_dataloader(
        path, FORMATS[ending], batch_size=1000, num_workers=0, output_format="arrow", memory_map=memory_map
    )
    return list(loader)


def by_pyarrow(path: Path, ending: str) -> Iterable[pa.Table]:
    """Read a file by pyarrow's own reader."""
    match FORMATS[ending]:
        case "parquet":
            file = pq.ParquetFile(path, page_checksum_verification=True)
            return [file.read_row_group(number) for number in range(file.num_row_groups)]
        case "orc":
            return [pa_orc.ORCFile(path).read()]
        case "csv":
            return [pa_csv.read_csv(path)]
        case _:
            return [pa_json.read_json(path)]


def metadata_by_pyarrow(path: Path, ending: str) -> Iterable[pa.Table]:
    """Ask pyarrow for the metadata of all column chunks of a Parquet file, as this package does; return no row."""
    if ending == "parquet":
        metadata = pq.read_metadata(path)
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            for column in range(group.num_columns):
                group.column(column)
    return []


def by_pyarrow_over(filling: int, path: Path, ending: str) -> Iterable[pa.Table]:
    """Read it so where memory that nobody has written is filled with a byte, as mallopt(3) says."""
    ctypes.CDLL(None).mallopt(PERTURB, filling)
    pa.set_memory_pool(pa.system_memory_pool())
    return by_pyarrow(path, ending)


def digests(tables: Iterable[pa.Table]) -> tuple[int, Columns]:
    """Return the number of rows, and a digest of each column's values."""
    columns: dict[str, list[str]] = {}
    rows = 0
    for table in tables:
        rows += table.num_rows
        for name, column in zip(table.column_names, table.columns, strict=True):
            columns.setdefault(name, []).extend(map(repr, values_of(column)))
    joined = {name: "\n".join(values).encode() for name, values in sorted(columns.items())}
    return rows, {name: hashlib.blake2b(values, digest_size=8).hexdigest() for name, values in joined.items()}


def values_of(column: pa.ChunkedArray) -> list[Any]:
    """Return a column's values; strings as bytes, for they may be damaged, and nulls of no type as of one."""
    if pa.types.is_string(column.type):
        return list(column.cast(pa.binary()).to_pylist())
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:  # within a nested value: Arrow compares without decoding
        distinct = pc.dictionary_encode(pa.array([str(chunk.buffers()) for chunk in column.chunks]))
        return [f"{len(column)} values that cannot be decoded", len(distinct) > 0]


def child(read: Callable[[Path, str], Iterable[pa.Table]], path: Path, ending: str) -> dict[str, Any]:
    """Read a file in a process that is forked for it, with bounds on its memory and time; return what came of it."""
    output, its = os.pipe()
    assert threading.active_count() == 1
    if not (number := os.fork()):
        with contextlib.suppress(BaseException):
            os.close(output)
            ctypes.CDLL(None).prctl(END_WITH_PARENT, signal.SIGKILL)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            signal.alarm(SECONDS)
            addresses = 4096 * int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (addresses + MEMORY, addresses + MEMORY))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.write(its, json.dumps(result_of(read, path, ending)).encode())
        os._exit(0)
    os.close(its)
    with os.fdopen(output, "rb") as stream:
        content = stream.read()
    _, status = os.waitpid(number, 0)
    if not content:
        code = os.waitstatus_to_exitcode(status)
        return {"died": "no end" if code == -signal.SIGALRM else f"status {code}"}
    return dict(json.loads(content))


def result_of(read: Callable[[Path, str], Iterable[pa.Table]], path: Path, ending: str) -> dict[str, Any]:
    """Return a file's rows, by digests, or the error that it was refused by."""
    try:
        rows, columns = digests(read(path, ending))
    except Exception as error:  # noqa: BLE001 - which one is the question
        kind, message = type(error).__name__, str(error)
        return {
            "error": kind,
            "message": message[:400],
            "is_named": isinstance(error, OSError) and str(path) in message,
        }
    return {"rows": rows, "columns": columns}


def verdict(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Return what came of a file, in two words."""
    if "died" in ours:
        return "both died" if "died" in theirs else "died"
    if "error" in ours:
        if not ours["is_named"]:
            return "unnamed error"
        return "refused" if "columns" not in theirs else "refused alone"
    if "columns" not in theirs:  # without a row nothing is wrong: a file of columns' names that no line end follows
        return "accepted alone" if ours["rows"] else "no row"
    return "exact" if (ours["rows"], ours["columns"]) == (theirs["rows"], theirs["columns"]) else "other rows"


def is_undefined(path: Path, ending: str) -> bool:
    """Whether pyarrow returns, of a damaged file, values that it never wrote to memory: each time others."""
    one, other = (child(partial(by_pyarrow_over, filling), path, ending) for filling in (0x11, 0xEE))
    return one != other


def pages_of(content: bytes) -> tuple[int, int]:
    """Return the range of a Parquet file between its magic and its footer."""
    return 4, len(content) - 8 - int.from_bytes(content[-8:-4], "little")


def main() -> Iterator[dict[str, Any]]:
    """Read the damaged files and yield the verdicts."""
    directory, ending, part = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    first, count, seconds = int(sys.argv[4]), int(sys.argv[5]), float(sys.argv[6])
    sound = [path.read_bytes() for path in sorted(directory.glob(f"sound-*.{ending}"))]
    wanted = []
    for number, path in enumerate(sorted(directory.glob(f"sound-*.{ending}"))):
        wanted.append(child(by_pyarrow, path, ending))
        assert verdict(child(by_us, path, ending), wanted[number]) == "exact", path
    end = time.monotonic() + seconds
    path = directory / f"damaged.{ending}"
    for seed in range(first, first + count):
        if time.monotonic() > end:
            return
        original = seed // 5 % len(sound)
        within = pages_of(sound[original]) if part == "pages" else None
        content, change = damaged(sound[original], seed, within=within)
        path.write_bytes(content)
        ours = child(partial(by_us, memory_map=bool(seed % 2)), path, ending)
        theirs = child(by_pyarrow, path, ending)
        outcome = verdict(ours, theirs)
        if outcome == "other rows" and is_undefined(path, ending):
            outcome = "undefined in pyarrow"
        if outcome == "died" and "died" in child(metadata_by_pyarrow, path, ending):
            outcome = "metadata that pyarrow dies of"
        said = {"seed": seed, "file": original, "change": change, "verdict": outcome}
        is_sound = ours.get("columns") in (None, wanted[original]["columns"])
        yield said | {"is_sound": is_sound, "ours": ours, "theirs": theirs}
        path.unlink()


if __name__ == "__main__":
    for line in main():
        print(json.dumps(line), flush=True)  # noqa: T201 - for the test
