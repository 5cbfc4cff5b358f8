"""An S3 server that delays each answer, in a process of its own: ``s3_server.py BUCKET DIRECTORY...``.

It has the files of the directories, with the directories' names as prefixes. snailmail provides the server, moto's S3,
and the delay; this script logs the requests. It prints a line of JSON when it is ready, and then one for each command
that it reads: ``delay MILLISECONDS``, ``reset`` and ``log``.

It runs in an environment of its own, made from s3_server.txt, and imports nothing of the suite.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import botocore.session
from snailmail import Fixed, ObjectStore
from werkzeug.serving import WSGIRequestHandler

KEY = "bench"


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


def upload(endpoint: str, bucket: str, directories: list[str]) -> None:
    """Upload the files of some directories to the bucket."""
    client = botocore.session.get_session().create_client(
        "s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id=KEY, aws_secret_access_key=KEY
    )
    for directory in map(Path, directories):
        for path in sorted(directory.iterdir()):
            client.put_object(Bucket=bucket, Key=f"{directory.name}/{path.name}", Body=path.read_bytes())


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
        upload(store.endpoint_url, bucket, directories)
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
