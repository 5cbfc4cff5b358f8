"""Ranges over plain HTTP: where they are received so, which connections are kept, and what other answers lead to."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from conftest import S3Server

from torch_dataloader_utils.storage.causes import ChangedFileError
from torch_dataloader_utils.storage.obstore import plain_http
from torch_dataloader_utils.storage.obstore import s3 as obstore_s3
from torch_dataloader_utils.storage.obstore.options import options_of
from torch_dataloader_utils.storage.obstore.plain_http import HttpError, HttpRange, PlainHttp
from torch_dataloader_utils.storage.obstore.s3 import LEAST_BY_HTTP, ObstoreRange, ObstoreS3

pytestmark = [pytest.mark.usefixtures("leaves_nothing_behind")]

CONTENT = bytes(range(256)) * 4000
SECONDS = 60.0
PAUSE_SEC = 0.005
SHORT_SEC = 1.0
"""Longer than the server takes for an answer, also on a busy machine."""
SIGNED = {"aws_access_key_id": "K", "aws_secret_access_key": "S"}
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Reduce your rate.</Message></Error>"


class Server:
    """A server of one object, which answers as it is told, and remembers the connection of each request."""

    def __init__(self) -> None:
        self.status = 206
        self.ends_after: int | None = None
        self.stalls_after: int | None = None
        self.piece_size: int | None = None
        self.gave_up = False
        self.closes_idle = False
        self.says_close = False
        self.body: bytes | None = None
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.connections: list[object] = []
        told = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle(self) -> None:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a client may close its connection
                    super().handle()

            def do_GET(self) -> None:
                told.connections.append(self.connection)
                told.answer(self)

            def log_message(self, *_: Any) -> None:
                """Write nothing."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/bucket/key?signature=x"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.goes_on.wait(SECONDS)
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers["Range"])
        assert found
        start, stop = int(found[1]), int(found[2]) + 1
        body = {200: CONTENT, 206: CONTENT[start:stop]}.get(self.status, SLOW_DOWN) if self.body is None else self.body
        request.send_response(self.status)
        if self.status == 206:
            request.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(CONTENT)}")
        request.send_header("ETag", '"e"')
        request.send_header("Content-Length", str(len(body)))
        if self.says_close:
            request.send_header("Connection", "close")
        request.end_headers()
        if self.stalls_after is not None:
            request.wfile.write(body[: self.stalls_after])
            self.goes_on.clear()
            self.gave_up = not self.goes_on.wait(SECONDS)
            request.close_connection = True
            return
        body = body[: self.ends_after]
        size = self.piece_size or max(1, len(body))
        for first in range(0, len(body), size):
            request.wfile.write(body[first : first + size])
            request.wfile.flush()
            time.sleep(0 if self.piece_size is None else PAUSE_SEC)
        request.close_connection = self.closes_idle or self.ends_after is not None


@pytest.fixture
def server() -> Iterator[Server]:
    """A server."""
    server = Server()
    yield server
    server.goes_on.set()
    server.http.shutdown()
    server.http.server_close()
    server.thread.join()


def is_receiving(thread: threading.Thread) -> bool:
    """Whether a thread waits for bytes of a socket."""
    frame = sys._current_frames().get(thread.ident or 0)
    waiting = (socket.SocketIO.readinto.__code__, HttpRange._read_all.__code__)
    return frame is not None and any(each.f_code in waiting for each, _ in traceback.walk_stack(frame))


def content_of(received: HttpRange | None, *sizes: int) -> bytes:
    assert received is not None
    try:
        memory = [memoryview(bytearray(size)) for size in sizes]
        return b"".join(part[: received.read_into(part, SECONDS)] for part in memory)
    finally:
        received.close()


@pytest.mark.parametrize(
    ("options", "variables", "expected"),
    [
        pytest.param(SIGNED | {"endpoint": "http://h:1"}, {}, True, id="a key and plain HTTP"),
        pytest.param(SIGNED | {"endpoint": "https://h"}, {}, False, id="https"),
        pytest.param(SIGNED, {}, False, id="S3 of AWS"),
        pytest.param({"skip_signature": True, "endpoint": "http://h:1"}, {}, False, id="no key"),
        pytest.param(SIGNED | {"endpoint": "http://h:1"}, {"http_proxy": "http://p"}, False, id="a proxy"),
        pytest.param(SIGNED | {"endpoint": "http://h:1"}, {"all_proxy": "http://p"}, False, id="a proxy for all"),
        pytest.param(SIGNED | {"endpoint": "http://h:1"}, {"https_proxy": "http://p"}, True, id="a proxy for https"),
        pytest.param(
            SIGNED | {"endpoint": "http://h:1"}, {"http_proxy": "http://p", "no_proxy": "h"}, True, id="no proxy there"
        ),
    ],
)
def test_it_is_used_where_an_endpoint_is_reached_so_and_urls_can_be_signed(monkeypatch, options, variables, expected):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (PlainHttp.of(options, SECONDS) is not None) is expected


def test_a_range_is_received_in_parts_and_its_connection_is_used_again(server):
    http = PlainHttp(SECONDS)
    assert content_of(http.get(server.url, 10, 900_000, "e"), 1, 500_000, 399_989) == CONTENT[10:900_000]
    assert content_of(http.get(server.url, 0, 5, None), 5) == CONTENT[:5]
    assert len(set(server.connections)) == 1


@pytest.mark.parametrize("sizes", [(900_000,), (70_000, 65_536, 65_535, 1, 8192), (65_536,) * 20, (1, 2, 3, 1 << 20)])
@pytest.mark.parametrize("piece_size", [None, 100_000])
def test_parts_of_any_sizes_are_received_however_the_bytes_arrive(server, sizes, piece_size):
    http = PlainHttp(SECONDS)
    server.piece_size = piece_size
    stop = min(len(CONTENT), sum(sizes))
    for _ in range(2):
        assert content_of(http.get(server.url, 0, stop, "e"), *sizes) == CONTENT[:stop]
    assert len(set(server.connections)) == 1


@pytest.mark.skipif(not plain_http.WAITS_FOR_ALL, reason="Linux alone bounds such a call")
def test_a_part_is_received_by_one_call_in_however_many_pieces_it_arrives(server):
    server.piece_size = 50_000
    received = PlainHttp(SECONDS).get(server.url, 0, len(CONTENT), "e")
    assert received is not None
    memory = memoryview(bytearray(len(CONTENT)))
    calls: list[str] = []

    def note(_: object, event: str, called: Any) -> None:
        if event == "c_call":
            calls.append(called.__name__)

    sys.setprofile(note)
    try:
        assert received.read_into(memory, SECONDS) == len(CONTENT)
    finally:
        sys.setprofile(None)
    received.close()
    assert memory == CONTENT
    # Besides, Python's client may receive what did not come with the headers, and the last byte.
    assert 1 <= calls.count("recv_into") <= 3


@pytest.mark.parametrize("stalls_after", [1000, 500_000])
def test_an_answer_of_which_nothing_more_comes_is_given_up_after_a_time(server, stalls_after):
    server.stalls_after = stalls_after
    received = PlainHttp(SECONDS).get(server.url, 0, len(CONTENT), "e")
    assert received is not None
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"not all of 1,024,000 bytes came within 1 s"):
        received.read_into(memoryview(bytearray(len(CONTENT))), SHORT_SEC)
    assert time.monotonic() - began < SECONDS / 3
    received.close()


@pytest.mark.parametrize(("size", "piece_size"), [(len(CONTENT), 100), (60_000, 10)])
def test_an_answer_that_keeps_coming_is_given_up_after_the_same_time(server, size, piece_size):
    server.piece_size = piece_size
    received = PlainHttp(SECONDS).get(server.url, 0, size, "e")
    assert received is not None
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        received.read_into(memoryview(bytearray(size)), SHORT_SEC)
    assert time.monotonic() - began < size // piece_size * PAUSE_SEC / 2  # half of what all of it takes at least
    received.close()


def test_a_connection_of_which_not_all_was_received_is_closed_also_where_nothing_refers_to_it(server):
    http = PlainHttp(SECONDS)
    received = http.get(server.url, 0, len(CONTENT), "e")
    assert received is not None
    del received
    gc.collect()
    assert content_of(http.get(server.url, 0, 5, "e"), 5) == CONTENT[:5]
    assert len(set(server.connections)) == 2


def test_nothing_is_received_once_it_is_closed_or_has_ended_too_soon(server):
    http = PlainHttp(SECONDS)
    memory = memoryview(bytearray(len(CONTENT)))
    received = http.get(server.url, 0, len(CONTENT), "e")
    assert received is not None
    assert received.read_into(memory[:100_000], SECONDS) == 100_000
    received.close()
    assert received.read_into(memory, SECONDS) == 0
    server.ends_after = 100_000
    received = http.get(server.url, 0, len(CONTENT), "e")
    assert received is not None
    assert received.read_into(memory, SECONDS) == 100_000
    assert received.read_into(memory, SECONDS) == 0
    received.close()


def test_python_waits_for_other_calls_as_long_as_before_a_part_was_received(server):
    http = PlainHttp(SECONDS)
    received = http.get(server.url, 0, len(CONTENT), "e")
    assert received is not None
    assert received.read_into(memoryview(bytearray(500_000)), SECONDS) == 500_000
    assert received._opened.gettimeout() == SECONDS
    received.close()


def test_a_range_is_received_in_parts_from_a_server_that_closes_each_connection(server):
    http = PlainHttp(SECONDS)
    server.says_close = True
    for _ in range(2):
        assert content_of(http.get(server.url, 10, 900_000, "e"), 1, 500_000, 399_989) == CONTENT[10:900_000]
    assert len(server.connections) == 2


def test_an_idle_connection_that_the_server_has_closed_is_replaced(server):
    http = PlainHttp(SECONDS)
    server.closes_idle = True  # without saying so, as after a time
    for _ in range(3):
        assert content_of(http.get(server.url, 0, 5, "e"), 5) == CONTENT[:5]
    assert len(server.connections) == 3


def test_an_answer_that_ends_too_soon_gives_fewer_bytes_and_its_connection_is_not_used_again(server):
    http = PlainHttp(SECONDS)
    server.ends_after = 7
    assert content_of(http.get(server.url, 0, 100, "e"), 100) == CONTENT[:7]
    server.ends_after = None
    assert content_of(http.get(server.url, 0, 100, "e"), 100) == CONTENT[:100]
    assert len(set(server.connections)) == 2


@pytest.mark.parametrize("status", [200, 301, 403, 404, 412, 500])
def test_another_client_is_to_ask_for_what_is_answered_in_another_way(server, status):
    http = PlainHttp(SECONDS)
    server.status = status
    assert http.get(server.url, 0, 100, "e") is None
    assert http.has_worked is False


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_is_busy_is_asked_by_no_other_client(server, status):
    http = PlainHttp(SECONDS)
    server.status = status
    for _ in range(3):
        with pytest.raises(HttpError, match="SlowDown"):
            http.get(server.url, 0, 100, "e")
    assert http.has_worked is None
    assert len(server.connections) == 3


@pytest.mark.parametrize("status", [404, 503])
def test_an_error_without_a_body_is_one_request(server, status):
    http = PlainHttp(SECONDS)
    server.status, server.body = status, b""
    for _ in range(3):
        with contextlib.suppress(HttpError):
            assert http.get(server.url, 0, 100, "e") is None
    assert len(server.connections) == 3


def test_an_old_connection_is_not_used_again(server, monkeypatch):
    http = PlainHttp(SECONDS)
    content_of(http.get(server.url, 0, 5, "e"), 5)
    monkeypatch.setattr(plain_http, "IDLE_SEC", -1.0)
    content_of(http.get(server.url, 0, 5, "e"), 5)
    assert len(set(server.connections)) == 2


@pytest.mark.parametrize("size", [5, 500_000])
def test_after_a_connection_without_an_answer_no_other_one_is_used_again(server, size):
    http = PlainHttp(SHORT_SEC)
    several = [http.get(server.url, 0, size, "e") for _ in range(3)]
    for received in several:
        content_of(received, size)
    server.goes_on.clear()
    with pytest.raises(OSError, match="TimeoutError"):
        http.get(server.url, 0, 5, "e")
    server.goes_on.set()
    content_of(http.get(server.url, 0, 5, "e"), 5)
    assert server.connections[-1] not in server.connections[:4]


@pytest.mark.parametrize("stalls_after", [1000, 500_000])
def test_a_thread_that_receives_ends_when_the_range_is_closed(server, stalls_after):
    http = PlainHttp(2 * SECONDS)
    server.stalls_after = stalls_after
    received = http.get(server.url, 0, len(CONTENT), "e")
    assert received is not None
    memory = memoryview(bytearray(len(CONTENT)))
    assert received.read_into(memory[:1000], SECONDS) == 1000
    outcomes: list[object] = []

    def receive() -> None:
        try:
            outcomes.append(received.read_into(memory, SECONDS))
        except (AttributeError, OSError, ValueError) as error:  # of an answer that is closed meanwhile
            outcomes.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    while not is_receiving(thread):
        assert thread.is_alive()
    received.close()
    thread.join()
    assert len(outcomes) == 1
    assert not server.gave_up


def test_once_it_has_worked_an_error_that_may_pass_is_raised_with_what_the_server_says(server):
    http = PlainHttp(SECONDS)
    content_of(http.get(server.url, 0, 5, "e"), 5)
    server.status = 500
    with pytest.raises(HttpError, match="SlowDown"):
        http.get(server.url, 0, 5, "e")
    server.status = 503
    with pytest.raises(HttpError, match=re.escape("SlowDown: Reduce your rate. (status 503)")) as raised:
        http.get(server.url, 0, 5, "e")
    assert raised.value.status == 503
    server.status = 404
    assert http.get(server.url, 0, 5, "e") is None


def test_a_server_that_is_gone_is_an_error_without_the_url(server):
    http = PlainHttp(SECONDS)
    server.http.shutdown()
    server.http.server_close()
    with pytest.raises(OSError, match=r"127\.0\.0\.1:\d+: ConnectionRefusedError") as raised:
        http.get(server.url, 0, 5, "e")
    assert "signature" not in str(raised.value)


def test_what_is_left_to_obstore_says_nothing_of_plain_http(s3: S3Server):
    bucket = s3.new_bucket()
    s3.client().put_object(Bucket=bucket, Key="a", Body=CONTENT * 2)
    options = s3.storage_options()
    mapped = options_of([f"s3://{bucket}/a"], options)
    assert mapped is not None
    client = ObstoreS3(mapped, options, SECONDS)
    assert client.cat_file(f"{bucket}/a", start=10, end=20) == CONTENT[10:20]
    kinds = [type(client.begin_range(f"{bucket}/a", 0, size, None, 10)) for size in (LEAST_BY_HTTP - 1, LEAST_BY_HTTP)]
    assert kinds == [ObstoreRange, HttpRange]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="This system has no fork.")
def test_a_forked_process_leaves_its_parents_connections_alone(server):
    http = PlainHttp(SECONDS)
    content_of(http.get(server.url, 0, 5, "e"), 5)  # its connection is kept
    idle = http.get(server.url, 0, 5, "e")
    received = http.get(server.url, 0, len(CONTENT), "e")
    assert received is not None
    content_of(idle, 5)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(OSError):
            received.read_into(memoryview(bytearray(10)), SECONDS)
            os._exit(1)
        received.close()
        os._exit(0 if content_of(http.get(server.url, 0, 5, "e"), 5) == CONTENT[:5] else 2)
    assert os.waitpid(child, 0)[1] == 0
    assert content_of(received, len(CONTENT)) == CONTENT
    assert content_of(http.get(server.url, 0, 5, "e"), 5) == CONTENT[:5]
    assert len(set(server.connections)) == 3


@pytest.fixture
def signed_lead_there(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have URLs that are signed lead to the server."""
    monkeypatch.setattr(ObstoreS3, "_call", _call_with(ObstoreS3._call, server.url))
    monkeypatch.setattr(obstore_s3, "LEAST_BY_HTTP", 0)


def _call_with(call: Any, url: str) -> Any:
    return lambda self, method, *arguments: url if method == "signed" else call(self, method, *arguments)


@pytest.mark.usefixtures("signed_lead_there")
def test_a_range_of_another_version_is_an_error_and_its_connection_is_closed(s3: S3Server, server: Server):
    options = s3.storage_options()
    mapped = options_of(["s3://bucket/key"], options)
    assert mapped is not None
    client = ObstoreS3(mapped, options, SECONDS)
    with pytest.raises(ChangedFileError, match="its etag was other then and is e now") as raised:
        client.begin_range("bucket/key", 0, 100, "other", 100)
    frames = [frame for frame, _ in traceback.walk_tb(raised.value.__traceback__)]
    refused = [frame.f_locals["received"] for frame in frames if "received" in frame.f_locals]
    assert [range_.response.isclosed() for range_ in refused] == [True]
    assert len(server.connections) == 1


@pytest.mark.usefixtures("signed_lead_there")
def test_a_server_that_knows_no_signed_urls_is_read_by_obstore_alone_from_then_on(s3: S3Server, server: Server):
    server.status = 500
    bucket = s3.new_bucket()
    s3.client().put_object(Bucket=bucket, Key="a", Body=CONTENT)
    options = s3.storage_options()
    mapped = options_of([f"s3://{bucket}/a"], options)
    assert mapped is not None
    client = ObstoreS3(mapped, options, SECONDS)
    for _ in range(3):
        assert client.begin_range(f"{bucket}/a", 0, 10, None, 10).read_into(memoryview(bytearray(10)), SECONDS) == 10
    assert len(server.connections) == 1
