"""Attempts at an operation of a storage: how many, how long, the warning, and what is not tried again."""

from __future__ import annotations

import errno
import math
import os
import re
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from botocore.exceptions import ClientError, NoCredentialsError
from jobs.processes import wait_until_none
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from torch_dataloader_utils import StorageRetryWarning, UnreadableFileError
from torch_dataloader_utils.storage import attempts
from torch_dataloader_utils.storage.attempts import Retry, attempt, within
from torch_dataloader_utils.storage.causes import meaning, most_attempts, most_attempts_locally

SECRET = "made-up-secret"


class Clock:
    """A clock that only sleeping moves, and the pauses that were slept."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(attempts, "time", clock)
    return clock


def run(action: Callable[[float], Any], timeout_sec: float = 120.0, on_retry: Callable[[Retry], object] = repr) -> Any:
    return attempt(
        action,
        timeout_sec=timeout_sec,
        most_attempts=most_attempts,
        name=lambda: "row group 3 of s3://bucket/one.parquet",
        clean=lambda text: text.replace(SECRET, "***"),
        on_retry=on_retry,
    )


def failing(times: int, error: Exception) -> Callable[[float], str]:
    """Return an action that fails so many times."""
    errors = [error] * times

    def action(_: float) -> str:
        if errors:
            raise errors.pop()
        return "read"

    return action


@pytest.mark.filterwarnings("ignore::torch_dataloader_utils.StorageRetryWarning")
def test_an_operation_that_always_fails_is_tried_some_twenty_times_in_two_minutes(clock):
    begun = []

    def action(_: float) -> None:
        begun.append(clock.now)
        raise OSError(errno.EBUSY, f"SlowDown {SECRET}")

    with pytest.raises(UnreadableFileError) as raised:
        run(action)
    assert 18 <= len(begun) <= 31
    assert 110 <= clock.now < 120
    text = f"row group 3 of s3://bucket/one.parquet: no success in {len(begun)} attempts within storage_timeout=120 s; "
    assert str(raised.value) == f"{text}the last failed with OSError: [Errno {errno.EBUSY}] SlowDown ***"
    assert raised.value.__context__ is None
    longest = [min(10, 0.1 * 2**number) for number in range(len(clock.pauses))]
    assert all(most / 2 <= pause <= most for pause, most in zip(clock.pauses, longest, strict=True))


def test_what_fails_for_a_moment_is_read_without_a_word(clock, recwarn):
    assert run(failing(3, OSError("reset"))) == "read"
    assert not recwarn.list


def test_one_warning_names_file_and_cause_after_ten_seconds_of_failure(clock):
    with pytest.warns(StorageRetryWarning) as caught:
        assert run(failing(12, OSError(f"reset {SECRET}"))) == "read"
    assert len(caught) == 1
    text = re.sub(r"for \d\d s", "for some s", str(caught[0].message))
    begin = "row group 3 of s3://bucket/one.parquet: no success for some s: OSError: reset ***;"
    assert text == f"{begin} trying again for up to storage_timeout=120 s"


def test_an_attempt_may_take_half_of_the_time_and_the_last_what_is_left(clock):
    given = []

    def action(seconds: float) -> None:
        given.append(seconds)
        clock.now += seconds
        raise TimeoutError("no answer")

    with pytest.warns(StorageRetryWarning), pytest.raises(UnreadableFileError, match=r"in 2 attempts"):
        run(action, 60.0)
    assert given[0] == 30
    assert given[1] == pytest.approx(60 - 30 - clock.pauses[0])


# What an error means ------------------------------------------------------------------------------------------------


def of_http(status: int) -> Exception:
    """Return an error as fsspec's http filesystem raises it for a file's size."""
    info = aiohttp.RequestInfo(URL("http://host/file"), "GET", CIMultiDictProxy(CIMultiDict()), URL("http://host/file"))
    missing = FileNotFoundError("http://host/file")
    missing.__cause__ = aiohttp.ClientResponseError(info, (), status=status, message="as it says")
    return missing


def of_s3(status: int, code: str, builtin: type[OSError] = OSError) -> Exception:
    """Return an error as s3fs raises it."""
    answer = {"Error": {"Code": code, "Message": "as it says"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error = builtin("as it says")
    error.__cause__ = ClientError(answer, "GetObject")
    return error


MEANINGS = {
    "http 401": (of_http(401), PermissionError, True),
    "http 403": (of_http(403), PermissionError, True),
    "http 404": (of_http(404), FileNotFoundError, True),
    "http 410": (of_http(410), FileNotFoundError, True),
    "http 429": (of_http(429), aiohttp.ClientResponseError, False),
    "http 503": (of_http(503), aiohttp.ClientResponseError, False),
    "s3 400 expired": (of_s3(400, "ExpiredToken", PermissionError), PermissionError, True),
    "s3 400": (of_s3(400, "InvalidArgument"), OSError, True),
    "s3 403": (of_s3(403, "AccessDenied", PermissionError), PermissionError, True),
    "s3 404": (of_s3(404, "NoSuchKey", FileNotFoundError), FileNotFoundError, True),
    "s3 408": (of_s3(408, "RequestTimeout", TimeoutError), OSError, False),
    "s3 412": (of_s3(412, "PreconditionFailed"), OSError, True),
    "s3 500": (of_s3(500, "InternalError"), OSError, False),
    "s3 503": (of_s3(503, "SlowDown"), OSError, False),
    "no credentials": (NoCredentialsError(), NoCredentialsError, True),
    "a wrong option": (TypeError("unexpected keyword"), TypeError, False),
    "stale": (OSError(errno.ESTALE, "Stale file handle"), OSError, False),
    "a cut answer": (aiohttp.http_exceptions.ContentLengthError("not enough data"), Exception, False),
    "cut JSON": (UnicodeDecodeError("utf-8", b"", 0, 1, "cut"), ValueError, False),
    "any other": (ConnectionResetError("reset"), ConnectionResetError, False),
}


@pytest.mark.parametrize("case", MEANINGS)
def test_an_error_means_what_its_status_says_and_is_final_or_not(case):
    error, expected, final = MEANINGS[case]
    found = meaning(error)
    assert isinstance(found, expected)
    assert isinstance(found, FileNotFoundError) == (expected is FileNotFoundError)
    assert (most_attempts(found) == 1) == final


def test_a_version_that_the_storage_no_longer_has_is_a_file_that_changed(clock):
    with pytest.raises(UnreadableFileError, match=r"^row group 3 of s3://bucket/one.parquet: it changed since it was"):
        run(failing(9, of_s3(412, "PreconditionFailed")))
    assert not clock.pauses


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_of_local_files_only_errors_of_the_system_that_pass_are_tried_again(number):
    assert most_attempts_locally(OSError(number, "as the system says")) == math.inf
    assert most_attempts_locally(OSError("the file was written while it was read")) == 1
    assert most_attempts_locally(PermissionError(errno.EACCES, "no")) == 1
    assert most_attempts_locally(ValueError("cannot mmap an empty file")) == 1


def test_an_error_of_a_wrong_option_is_tried_only_three_times(clock):
    with pytest.raises(TypeError, match="unexpected keyword"):
        run(failing(9, TypeError("unexpected keyword")))
    assert len(clock.pauses) == 2


# What never returns -------------------------------------------------------------------------------------------------


def test_a_call_that_never_returns_is_given_up_and_does_not_keep_the_process():
    answered = threading.Event()
    before = set(threading.enumerate())
    try:
        with pytest.raises(TimeoutError, match=r"^no answer within 0\.05 s$"):
            within(0.05, answered.wait)
        assert all(thread.daemon for thread in set(threading.enumerate()) - before)
    finally:
        answered.set()


def test_calls_one_after_another_share_threads_that_end_when_none_comes(monkeypatch):
    monkeypatch.setattr(attempts, "IDLE_SEC", 0.2)
    threads = {within(60, threading.current_thread) for _ in range(50) if not time.sleep(0.01)}
    assert len(threads) < 25
    assert not wait_until_none(lambda: {thread for thread in threads if thread.is_alive()})


def test_a_thread_that_waits_for_a_call_keeps_nothing_of_the_last_one():
    class Kept:
        def called(self) -> None:
            pass

    kept = Kept()
    alive = weakref.ref(kept)
    within(60, kept.called)
    del kept
    assert not wait_until_none(lambda: {1} if alive() else set())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="This system has no fork.")
def test_a_forked_process_calls_in_threads_of_its_own():
    within(60, time.time)
    time.sleep(0.01)  # its thread waits for another call
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if within(10, os.getpid) == os.getpid() else 1
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_error_of_a_call_is_raised_where_it_is_waited_for():
    with pytest.raises(ZeroDivisionError):
        within(60.0, lambda: 1 // 0)
    assert within(60.0, max, 1, 2) == 2


def test_each_attempt_that_another_follows_is_told_without_secrets(clock):
    told: list[Retry] = []
    assert run(failing(2, OSError(f"lost {SECRET}")), on_retry=told.append) == "read"
    assert [(retry.name, retry.cause, retry.number) for retry in told] == [
        ("row group 3 of s3://bucket/one.parquet", "OSError: lost ***", number) for number in (1, 2)
    ]
    assert [retry.seconds for retry in told] == [0, clock.pauses[0]]


def test_an_attempt_that_none_follows_is_not_told(clock):
    told: list[Retry] = []
    with pytest.raises(FileNotFoundError):
        run(failing(9, FileNotFoundError("gone")), on_retry=told.append)
    assert not told
