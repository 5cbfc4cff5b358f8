"""Fixtures: a real S3 server, and the check that a test leaves no process and no shared memory behind."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import pytest
import requests
from jobs.processes import mark_semaphores, own_children, ownerless, shared_memory, wait_until_none

JOBS = Path(__file__).parent / "jobs"

ACCESS_KEY = "MADEUPACCESSKEY00017"
SECRET_KEY = "made-up/secret+key/that/must/not/leak"


@dataclass(frozen=True)
class S3Server:
    """A private S3 endpoint.

    Attributes:
        url: The endpoint.
        process: Its process.
    """

    url: str
    process: subprocess.Popen[str]
    _numbers: Iterator[int] = field(default_factory=itertools.count, repr=False)

    def storage_options(self, key: str = ACCESS_KEY, secret: str = SECRET_KEY) -> dict[str, Any]:
        """Return what s3fs needs to reach it."""
        return {
            "key": key,
            "secret": secret,
            "client_kwargs": {"endpoint_url": self.url, "region_name": "us-east-1"},
        }

    def client(self, service: str = "s3") -> Any:
        """Return a client that this package has no part in."""
        return boto3.client(
            service,
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
        )

    def new_bucket(self, directory: Path | None = None) -> str:
        """Make a bucket, with everything below a directory in it, and return its name."""
        bucket = f"bucket-{next(self._numbers)}"
        client = self.client()
        client.create_bucket(Bucket=bucket)
        for path in sorted(directory.rglob("*")) if directory else ():
            if path.is_file():
                client.upload_file(str(path), bucket, path.relative_to(directory).as_posix())
        return bucket

    def check_credentials(self, yes: bool) -> None:
        """Make the server look at credentials from now on, or let everybody in."""
        body = b"0" if yes else b"inf"
        requests.post(f"{self.url}/moto-api/reset-auth", data=body, timeout=10).raise_for_status()


def start_s3_server() -> S3Server:
    """Start a server of its own process and wait until it serves. Whoever starts it ends it."""
    process = subprocess.Popen(
        [sys.executable, str(JOBS / "s3_server.py"), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C is for the tests: they end it
    )
    assert process.stdout is not None
    port = process.stdout.readline().strip()
    assert port, f"the S3 server ended with status {process.wait()}"
    return S3Server(f"http://127.0.0.1:{port}", process)


def stop_s3_server(server: S3Server) -> None:
    """End a server."""
    server.process.kill()
    server.process.wait()
    assert server.process.stdout is not None
    server.process.stdout.close()


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """A real S3 server, in a process of its own, for the whole test run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        server = start_s3_server()
        try:
            yield server
        finally:
            stop_s3_server(server)


@pytest.fixture
def mortal_s3(s3: S3Server) -> Iterator[S3Server]:
    """A second S3 server, which the test may end."""
    server = start_s3_server()
    try:
        yield server
    finally:
        stop_s3_server(server)


mark_semaphores()

FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note whether a test failed, for its fixtures."""
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that the test leaves no process and no shared memory behind."""
    processes, files = own_children(), shared_memory()
    yield
    if request.node.stash[FAILED]:
        return  # its loaders live on in the traceback that pytest shows
    gc.collect()
    left = wait_until_none(lambda: own_children() - processes)
    assert not left, f"processes left behind: {left}"
    blocks = wait_until_none(lambda: ownerless(shared_memory() - files))
    assert not blocks, f"shared memory left behind: {blocks}"
