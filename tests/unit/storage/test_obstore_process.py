"""obstore in another process: it answers as here, its end is noticed, and it ends with the process that started it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import spawn
from typing import Any

import pytest
from conftest import S3Server
from jobs.processes import living, wait_until_none

from torch_dataloader_utils.storage import obstore_process, obstore_s3
from torch_dataloader_utils.storage.obstore_process import ObstoreProcess
from torch_dataloader_utils.storage.obstore_s3 import ObstoreS3

pytestmark = [pytest.mark.usefixtures("leaves_nothing_behind")]

CONTENT = bytes(range(256)) * 1000
SECONDS = 60.0


@pytest.fixture(scope="module")
def bucket(s3: S3Server) -> str:
    """A bucket with two objects."""
    bucket = s3.new_bucket()
    for key in ("d/a", "d/b"):
        s3.client().put_object(Bucket=bucket, Key=key, Body=CONTENT)
    return bucket


@pytest.fixture
def clients(s3: S3Server) -> Iterator[list[ObstoreS3]]:
    """A client that asks obstore here, and one that asks it in another process."""
    options = s3.storage_options()
    mapped = obstore_s3.options_of(["s3://bucket/d"], options)
    assert mapped is not None
    there = ObstoreS3(mapped, options, SECONDS, "another process")
    yield [ObstoreS3(mapped, options, SECONDS), there]
    there.end_process()


def outcome_of(client: ObstoreS3, method: str, *arguments: Any, **options: Any) -> Any:
    """Return what a method returns but for the seconds that it took, or the error with its words."""
    try:
        returned = getattr(client, method)(*arguments, **options)
    except Exception as error:  # noqa: BLE001 - compared
        return type(error), re.sub(r" in [\d.]+\w*s", "", str(error))
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
    here, there = (outcome_of(client, method, place.format(bucket), *arguments, **options) for client in clients)
    assert here == there


def test_what_is_received_in_parts_later_is_received_by_s3fs(clients, bucket):
    there = clients[1]
    there.end_process()
    received = there.begin_range(f"{bucket}/d/a", 10, 1000, None, 990)
    assert b"".join(map(bytes, received.read(990))) == CONTENT[10:1000]
    received.close()
    assert type(there.s3fs).__name__ == "OneAttemptS3"


def test_a_process_that_was_killed_is_an_error_and_the_next_call_starts_another(clients, bucket):
    there = clients[1]
    assert len(there.find(f"{bucket}/d", detail=True)) == 2
    first = there._process
    process = first._process
    os.kill(process.pid, signal.SIGSTOP)
    os.kill(process.pid, signal.SIGKILL)  # while it can answer no more
    with pytest.raises(OSError, match=r"has ended|Broken pipe"):
        first.call("head", bucket, "d/a")
    process.wait()
    assert there.info(f"{bucket}/d/a")["size"] == len(CONTENT)
    assert there._process is not first


@pytest.mark.parametrize("fault", ["no interpreter", "no obstore", "frozen", "slow"])
def test_s3fs_reads_where_no_process_can_be_started(clients, bucket, monkeypatch, tmp_path, fault):
    if fault == "no interpreter":
        monkeypatch.setattr(spawn, "get_executable", lambda: str(tmp_path / "python"))
    elif fault == "no obstore":
        monkeypatch.setattr(sys, "path", [entry for entry in sys.path if "site-packages" not in entry])
    elif fault == "frozen":
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    else:
        monkeypatch.setattr(obstore_process, "MOST_START_SEC", 0.0)
    there = clients[1]
    assert there.info(f"{bucket}/d/a")["size"] == len(CONTENT)
    assert there.place == "nowhere"


STARTS_ONE = """
import os, signal, sys
from torch_dataloader_utils.storage.obstore_process import ObstoreProcess
process = ObstoreProcess({"region": "us-east-1"}, 1.0)
assert "obstore" not in sys.modules
print(process._process.pid, flush=True)
sys.stdin.readline()
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["returned", "killed"])
def test_it_ends_with_the_process_that_started_it_however_that_ends(end):
    process = subprocess.Popen(
        [sys.executable, "-c", STARTS_ONE, end], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        started = int(process.stdout.readline())
        process.communicate("\n")
    assert not wait_until_none(lambda: started in living())


def test_a_forked_copy_leaves_it_running():
    process = ObstoreProcess({"region": "us-east-1"}, 1.0)
    child = os.fork()
    if child == 0:
        process.end()
        os._exit(0)
    os.waitpid(child, 0)
    assert not process.has_ended
    process.end()
