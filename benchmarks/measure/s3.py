"""The S3 server: starting it, counting the requests of a run, and the fewest requests that would be enough."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow.parquet as pq

from benchmarks.data.dataset import Data
from benchmarks.measure.environments import Environment
from benchmarks.measure.rounds import Hooks

__all__ = ["DELAY_MS", "Server", "column_runs", "serve"]

BUCKET = "bench"
ENVIRONMENT = Environment(Path(__file__).with_name("s3_server.txt"))
DELAY_MS = 20
MERGED_GAP = 64 * 1024
"""Bytes between two wanted columns up to which one request for both is faster than two."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running S3 server.

    Attributes:
        pid: Its process.
        access: The endpoint, key, secret and region, for contenders.
    """

    pid: int
    access: dict[str, str]
    _input: IO[str]
    _output: IO[str]

    def ask(self, command: str) -> dict[str, Any]:
        """Send a command and return the answer."""
        self._input.write(command + "\n")
        self._input.flush()
        answer: dict[str, Any] = json.loads(self._output.readline())
        return answer

    def hooks(self, data: Data) -> Hooks:
        """Return hooks that count the requests of each run."""
        footers = {Path(path).name: _footer_start(path) for path in data.files}

        def after() -> dict[str, Any]:
            answer = self.ask("log")
            return _counted(answer["entries"], footers) | {"server_cpu_s": answer["cpu_s"]}

        def before() -> None:
            self.ask("reset")

        return Hooks(before=before, after=after, keep=frozenset([self.pid]))


@contextmanager
def serve(*datasets: Data) -> Any:
    """Run a server that has some data sets and answers each request after `DELAY_MS`."""
    ENVIRONMENT.prepare()
    command = [ENVIRONMENT.python, "-P", str(Path(__file__).with_name("s3_server.py"))]
    process = subprocess.Popen(
        [*command, BUCKET, *(data.directory for data in datasets)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        said = process.stdout.readline()
        if not said:
            message = f"the S3 server ended with status {process.wait()}"
            raise RuntimeError(message)
        access = json.loads(said)
        server = Server(access.pop("pid"), access, process.stdin, process.stdout)
        server.ask(f"delay {DELAY_MS}")
        yield server
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def url_of(data: Data) -> str:
    """Return the URL of a data set on the server."""
    return f"s3://{BUCKET}/{Path(data.directory).name}"


def column_runs(data: Data, columns: Sequence[str] | None) -> dict[str, int]:
    """Return the fewest requests that fetch the columns, computed from the footers.

    A row group is read at a time. Its wanted column chunks form runs, in which the gap between two is at most
    `MERGED_GAP`; each run is one request.

    Returns:
        The runs, and the bytes of the wanted column chunks.
    """
    runs = wanted = 0
    for path in data.files:
        metadata = pq.read_metadata(path)
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            chunks = [group.column(index) for index in range(group.num_columns)]
            chosen = [chunk for chunk in chunks if columns is None or chunk.path_in_schema.split(".")[0] in columns]
            ranges = sorted((_chunk_start(chunk), chunk.total_compressed_size) for chunk in chosen)
            wanted += sum(size for _, size in ranges)
            end = -MERGED_GAP - 1
            for start, size in ranges:
                runs += start - end > MERGED_GAP
                end = start + size
    return {"column_runs": runs, "column_bytes": wanted, "files": len(data.files)}


def _chunk_start(chunk: Any) -> int:
    """Return the offset of a column chunk: of its dictionary page, if it has one."""
    if chunk.has_dictionary_page and chunk.dictionary_page_offset:
        return int(min(chunk.dictionary_page_offset, chunk.data_page_offset))
    return int(chunk.data_page_offset)


def _footer_start(path: str) -> tuple[int, int]:
    """Return the offset of a file's footer, and the file's size."""
    size = Path(path).stat().st_size
    with Path(path).open("rb") as file:
        file.seek(size - 8)
        return size - 8 - int.from_bytes(file.read(4), "little"), size


def _counted(entries: Iterable[dict[str, Any]], footers: dict[str, tuple[int, int]]) -> dict[str, int]:
    """Count requests and bytes by kind: data, footer, HEAD, LIST, and others."""
    kinds: Counter[str] = Counter()
    down: Counter[str] = Counter()
    for entry in entries:
        kind = _kind(entry, footers)
        kinds[kind] += 1
        down[kind] += entry["bytes"]
    names = ("data", "footer", "head", "list", "other")
    counted = {f"{kind}_requests": kinds[kind] for kind in names}
    return counted | {
        "requests": kinds.total(),
        "data_bytes": down["data"],
        "footer_bytes": down["footer"],
        "all_bytes": down.total(),
    }


def _kind(entry: dict[str, Any], footers: dict[str, tuple[int, int]]) -> str:
    name = entry["path"].rpartition("/")[2]
    if entry["method"] == "HEAD":
        return "head"
    if entry["method"] != "GET":
        return "other"
    if name not in footers:
        return "list"
    footer, size = footers[name]
    start, stop = _range(entry["range"], size)
    whole = start <= len(b"PAR1")
    return "footer" if start >= footer or (stop >= size and not whole) else "data"


def _range(header: str | None, size: int) -> tuple[int, int]:
    """Return the start and stop of a requested range, which may be given as a length from the file's end."""
    if header is None:
        return 0, size
    first, _, last = header.removeprefix("bytes=").partition("-")
    if not first:
        return size - int(last), size
    return int(first), int(last) + 1 if last else size
