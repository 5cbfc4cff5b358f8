"""A range that is requested once and received in parts: the same bytes as from the object, whatever happens between."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import S3Server
from fsspec.asyn import get_loop

from torch_dataloader_utils.storage.attempts import within
from torch_dataloader_utils.storage.obstore import s3 as obstore_s3
from torch_dataloader_utils.storage.obstore.options import options_of
from torch_dataloader_utils.storage.obstore.plain_http import HttpRange
from torch_dataloader_utils.storage.range_stream import LARGEST_REST, RangeStream
from torch_dataloader_utils.storage.request_size import Answer
from torch_dataloader_utils.storage.s3 import OneAttemptS3, S3Range

CONTENT = np.random.default_rng(0).integers(0, 256, 3_000_000, np.uint8).tobytes()
PARTS = [(10, 400_000), (400_000, 400_001), (400_050, 2_400_000), (2_400_000, 2_900_000)]
SECONDS = 60.0


@pytest.fixture(params=["s3fs", "obstore", "plain HTTP"])
def client(request: pytest.FixtureRequest, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str, str]:
    """A client, an object with `CONTENT`, and its etag."""
    bucket = s3.new_bucket()
    put = s3.client().put_object(Bucket=bucket, Key="a", Body=CONTENT)
    options = s3.storage_options()
    fs: Any = OneAttemptS3(**options)
    if request.param != "s3fs":
        mapped = options_of([f"s3://{bucket}/a"], options)
        assert mapped is not None
        least = {"obstore": sys.maxsize, "plain HTTP": 0}[request.param]
        monkeypatch.setattr(obstore_s3, "LEAST_BY_HTTP", least)
        fs = obstore_s3.ObstoreS3(mapped, options, SECONDS)
        kind = {"obstore": obstore_s3.ObstoreRange, "plain HTTP": HttpRange}[request.param]
        begin_range = fs.begin_range

        def of_kind(*wanted: Any) -> Any:
            answer = begin_range(*wanted)
            assert type(answer) is kind
            return answer

        fs.begin_range = of_kind
    return fs, f"{bucket}/a", put["ETag"].strip('"')


class Requests:
    """Makes requests, and remembers their ranges."""

    def __init__(self, client: tuple[Any, str, str]) -> None:
        self.fs, self.location, self.etag = client
        self.ranges: list[tuple[int, int]] = []

    def begin(self, seconds: float, start: int, stop: int, part: int) -> Any:
        assert 0 < seconds <= SECONDS
        self.ranges.append((start, stop))
        return self.fs.begin_range(self.location, start, stop, self.etag, part)


def received(stream: RangeStream, parts: list[tuple[int, int]]) -> list[bytes]:
    return [part_of(stream, start, stop) for start, stop in parts]


def part_of(stream: RangeStream, start: int, stop: int, seconds: float = SECONDS) -> bytes:
    return stream.read(seconds, start, stop).to_pybytes()


def stream_of(
    begin: Callable[..., Any],
    stop: int = 2_900_000,
    *,
    start: int = 10,
    size: int = len(CONTENT),
    oldest_sec: float = SECONDS,
    note: Callable[[Answer], object] = lambda _: None,
) -> RangeStream:
    return RangeStream(begin, (start, stop), size, oldest_sec, note)


def test_parts_of_one_request_have_the_objects_bytes_also_behind_a_gap(client):
    requests, answers = Requests(client), list[Answer]()
    stream = stream_of(requests.begin, note=answers.append)
    assert received(stream, PARTS) == [CONTENT[start:stop] for start, stop in PARTS]
    assert requests.ranges == [(10, 2_900_000)]
    assert [answer.size for answer in answers] == [399_990]


def test_nearly_a_whole_object_is_requested_as_a_whole_and_its_rest_only_after_an_error(client):
    requests = Requests(client)
    ends = [(LARGEST_REST, 1_000_000), (1_000_000, len(CONTENT) - LARGEST_REST)]
    extent = {"start": ends[0][0], "stop": ends[-1][1]}
    assert received(stream_of(requests.begin, **extent), ends) == [CONTENT[start:stop] for start, stop in ends]
    assert requests.ranges == [(0, len(CONTENT))]
    stream = stream_of(requests.begin, **extent, oldest_sec=0.0)
    parts = [part_of(stream, start, stop) for start, stop in ends if not time.sleep(0.001)]
    assert parts == [CONTENT[start:stop] for start, stop in ends]
    assert requests.ranges[1:] == [(0, len(CONTENT)), (1_000_000, len(CONTENT))]


def test_a_request_that_leaves_out_more_of_its_object_leaves_all_of_that_out(client):
    requests = Requests(client)
    for extent in ((LARGEST_REST + 1, len(CONTENT)), (0, len(CONTENT) - LARGEST_REST - 1)):
        stream = stream_of(requests.begin, start=extent[0], stop=extent[1])
        assert received(stream, [extent]) == [CONTENT[slice(*extent)]]
        assert requests.ranges.pop() == extent


def test_small_parts_tell_together_how_long_an_answer_took(client):
    requests, answers = Requests(client), list[Answer]()
    stream = stream_of(requests.begin, note=answers.append)
    bounds = range(10, 10 + 8 * 100_000, 100_000)
    received(stream, list(itertools.pairwise(bounds)))
    assert [answer.size for answer in answers] == [300_000]


def test_an_answer_that_is_too_old_is_requested_again_for_the_rest(client):
    requests = Requests(client)
    stream = stream_of(requests.begin, oldest_sec=0.0)
    parts = [part_of(stream, start, stop) for start, stop in PARTS if not time.sleep(0.001)]
    assert parts == [CONTENT[start:stop] for start, stop in PARTS]
    assert requests.ranges == [(start, 2_900_000) for start, _ in PARTS]


def test_a_request_may_be_made_before_its_first_part_is_read(client):
    requests, answers = Requests(client), list[Answer]()
    stream = stream_of(requests.begin, note=answers.append)
    stream.begin(SECONDS, *PARTS[0])
    assert requests.ranges == [(10, 2_900_000)]
    assert received(stream, PARTS) == [CONTENT[start:stop] for start, stop in PARTS]
    assert requests.ranges == [(10, 2_900_000)]
    assert [answer.size for answer in answers] == [399_990]
    assert answers[0].waited > 0


def test_a_request_that_fails_before_its_first_part_is_read_is_made_again(client):
    answering, requests = iter([False, True]), Requests(client)

    def begin(*wanted: Any) -> Any:
        if next(answering):
            return requests.begin(*wanted)
        raise OSError("no answer")

    stream = stream_of(begin)
    with pytest.raises(OSError, match="no answer"):
        stream.begin(SECONDS, *PARTS[0])
    assert received(stream, PARTS) == [CONTENT[start:stop] for start, stop in PARTS]


def test_another_version_is_an_error(client):
    requests = Requests((*client[:2], "0" * 32))
    with pytest.raises(Exception, match=r"(?i)pre-?condition"):
        stream_of(requests.begin, 100, start=0).read(SECONDS, 0, 10)


class Ending:
    """An answer that ends after some bytes, which no server can be told to do at the same byte each time."""

    def __init__(self, content: bytes) -> None:
        self._left = content
        self.is_closed = False

    def read_into(self, memory: memoryview, seconds: float) -> int:
        assert 0 < seconds <= SECONDS
        taken, self._left = self._left[: len(memory)], self._left[len(memory) :]
        memory[: len(taken)] = taken
        return len(taken)

    def close(self) -> None:
        self.is_closed = True


def test_after_an_answer_that_ends_too_soon_the_same_part_is_requested_again():
    answers: list[Ending] = []

    def begin(seconds: float, start: int, stop: int, part: int) -> Ending:
        del seconds, part
        answers.append(Ending(CONTENT[start : stop if answers else start + 15]))
        return answers[-1]

    stream = stream_of(begin, 100, start=0)
    assert part_of(stream, 0, 10) == CONTENT[:10]
    with pytest.raises(OSError, match="5 bytes came back of bytes 10 to 20"):
        stream.read(SECONDS, 10, 20)
    assert answers[0].is_closed
    assert received(stream, [(10, 20), (20, 100)]) == [CONTENT[10:20], CONTENT[20:100]]
    assert len(answers) == 2
    assert answers[1].is_closed


@pytest.mark.parametrize("client", ["obstore", "s3fs"])
def test_a_client_gives_up_a_part_of_which_nothing_more_comes(client):
    goes_on = threading.Event()

    def pieces() -> Iterator[bytes]:
        yield b"first"
        goes_on.wait(SECONDS)

    class Body:
        async def read(self, size: int) -> bytes:
            await asyncio.sleep(SECONDS)
            return bytes(size)

        def close(self) -> None:
            """Do nothing."""

    answer: Any = obstore_s3.ObstoreRange(pieces()) if client == "obstore" else S3Range(get_loop(), Body())
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        answer.read_into(memoryview(bytearray(100)), 0.1)
    assert time.monotonic() - began < SECONDS / 3
    goes_on.set()


def test_a_part_that_takes_too_long_is_a_timeout_and_closes_its_request():
    class Slow(Ending):
        def read_into(self, memory: memoryview, seconds: float) -> int:
            return within(seconds, self._read_late, memory)

        def _read_late(self, memory: memoryview) -> int:
            time.sleep(0.2)
            return super().read_into(memory, SECONDS)

    answer = Slow(CONTENT)
    stream = stream_of(lambda *_: answer, 100, start=0)
    with pytest.raises(TimeoutError):
        stream.read(0.01, 0, 10)
    assert answer.is_closed
