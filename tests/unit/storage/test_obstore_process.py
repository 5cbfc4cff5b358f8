"""obstore in another process: it answers as here, its end is noticed, and it ends with the process that started it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import spawn
from typing import Any

import pytest
from conftest import S3Server
from jobs.processes import inherited, living, own_children, wait_until_none

from torch_dataloader_utils.storage.filesystem import Storage
from torch_dataloader_utils.storage.obstore import process as obstore_process
from torch_dataloader_utils.storage.obstore.options import options_of
from torch_dataloader_utils.storage.obstore.process import ObstoreProcess
from torch_dataloader_utils.storage.obstore.s3 import ObstoreS3
from torch_dataloader_utils.storage.s3 import OneAttemptS3
from torch_dataloader_utils.storage.stored_file import StoredFile

pytestmark = [pytest.mark.usefixtures("leaves_nothing_behind")]

CONTENT = bytes(range(256)) * 1000
SECONDS = 60.0
OPTIONS = {"region": "us-east-1", "aws_access_key_id": "K", "aws_secret_access_key": "S"}


@pytest.fixture(scope="module")
def bucket(s3: S3Server) -> str:
    """A bucket with two objects."""
    bucket = s3.new_bucket()
    for key in ("d/a", "d/b"):
        s3.client().put_object(Bucket=bucket, Key=key, Body=CONTENT)
    return bucket


@pytest.fixture
def clients(s3: S3Server) -> Iterator[list[ObstoreS3]]:
    """A client whose obstore runs here, and one whose obstore runs in another process."""
    options = s3.storage_options()
    mapped = options_of(["s3://bucket/d"], options)
    assert mapped is not None
    here = ObstoreS3(mapped, options, SECONDS)
    there = replace(here, runs_in="another process")
    yield [here, there]
    there.end_process()


def outcome_of(client: ObstoreS3, method: str, *arguments: Any, **options: Any) -> Any:
    """Return what a method returns but for the seconds that it took, or the error with its words."""
    try:
        returned = getattr(client, method)(*arguments, **options)
    except Exception as error:  # noqa: BLE001 - compared
        return type(error).__name__, re.sub(r" in [\d.]+\w*s", "", str(error))
    return bytes(returned[0]) if method == "get_range" else returned


@pytest.mark.parametrize(
    ("method", "place", "arguments", "options"),
    [
        ("info", "{}/d/a", (), {}),
        ("info", "{}/d", (), {}),
        ("info", "{}", (), {}),
        ("info", "{}/none", (), {}),
        ("head", "{}/d", (), {}),
        ("info", "no-such-bucket/d", (), {}),
        ("find", "{}/d", (), {"detail": True}),
        ("find", "{}/none", (), {"detail": True}),
        ("find", "no-such-bucket/d", (), {"detail": True}),
        ("get_range", "{}/d/a", (10, 200_000, None), {}),
        ("get_range", "{}/none", (0, 1, None), {}),
        ("get_range", "{}/d/a", (0, 1, "another"), {}),
    ],
    ids=[
        "an object",
        "a directory",
        "a bucket",
        "nothing",
        "no object",
        "no bucket",
        "objects below",
        "nothing below",
        "below no bucket",
        "a range",
        "a range of nothing",
        "a range of another version",
    ],
)
def test_another_process_answers_as_this_one(clients, bucket, method, place, arguments, options):  # noqa: PLR0917
    assert clients[1].start()
    here, there = (outcome_of(client, method, place.format(bucket), *arguments, **options) for client in clients)
    assert here == there


def test_a_panic_and_an_error_are_errors_of_the_call():
    there = ObstoreProcess({**OPTIONS, "endpoint": "localhost:9000"}, SECONDS)  # no scheme
    with pytest.raises(ValueError, match=r"Uri|URI|URL"):
        there.call("head", "bucket", "key")
    with pytest.raises(AttributeError, match="no_such_method"):
        there.call("no_such_method")
    there.end()


def test_a_process_that_ended_is_an_error_of_the_call_and_started_once_more(clients, bucket):
    there = clients[1]
    for _ in range(2):
        assert there.start()
        assert len(there.find(f"{bucket}/d", detail=True)) == 2
        process = there._process
        process._process.kill()
        process._process.wait()
        with pytest.raises(OSError, match=r"has ended with status -9|Broken pipe"):
            process.call("head", bucket, "d/a")
        assert not wait_until_none(lambda: not process.has_ended)  # noqa: B023 - called in this round
    assert not there.start()


def test_calls_that_wait_raise_when_the_process_ends(clients, bucket):
    there = clients[1]
    assert there.start()
    os.kill(there._process._process.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(there.head, f"{bucket}/d/a") for _ in range(8)]
        assert not wait_until_none(lambda: len(there._process._outcomes._expected) < len(calls))
        there.end_process()
        for call in calls:
            with pytest.raises(OSError, match="has ended"):
                call.result()
    assert not there.start()


def test_a_call_that_is_sent_as_the_process_ends_says_so(clients, bucket, monkeypatch):
    there = clients[1]
    assert there.start()
    process = there._process
    monkeypatch.setattr(process._outcomes, "end", lambda: None)  # nobody has noticed yet
    process._process.kill()
    process._process.wait()
    with pytest.raises(OSError, match="has ended"):
        there.head(f"{bucket}/d/a")
    monkeypatch.undo()
    there.end_process()


def test_a_process_that_is_being_started_is_ended_as_well(clients, monkeypatch):
    there = clients[1]
    before = own_children()
    starting = threading.Event()
    start = ObstoreProcess.__init__

    def slowly(self: ObstoreProcess, *args: Any) -> None:
        starting.set()
        time.sleep(1)  # `end_process` is called meanwhile, and waits
        start(self, *args)

    monkeypatch.setattr(ObstoreProcess, "__init__", slowly)
    threads = [threading.Thread(target=there.start) for _ in range(4)]
    for thread in threads:
        thread.start()
    starting.wait()
    there.end_process()
    for thread in threads:
        thread.join()
    assert not there.start()
    assert own_children() <= before


@pytest.mark.parametrize("fault", ["no interpreter", "no obstore", "frozen", "slow"])
def test_s3fs_reads_where_no_process_can_be_started(s3, bucket, monkeypatch, tmp_path, fault):
    if fault == "no interpreter":
        monkeypatch.setattr(spawn, "get_executable", lambda: str(tmp_path / "python"))
    elif fault == "no obstore":
        monkeypatch.setattr(obstore_process.sys, "path", [])
    elif fault == "frozen":
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    else:
        monkeypatch.setattr(obstore_process, "MOST_START_SEC", 0.0)
    url = f"s3://{bucket}/d"
    storage, [location] = Storage.for_urls([url], s3.storage_options(), client="obstore in other processes")
    assert type(storage.fs) is OneAttemptS3
    monkeypatch.undo()
    assert sorted(storage.call("find", location)) == [f"{bucket}/d/a", f"{bucket}/d/b"]


def test_a_file_that_a_table_lists_without_an_etag_is_read_there_too(s3, bucket):
    urls = [f"s3://{bucket}/d/a"]
    storage, [location] = Storage.for_urls(urls, s3.storage_options(), client="obstore in other processes")
    listed = StoredFile("a", location, len(CONTENT), None, None)
    assert storage.read(listed, 10, 300) == CONTENT[10:300]
    assert isinstance(storage.fs, ObstoreS3)
    assert storage.fs._s3fs is None  # it was not needed
    storage.end_opening()


@pytest.mark.parametrize("path", ["d", "none"])
def test_a_directory_is_found_though_the_first_listing_fails(s3, bucket, monkeypatch, path):
    def fails(self: ObstoreS3, location: str) -> Any:
        monkeypatch.undo()
        raise OSError("for a moment")

    monkeypatch.setattr(ObstoreS3, "listed", fails)
    storage, [location] = Storage.for_urls([f"s3://{bucket}/{path}"], s3.storage_options(), client="obstore")
    info, below = storage.info_and_below(location)
    assert info is None if path == "none" else (info["type"], len(below)) == ("directory", 2)


STARTS_ONE = """
import os, signal, sys
from torch_dataloader_utils.storage.obstore.process import ObstoreProcess
process = ObstoreProcess({"region": "us-east-1"}, 60.0)
assert "obstore" not in sys.modules
print(process._process.pid, flush=True)
sys.stdin.readline()
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["returned", "killed"])
def test_it_ends_with_the_process_that_started_it_however_that_ends(end):
    process = subprocess.Popen(
        [sys.executable, "-c", STARTS_ONE, end],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=inherited(),
    )
    with process:
        assert process.stdout is not None
        started = int(process.stdout.readline())
        process.communicate("\n")
    assert process.returncode == (0 if end == "returned" else -signal.SIGKILL)
    assert not wait_until_none(lambda: started in living())


def test_a_forked_copy_leaves_it_running():
    process = ObstoreProcess(OPTIONS, SECONDS)
    child = os.fork()
    if child == 0:
        process.end()
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(AttributeError):  # it answers
        process.call("no_such_method")
    process.end()
    assert process.has_ended
