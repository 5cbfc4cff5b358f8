"""What holds for all tests: ids in plain words, Hypothesis' profiles, a real S3 server, and nothing left behind."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import pytest
import requests
from faults.outcome import Record, recorded
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from jobs.forked import preload_in_fork_server
from jobs.processes import (
    collect_garbage,
    inherited,
    mark_semaphores,
    own_children,
    ownerless,
    shared_memory,
    use_huge_pages,
    wait_until_none,
)
from plain_ids import plain_id
from xdist.scheduler import LoadScopeScheduling

JOBS = Path(__file__).parent / "support" / "jobs"

# Tests start hundreds of processes. Where bytecode is not kept, each of them would compile the package again, and each
# worker of pytest-xdist all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What is imported and collected stays: to look through it for garbage again and again takes a quarter of that time.
gc.disable()

# The BLAS of NumPy would end its threads before every fork and start them again after it, and they spin.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A shell that starts the tests in the background ignores interrupts for them, and for all that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Nothing that Hypothesis does depends on how fast the machine is, and `make test` tries the same examples every time.
# `make soak` tries others each time, with --hypothesis-profile=random.
settings.register_profile(
    "random",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    print_blob=True,
)
settings.register_profile(
    "repeatable", settings.get_profile("random"), max_examples=40, derandomize=True, database=None
)
settings.load_profile("repeatable")

# By itself Hypothesis also tries the numbers and texts that stand in the modules that are loaded: which these are
# depends on the tests that ran before.
providers.is_local_module_file = lambda _: False

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
    _clients: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def storage_options(self, key: str = ACCESS_KEY, secret: str = SECRET_KEY) -> dict[str, Any]:
        """Return what s3fs needs to reach it."""
        return {
            "key": key,
            "secret": secret,
            "client_kwargs": {"endpoint_url": self.url, "region_name": "us-east-1"},
        }

    def client(self, service: str = "s3") -> Any:
        """Return a client that this package has no part in: one of each service, because making one takes a while."""
        if service not in self._clients:
            self._clients[service] = boto3.client(
                service,
                endpoint_url=self.url,
                region_name="us-east-1",
                aws_access_key_id=ACCESS_KEY,
                aws_secret_access_key=SECRET_KEY,
            )
        return self._clients[service]

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
    """Start a server of its own process and wait until it serves. The caller ends it."""
    process = subprocess.Popen(
        [sys.executable, str(JOBS / "s3_server.py"), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=inherited(),
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


mark_semaphores(os.getpid())


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what the reliability tests take."""
    group = parser.getgroup("reliability")
    group.addoption("--minutes", default="5", help="the time that each long reliability test may take")
    group.addoption("--outcomes", help="the file that gets a line of JSON for each fault that was tried")


preload_in_fork_server()


@pytest.fixture(scope="session")
def preloaded_frameworks() -> None:
    """Let forked processes find the frameworks imported, too: that takes seconds. What is not installed stays away."""
    preload_in_fork_server("accelerate", "lightning", "transformers.trainer")


def pytest_make_parametrize_id(val: Any, argname: str) -> str | None:
    """Give a parameter an id in plain words, the same in every process."""
    return plain_id(val, argname)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Spare garbage collections, of which tests ask for many, and forked workers what was imported and collected."""
    gc.enable()
    if session.config.option.collectonly:
        gc.freeze()  # at the end pytest looks for garbage again and again
        return
    gc.collect()
    gc.freeze()
    use_huge_pages()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """After the last test of a file, spare later collections what stays, as `pytest_collection_finish` does.

    Objects that stay pile up: what tests import late, and what Hypothesis and pytest keep. Each whole collection looks
    at all that are not frozen, which took most of the time of the tests that ask for collections. What is garbage by
    now is collected first, and what tests make is looked at as ever: at this moment the fixtures of the file are gone.
    """
    result = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


# What takes long to set up, once: all tests of such a file run in the same pytest-xdist worker.
SET_UP_ONCE = (
    "test_device_meshes.py",
    "test_checkpoint_entries.py",
    "test_checkpoint_store.py",
    "test_two_runs.py",
    "test_changing_ranks.py",
    "test_ranks_that_differ.py",
    "test_killed_training.py",
    "test_s3.py",
    "test_node_ids.py",
)

# They take long to import, once: one worker runs all tests of this folder, and the pages whose code needs them.
FRAMEWORKS = "tests/integrations/"
PAGES_OF_FRAMEWORKS = ("[accelerate.md]", "[lightning.md]", "[transformers.md]")

# Files that begin first, for their tests take longest: when they end, short ones fill up what is left of the time.
BEGIN_FIRST = (
    "test_killed_jobs.py",
    "test_killed_training.py",
    "test_two_hosts.py",
    "test_checkpoint_store.py",
    "test_two_runs.py",
    "test_changing_ranks.py",
    "test_ranks_that_differ.py",
    "test_ends.py",
    "test_s3.py",
    "test_docs.py",
    "test_node_ids.py",
    "test_state_machine.py",
    "test_orphans.py",
    "test_leftovers.py",
    "test_workers.py",
    "test_message_sizes.py",
    "test_read_ahead.py",
    "test_plain_loaders.py",
    "test_elastic_resume.py",
    "test_resume_everywhere.py",
    "test_calls.py",
)


COLLECTED = pytest.StashKey[list[str]]()
"""The ids of all tests that were collected, chosen or not, in order."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with what takes longest."""
    places = {name: number for number, name in enumerate(BEGIN_FIRST)}
    items.sort(key=lambda item: -1 if needs_frameworks(item.nodeid) else places.get(item.path.name, len(places)))
    config.stash[COLLECTED] = [item.nodeid for item in items]


def needs_frameworks(nodeid: str) -> bool:
    """Return whether a test needs training frameworks, by its id."""
    return nodeid.startswith(FRAMEWORKS) or nodeid.endswith(PAGES_OF_FRAMEWORKS)


class InOrder(LoadScopeScheduling):
    """Gives pytest-xdist's workers one test after the other in the order of the collection, and some files whole."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        if needs_frameworks(nodeid):
            return FRAMEWORKS
        return path if Path(path).name in SET_UP_ONCE else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> InOrder | None:
    """Deal tests out so that nothing is set up twice that takes long, and nothing long begins last."""
    gc.enable()  # this process collects no tests
    if config.getvalue("dist") != "load":
        return None
    config.option.loadscopereorder = False
    return InOrder(config, log)


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
    if own_children() - processes or shared_memory() - files:
        collect_garbage()
    left = wait_until_none(lambda: own_children() - processes)
    assert not left, f"processes left behind: {left}"
    blocks = wait_until_none(lambda: ownerless(shared_memory() - files))
    assert not blocks, f"shared memory left behind: {blocks}"


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Record:
    """Return what records a case: no row is lost, repeated or corrupted, and nothing is left behind.

    It is called with the fault, which is a row of the published table, and with the case.
    """
    published: str | None = request.config.getoption("--outcomes")
    return partial(recorded, published=None if published is None else Path(published))


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> Callable[[int], Iterator[int]]:
    """Return what counts a long test's cases: up to so many, or until the minutes of `--minutes` have passed."""
    seconds = 60 * float(request.config.getoption("--minutes"))

    def count(most: int) -> Iterator[int]:
        end = time.monotonic() + seconds
        for seed in range(most):
            if time.monotonic() > end:
                return
            yield seed

    return count
