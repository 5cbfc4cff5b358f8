"""An S3 server that delays each answer, in a process of its own: ``s3_server.py BUCKET DIRECTORY...``.

It has the files of the directories, with the directories' names as prefixes. snailmail provides the server, moto's S3,
and the delay; this script logs the requests. Reads of objects it answers itself, from memory and piece by piece: for
each range moto copies all of its object, and takes some milliseconds of a processor, which S3 does not take from those
who read.

It prints a line of JSON when it is ready, and then one for each command that it reads: ``delay MILLISECONDS``,
``reset`` and ``log``.

It runs in an environment of its own, made from s3_server.txt, and imports nothing of the suite.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import FakeKey, s3_backends
from snailmail import Fixed, ObjectStore
from werkzeug.serving import WSGIRequestHandler

KEY = "bench"
RANGE = re.compile(r"bytes=(\d+)-(\d+)")
PIECE = 1 << 20
"""Bytes that are sent at once, so that an answer begins before all of it was copied."""

MODIFIED = "Thu, 01 Jan 2026 00:00:00 GMT"


class RequestLog:
    """A WSGI application that wraps another and logs each request."""

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self.entries: list[dict[str, Any]] = []
        self._app = app
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer a request, and log it with the number of bytes sent."""
        entry: dict[str, Any] = {
            "method": environ["REQUEST_METHOD"],
            "path": environ["PATH_INFO"],
            "query": environ.get("QUERY_STRING", ""),
            "range": environ.get("HTTP_RANGE"),
            "bytes": 0,
        }

        def logging_start(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
            entry["status"] = int(status[:3])
            length = next((value for name, value in headers if name.lower() == "content-length"), "0")
            entry["bytes"] = 0 if entry["method"] == "HEAD" else int(length)
            with self._lock:
                self.entries.append(entry)
            return start_response(status, headers, exc_info)

        return self._app(environ, logging_start)


class PlainReads:
    """A WSGI application that answers GET and HEAD of the objects that moto has, and leaves all else to moto.

    It knows ranges with a start and a last byte, and ``If-Match``, which are all that readers of Parquet files ask for.
    """

    def __init__(self, app: Callable[..., Iterable[bytes]], objects: dict[str, FakeKey]) -> None:
        self._app = app
        self._objects = {key: (found.value, found.etag) for key, found in objects.items()}

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer a request."""
        wanted = environ.get("HTTP_RANGE", "")
        content, etag = self._objects.get(environ["PATH_INFO"], (None, ""))
        known = RANGE.fullmatch(wanted)
        if environ["REQUEST_METHOD"] not in {"GET", "HEAD"} or content is None or (wanted and not known):
            return self._app(environ, start_response)
        headers = [("ETag", etag), ("Last-Modified", MODIFIED), ("Accept-Ranges", "bytes")]
        if environ.get("HTTP_IF_MATCH", etag) != etag:
            start_response("412 Precondition Failed", [*headers, ("Content-Length", "0")])
            return []
        status, start, stop = "200 OK", 0, len(content)
        if known:
            status, start, stop = "206 Partial Content", int(known[1]), min(int(known[2]) + 1, stop)
            headers.append(("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}"))
        start_response(status, [*headers, ("Content-Length", str(stop - start))])
        if environ["REQUEST_METHOD"] == "HEAD":
            return []
        return (content[place : min(place + PIECE, stop)] for place in range(start, stop, PIECE))


def upload(bucket: str, directories: list[str]) -> dict[str, FakeKey]:
    """Put the files of some directories into the bucket, without requests, and return the objects by path of URL."""
    backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
    return {
        f"/{bucket}/{path.parent.name}/{path.name}": backend.put_object(
            bucket, f"{path.parent.name}/{path.name}", path.read_bytes()
        )
        for directory in directories
        for path in sorted(Path(directory).iterdir())
    }


def say(**words: Any) -> None:
    """Write one line of JSON."""
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve until the commands end."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: end with the suite
    bucket, *directories = sys.argv[1:]
    WSGIRequestHandler.protocol_version = "HTTP/1.1"  # connections stay open, as those of S3 do
    with ObjectStore(bucket=bucket, max_records=0) as store:
        objects = upload(bucket, directories)
        store.middleware.app = PlainReads(store.middleware.app, objects)
        log = store.middleware.app = RequestLog(store.middleware.app)
        say(endpoint=store.endpoint_url, key=KEY, secret=KEY, region="us-east-1", pid=os.getpid())
        for line in sys.stdin:
            command, *arguments = line.split()
            if command == "delay":
                store.set_latency(Fixed(float(arguments[0])))
                say(done=command)
            elif command == "reset":
                log.entries, cpu_before = [], time.process_time()
                say(done=command)
            elif command == "log":
                say(entries=log.entries, cpu_s=time.process_time() - cpu_before)


if __name__ == "__main__":
    main()
