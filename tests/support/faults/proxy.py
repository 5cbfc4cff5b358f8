"""A proxy in front of a real S3 server that answers some requests wrongly, late, in part or not at all."""

from __future__ import annotations

import asyncio
import random
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeAlias
from urllib.parse import unquote, urlsplit

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
    """A request as a rule sees it.

    Attributes:
        place: What it is for. Looking is to ask whether there is an object. The range that ends with the file is its
            footer.
        number: How many requests for this place came before it.
        start: The first byte of the range, or 0.
        draw: A number from 0 to 1 that the seed and the number of the request determine.
    """

    method: str
    key: str
    place: Place
    number: int
    start: int
    draw: float


Rule: TypeAlias = Callable[[Request], Fault | None]


def never(_: Request) -> None:
    """Let everything pass."""


def at(place: Place, fault: Fault, *, first: int = 0, times: int | None = None) -> Rule:
    """Return the rule that requests for a place fail, from one on, so many times; for good if that is None."""

    def rule(request: Request) -> Fault | None:
        hit = request.place == place and request.number >= first
        return fault if hit and (times is None or request.number < first + times) else None

    return rule


def some(faults: Iterable[Fault], share: float) -> Rule:
    """Return the rule that a share of all requests, which the seed chooses, fail by one of some faults."""
    choices = tuple(faults)

    def rule(request: Request) -> Fault | None:
        if request.draw >= share:
            return None
        fault = choices[int(request.draw / share * len(choices))]
        return fault if can_be(fault, request.place) else "reset"

    return rule


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
    """The proxy, in a thread of its own.

    Attributes:
        rule: Returns the fault of a request, or None. It may be replaced at any time.
        requests: All requests, and what was made of each.
        url: Where it listens.
    """

    upstream: str
    seed: int = 0
    rule: Rule = never
    requests: list[tuple[Request, Fault | None]] = field(default_factory=list)
    url: str = ""
    _counts: Counter[str] = field(default_factory=Counter)
    _connections: set[asyncio.Task[None]] = field(default_factory=set)

    def fail(self, rule: Rule) -> None:
        """Begin with a rule: forget the requests before it."""
        self.requests.clear()
        self._counts.clear()
        self.rule = rule

    @property
    def made(self) -> int:
        """How many faults were made since the rule began."""
        return sum(fault is not None for _, fault in self.requests)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while await self._serve_one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            self._connections.discard(task)

    async def end(self) -> None:
        """Close all connections."""
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await asyncio.sleep(0)  # in which the transports end

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; return whether the connection stays open."""
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        body = await reader.readexactly(int(length[1])) if length else b""
        method, target, _ = head.split(b"\r\n")[0].decode().split(" ")
        answer = await self._ask(head, body, is_head=method == "HEAD")
        request = self._seen(method, target, answer)
        fault = self.rule(request)
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
        draw = random.Random(f"{self.seed} {place} {number}").random()
        return Request(method, key, place, number, int(content_range[1]) if content_range else 0, draw)


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


@contextmanager
def faulty_proxy(upstream: str, seed: int = 0) -> Iterator[FaultyProxy]:
    """Run a proxy in front of a server, until the end of the context."""
    proxy = FaultyProxy(upstream, seed)
    started, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def run() -> None:
        server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
        proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        await stop.wait()
        server.close()
        await proxy.end()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()), name="proxy", daemon=True)
    thread.start()
    assert started.wait(10), "the proxy does not start"
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
