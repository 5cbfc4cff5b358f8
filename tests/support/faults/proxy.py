"""A proxy in front of a real S3 server that answers some requests wrongly, late, in part or not at all."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import socket
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import unquote, urlsplit

from jobs.processes import inherited

JOBS = Path(__file__).parent.parent / "jobs"

TRICKLE_SEC = 0.2
"""Between two bytes of a trickle."""

Place: TypeAlias = Literal["looking", "listing", "footer", "range"]
PLACES: tuple[Place, ...] = ("looking", "listing", "footer", "range")

Fault: TypeAlias = str
ERRORS = {
    "500": (500, "InternalError", "We encountered an internal error. Please try again."),
    "503": (503, "SlowDown", "Please reduce your request rate."),
    "429": (429, "TooManyRequests", "Too many requests."),
    "expired token": (400, "ExpiredToken", "The provided token has expired."),
    "forbidden": (403, "AccessDenied", "Request has expired"),
    "deleted": (404, "NoSuchKey", "The specified key does not exist."),
}
"""Faults that are answers of their own, as S3 gives them: status, code and message."""

BROKEN = ("reset", "hang", "short body", "wrong length", "wrong range", "flipped byte", "trickle")
"""Faults in the connection or in the answer of the server."""

PASSING = ("500", "503", "429", *BROKEN)
"""Faults that another request helps against."""


@dataclass(frozen=True)
class Request:
    """A request, and what was made of it.

    Attributes:
        place: What it is for. Looking is to ask whether there is an object. The range that ends with the file is its
            footer.
        number: How many requests for this place came before it.
        start: The first byte of the range, or 0.
    """

    method: str
    key: str
    place: Place
    number: int
    start: int


@dataclass(frozen=True)
class Rule:
    """Which requests fail, and how.

    Attributes:
        faults: The faults; none lets everything pass.
        place: Where; None for every place.
        key: Of which object; None for all.
        first: From which request on.
        times: How many of them; None for all.
        share: How many of these fail, from 0 to 1. The seed chooses which, and by which fault.
        seed: Of these choices.
    """

    faults: tuple[Fault, ...] = ()
    place: Place | None = None
    key: str | None = None
    first: int = 0
    times: int | None = None
    share: float = 1.0
    seed: int = 0

    def fault_of(self, request: Request) -> Fault | None:
        """Return the fault of a request."""
        here = self.place in {None, request.place} and self.key in {None, request.key}
        now = request.number >= self.first and (self.times is None or request.number < self.first + self.times)
        draw = random.Random(f"{self.seed} {request.place} {request.number}").random()
        if not self.faults or not here or not now or draw >= self.share:
            return None
        fault = self.faults[int(draw / self.share * len(self.faults))]
        return fault if can_be(fault, request.place) else "reset"


NEVER = Rule()


def can_be(fault: Fault, place: Place) -> bool:
    """Whether a fault makes sense at a place.

    Only pages have checksums: nobody who reads a listing or a footer can notice a byte that was flipped on the way.
    Only ranges say which range they are, and only what has a body can be cut.
    """
    needing = {"flipped byte": {"range"}, "wrong range": {"range", "footer"}}
    bodies = {"short body", "wrong length", "trickle"}
    return place in needing.get(fault, PLACES) and (place != "looking" or fault not in bodies)


@dataclass
class Answer:
    """What the server answered."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name), None)

    def replace(self, name: str, value: str) -> None:
        self.headers = [(key, value if key.lower() == name else kept) for key, kept in self.headers]

    def head(self, length: int) -> bytes:
        kept = [
            (k, v) for k, v in self.headers if k.lower() not in {"content-length", "connection", "transfer-encoding"}
        ]
        lines = [f"HTTP/1.1 {self.status} Answer", *(f"{key}: {value}" for key, value in kept)]
        return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode("latin-1")


@dataclass
class FaultyProxy:
    """The proxy itself, which is run by ``jobs/s3_proxy.py``.

    It obeys one line of JSON at a time: the fields of a rule, with which it begins anew, or null, to which it answers
    with all requests since then and their faults.
    """

    upstream: str
    rule: Rule = NEVER
    requests: list[tuple[Request, Fault | None]] = field(default_factory=list)
    _counts: Counter[str] = field(default_factory=Counter)

    async def run(self) -> None:
        """Serve until standard input ends."""
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)  # noqa: T201 - read by who started it
        lines = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while line := await lines.readline():
            print(self._obey(json.loads(line)), flush=True)  # noqa: T201

    def _obey(self, command: dict[str, Any] | None) -> str:
        if command is None:
            return json.dumps([[asdict(request), fault] for request, fault in self.requests])
        self.requests.clear()
        self._counts.clear()
        self.rule = Rule(**{**command, "faults": tuple(command["faults"])})
        return "{}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        try:
            while await self._serve_one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; return whether the connection stays open."""
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        body = await reader.readexactly(int(length[1])) if length else b""
        method, target, _ = head.split(b"\r\n")[0].decode().split(" ")
        rule = self.rule  # which a test may end, and change the object, while the server answers with the old one
        answer = await self._ask(head, body, is_head=method == "HEAD")
        request = self._seen(method, target, answer)
        fault = rule.fault_of(request)
        self.requests.append((request, fault))
        if fault == "hang":
            await reader.read()  # until the client has enough
            return False
        return await _answer(writer, answer, fault, is_head=method == "HEAD")

    async def _ask(self, head: bytes, body: bytes, *, is_head: bool) -> Answer:
        address = urlsplit(self.upstream)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        try:
            writer.write(re.sub(rb"(?i)\r\nconnection: [^\r]*", b"", head)[:-2] + b"Connection: close\r\n\r\n" + body)
            lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = [(key, value.strip()) for key, _, value in (line.partition(":") for line in lines[1:]) if key]
            return Answer(int(lines[0].split(" ")[1]), headers, b"" if is_head else await reader.read())
        finally:
            writer.close()

    def _seen(self, method: str, target: str, answer: Answer) -> Request:
        path, _, query = target.partition("?")
        key = unquote(path).strip("/").partition("/")[2]
        content_range = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", answer.header("content-range") or "")
        place: Place = "looking" if method == "HEAD" else "listing"
        if key and method == "GET" and "list-type" not in query:
            ends = content_range is None or int(content_range[2]) == int(content_range[3]) - 1
            place = "footer" if ends else "range"
        number = self._counts[place]
        self._counts[place] += 1
        return Request(method, key, place, number, int(content_range[1]) if content_range else 0)


async def _answer(writer: asyncio.StreamWriter, answer: Answer, fault: Fault | None, *, is_head: bool) -> bool:
    """Write the answer, or what a fault makes of it; return whether the connection stays open."""
    if fault in ERRORS:
        status, code, message = ERRORS[fault]
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
        answer, fault = Answer(status, [("Content-Type", "application/xml")], b"" if is_head else body), None
    if fault == "reset":
        _reset(writer)
        return False
    return await _damaged(writer, answer, fault, is_head=is_head)


async def _damaged(writer: asyncio.StreamWriter, answer: Answer, fault: Fault | None, *, is_head: bool) -> bool:
    body = answer.body
    length = int(answer.header("content-length") or 0) if is_head else len(body)
    if fault == "wrong length":
        body = body[: len(body) // 2]
        length = len(body)
    elif fault == "wrong range":
        start, stop, size = map(int, re.findall(r"\d+", answer.header("content-range") or "0-0/0"))
        answer.replace("content-range", f"bytes {start + 1}-{stop + 1}/{size}")
    elif fault == "flipped byte":
        middle = len(body) // 2
        body = body[:middle] + bytes([body[middle] ^ 0x10]) + body[middle + 1 :]
    writer.write(answer.head(length))
    if fault == "trickle":
        for byte in body:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(TRICKLE_SEC)
    else:
        writer.write(body[: len(body) // 2] if fault == "short body" else body)
    await writer.drain()
    if fault == "short body":
        writer.close()
    return fault is None


def _reset(writer: asyncio.StreamWriter) -> None:
    """Reset the connection: to linger for no time is to send RST."""
    taken: socket.socket = writer.get_extra_info("socket")
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class ProxyProcess:
    """A proxy in a process of its own. In the tests' process, forked workers would keep its connections open.

    Attributes:
        url: Where it listens.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        self._commands, self._answers = process.stdin, process.stdout
        self.url = f"http://127.0.0.1:{int(self._answers.readline())}"

    def fail(self, rule: Rule) -> None:
        """Begin with a rule, and forget the requests before it."""
        self._command(asdict(rule))

    def requests(self) -> list[tuple[Request, Fault | None]]:
        """Return all requests since the rule began, and what was made of them."""
        return [(Request(**request), fault) for request, fault in self._command(None)]

    def _command(self, command: dict[str, Any] | None) -> Any:
        self._commands.write(json.dumps(command) + "\n")
        self._commands.flush()
        return json.loads(self._answers.readline())


@contextmanager
def faulty_proxy(upstream: str) -> Iterator[ProxyProcess]:
    """Run a proxy in front of a server, until the end of the context."""
    command = [sys.executable, str(JOBS / "s3_proxy.py"), str(os.getpid()), upstream]
    paths = os.pathsep.join([str(JOBS.parent), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**inherited(), "PYTHONPATH": paths},
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield ProxyProcess(process)
        finally:
            process.kill()
