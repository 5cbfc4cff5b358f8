"""A storage that fails: rows are exact, or an error names the file and the cause within `storage_timeout`."""

from __future__ import annotations

import asyncio
import errno
import gc
import itertools
import multiprocessing
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import S3Server
from faults.outcome import Outcome, Row, rows_in
from faults.proxy import NEVER, PASSING, PLACES, ProxyProcess, Rule, can_be, faulty_proxy
from pairwise import covering, pairwise
from ranged import RangedFile, RangedFileSystem
from s3fs import S3FileSystem
from support import open_loader

from torch_dataloader_utils import UnreadableFileError
from torch_dataloader_utils.storage import attempts
from torch_dataloader_utils.storage.obstore import s3 as obstore_s3
from torch_dataloader_utils.storage.s3 import OneAttemptS3

pytestmark = [
    pytest.mark.usefixtures("leaves_nothing_behind"),
    pytest.mark.filterwarnings("ignore::torch_dataloader_utils.StorageRetryWarning"),
]


@pytest.fixture(autouse=True)
def idle_threads_end_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each case waits until nothing is left, and a thread that has asked the storage stays for the next call."""
    monkeypatch.setattr(attempts, "IDLE_SEC", 0.05)


FILES, ROWS, GROUP_ROWS = 3, 60, 20
LAST = f"data/part-{FILES - 1}.parquet"
TABLE_ROW = "S3 through a faulty proxy"
ERRNO_ROW = "ESTALE and EIO from a storage"

ENOUGH_SEC = 60.0
"""A `storage_timeout` that no busy machine exceeds where another attempt succeeds at once."""

SHORT_SEC = 2.0
"""A `storage_timeout` of faults that end with it. On a busy machine, what does not fail has to succeed within it."""

MOST_ASKED = 12
"""How often the same may be requested in vain within `SHORT_SEC`, on any machine. The pauses allow 5 attempts, and
aiohttp asks once more where a connection was closed. Attempts of another layer would multiply them."""

SLOW = ("hang", "trickle")
FINAL = ("expired token", "forbidden")


def write_checked(directory: Path, first: int = 0) -> list[Row]:
    """Write files whose pages have checksums, and where nothing else would show a wrong byte. Return their rows."""
    directory.mkdir(parents=True)
    expected = []
    for number in range(FILES):
        values = first + np.arange(number * ROWS, (number + 1) * ROWS)
        table = pa.table({"value": values, "wide": [f"{value:0200d}" for value in values]})
        pq.write_table(
            table,
            directory / f"part-{number}.parquet",
            row_group_size=GROUP_ROWS,
            compression="none",
            use_dictionary=False,
            write_page_checksum=True,
        )
        expected += rows_in({"row": values, **{name: table[name].to_pylist() for name in table.column_names}})
    return expected


@dataclass
class Trainer:
    """Commits batches, and keeps the message of the error that ended the epoch; not the error, which holds pipes."""

    outcome: Outcome
    committed: list[Row] = field(default_factory=list)
    state: Any = None
    message: str = ""

    def deliver(self, open_one: Callable[[], Any], batches_of: Callable[[Any], Iterable[Any]] = iter) -> None:
        """Deliver an epoch, or what is left of it, until its end or an error."""
        began = time.monotonic()
        try:
            loader = open_one()
            if self.state is not None:
                loader.load_state_dict(self.state)
            for batch in batches_of(loader):
                self.committed += rows_in(batch)
                self.state = loader.state_dict()
        except OSError as error:
            self.outcome.seconds = time.monotonic() - began
            self.outcome.failed(error)
            self.message = str(error)

    def require_told(self, *words: str) -> None:
        """The error names the file, or the directory that is listed, and the cause."""
        assert self.message
        assert all(word in self.message for word in words), self.message


def deliver(outcome: Outcome, open_one: Callable[[float], Any], timeout: float, heal: Callable[[], None]) -> Trainer:
    """Deliver an epoch. Where it ends with an error, end the fault and resume with the newest state."""
    trainer = Trainer(outcome)
    trainer.deliver(lambda: open_one(timeout))
    heal()
    if trainer.message:
        resumed = Trainer(outcome, trainer.committed, trainer.state)
        resumed.deliver(lambda: open_one(ENOUGH_SEC))
        assert not resumed.message, resumed.message
    return trainer


class Bucket:
    """Objects behind the proxy, and the rows that they hold."""

    def __init__(self, server: S3Server, proxy: ProxyProcess, directory: Path) -> None:
        self.expected = write_checked(directory / "data")
        self.name = server.new_bucket(directory)
        self.server, self.proxy = server, proxy
        self.options = server.storage_options()
        self.options["client_kwargs"]["endpoint_url"] = proxy.url

    def open(self, workers: int, timeout: float) -> Any:
        url = f"s3://{self.name}/data"
        return open_loader(url, storage_options=self.options, storage_timeout=timeout, num_workers=workers)[0]

    def deliver(self, outcome: Outcome, workers: int, timeout: float, rule: Rule) -> Trainer:
        """Deliver an epoch under a rule. Where it ends with an error, end the fault and resume."""

        def heal() -> None:
            failed = [request for request, fault in self.proxy.requests() if fault is not None]
            outcome.faults = len(failed)
            asked = Counter((request.method, request.key, request.start) for request in failed)
            assert max(asked.values(), default=0) <= MOST_ASKED or timeout != SHORT_SEC
            self.proxy.fail(NEVER)

        self.proxy.fail(rule)
        trainer = deliver(outcome, partial(self.open, workers), timeout, heal)
        outcome.compare(self.expected, trainer.committed)
        return trainer


@pytest.fixture(scope="module")
def proxy(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    with faulty_proxy(s3.url) as proxy:
        list(Bucket(s3, proxy, tmp_path_factory.mktemp("first")).open(0, ENOUGH_SEC))  # opens what stays open
        yield proxy


@pytest.fixture
def bucket(s3: S3Server, proxy: ProxyProcess, tmp_path: Path) -> Iterator[Bucket]:
    proxy.fail(NEVER)
    yield Bucket(s3, proxy, tmp_path)
    proxy.fail(NEVER)


@pytest.fixture
def plain_http(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have small ranges, too, received over plain HTTP where obstore is used."""
    monkeypatch.setattr(obstore_s3, "LEAST_BY_HTTP", 0)


CASES = [
    (fault, place, workers, times)
    for fault, place, workers, times in itertools.product((*PASSING, *FINAL), PLACES, (0, 2), (1, None))
    if can_be(fault, place)
]
CELLS = [((*PASSING, *FINAL).index(case[0]), PLACES.index(case[1]), case[2], case[3] or 0) for case in CASES]
SHORT = set(covering(CELLS)[:12])  # each fault is in one of them


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=f"{case[0]} of a {case[1]} {'once' if case[3] else 'for good'} {case[2]} workers",
            marks=[] if cell in SHORT else pytest.mark.soak,
        )
        for case, cell in zip(CASES, CELLS, strict=True)
    ],
)
@pytest.mark.usefixtures("plain_http")
def test_a_fault_is_overcome_or_an_error_that_names_file_and_cause(request, bucket, record, case):
    fault, place, workers, times = case
    timeout = ENOUGH_SEC if times and fault not in SLOW else SHORT_SEC
    with record(TABLE_ROW, request.node.callspec.id) as outcome:
        trainer = bucket.deliver(outcome, workers, timeout, Rule((fault,), place, times=times))
    assert trainer.message or times, "a fault for good cannot be overcome"
    if trainer.message:
        assert timeout == SHORT_SEC or fault in FINAL, "another attempt would have succeeded"
        where = "" if place in {"looking", "listing"} else ".parquet"
        cause = "Error: " if fault in (*FINAL, "flipped byte") else f"storage_timeout={timeout:g} s"
        trainer.require_told(f"s3://{bucket.name}/data", where, cause)


def test_requests_of_a_range_that_always_fails_are_bounded_by_the_pauses_between_them(bucket):
    bucket.proxy.fail(Rule(("503",), "range"))
    with pytest.raises(UnreadableFileError, match=r"row group \d of s3://.*part-\d.parquet: no success in"):
        list(bucket.open(0, 3.0))
    asked = Counter((request.key, request.start) for request, _ in bucket.proxy.requests() if request.place == "range")
    assert 2 <= max(asked.values()) <= 7, "pauses of 0.05, 0.1, 0.2, 0.4, 0.8 and 1.6 s are the shortest"


@pytest.mark.parametrize(
    ("workers", "least"),
    [
        pytest.param(0, sys.maxsize, id="obstore"),
        pytest.param(0, 0, id="plain HTTP"),
        pytest.param(2, 0, id="2 workers"),
    ],
)
def test_a_share_of_all_requests_fails(bucket, record, monkeypatch, workers, least):
    monkeypatch.setattr(obstore_s3, "LEAST_BY_HTTP", least)
    quick = [fault for fault in PASSING if fault not in SLOW]
    with record(TABLE_ROW, f"a fifth of all requests fails, {workers} workers") as outcome:
        bucket.deliver(outcome, workers, ENOUGH_SEC, Rule(tuple(quick), share=0.2))


@pytest.mark.soak
@pytest.mark.usefixtures("plain_http")
@pytest.mark.parametrize("share", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_share_of_all_requests_fails_epoch_after_epoch(bucket, record, seeds, share, workers):
    for seed in seeds(200):
        with record(TABLE_ROW, f"{share:.0%} of all requests fail, {workers} workers") as outcome:
            trainer = bucket.deliver(outcome, workers, 4 * SHORT_SEC, Rule(PASSING, share=share, seed=seed))
        if trainer.message:
            trainer.require_told(f"s3://{bucket.name}/data")


async def forget() -> None:
    S3FileSystem.clear_instance_cache()
    OneAttemptS3.clear_instance_cache()
    gc.collect()
    await asyncio.sleep(0.1)  # for what that begins


def forget_filesystems() -> None:
    """End the filesystems that a forked process has inherited, in its own event loop, as may happen by chance there."""
    fsspec.asyn.sync(fsspec.asyn.get_loop(), forget)


def test_a_forked_process_that_forgets_a_filesystem_leaves_its_parents_connections_alone(bucket):
    list(bucket.open(0, ENOUGH_SEC))  # its connections are kept for the next requests
    child = multiprocessing.get_context("fork").Process(target=forget_filesystems)
    child.start()
    child.join()
    assert child.exitcode == 0
    bucket.proxy.fail(NEVER)
    bucket.open(0, ENOUGH_SEC)
    asked = [request.key for request, _ in bucket.proxy.requests() if request.place == "looking"]
    assert asked == ["data"], "the answer to the first request was not seen"


# In the epoch -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """What happens to the last file in the epoch, and a part of the error."""

    name: str
    cause: str

    def make(self, bucket: Bucket, directory: Path) -> None:
        if self.name == "deleted":
            bucket.server.client().delete_object(Bucket=bucket.name, Key=LAST)
        elif self.name == "replaced":
            write_checked(directory, first=10_000)
            bucket.server.client().upload_file(str(directory / Path(LAST).name), bucket.name, LAST)
        bucket.proxy.fail(Rule(("expired token",), key=LAST) if self.name == "expired token" else NEVER)


CHANGES = {
    "replaced": Change("replaced", "changed since it was listed"),
    "deleted": Change("deleted", "FileNotFoundError"),
    "expired": Change("expired token", "PermissionError"),
}


@pairwise(most=4, workers=[0, 2], change=CHANGES)
def test_what_changes_in_the_epoch_is_an_error_before_a_wrong_row(bucket, record, tmp_path, workers, change):
    def changed(loader: Any) -> Iterator[Any]:
        """Yield a loader's batches; make the change after the first."""
        # What the file holds must not be read ahead of the change.
        bucket.proxy.fail(Rule(("503",), key=LAST))
        batches = iter(loader)
        yield next(batches)
        CHANGES[change].make(bucket, tmp_path / "new")
        yield from batches

    with record(TABLE_ROW, f"{CHANGES[change].name} in the epoch, {workers} workers") as outcome:
        trainer = Trainer(outcome)
        trainer.deliver(lambda: bucket.open(workers, ENOUGH_SEC), changed)
        outcome.compare([row for row in bucket.expected if row in trainer.committed], trainer.committed)
    trainer.require_told(LAST, CHANGES[change].cause)
    assert 0 < len(trainer.committed) < len(bucket.expected)


def test_an_expired_token_in_the_epoch_resumes_exactly_with_a_new_one(bucket, record):
    with record(TABLE_ROW, "expired token in the epoch, resumed with another") as outcome:
        trainer = bucket.deliver(outcome, 0, ENOUGH_SEC, Rule(("expired token",), "range", first=2))
    trainer.require_told("PermissionError", "expired")


# Errors of the system -----------------------------------------------------------------------------------------------


class FlakyFile(RangedFile):
    """A file whose ranges may fail."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        FlakyFileSystem.meet("range")
        return super()._fetch_range(start, end)


class FlakyFileSystem(RangedFileSystem):
    """Local files behind a storage that fails as a network file system does.

    Attributes:
        place: Which operations fail: listing, opening, footer or range.
        number: With which error of the system; None if it does not answer.
        times: How many times; None for good.
        healed: Set when it answers again.
    """

    protocol = "flaky"
    place: ClassVar[str] = ""
    number: ClassVar[int | None] = None
    times: ClassVar[int | None] = None
    healed: ClassVar[threading.Event] = threading.Event()
    _count: ClassVar[Iterator[int]] = itertools.count()

    @classmethod
    def fail(cls, place: str, number: int | None = None, times: int | None = None) -> None:
        cls.healed.set()
        cls.place, cls.number, cls.times, cls._count = place, number, times, itertools.count()
        cls.healed = threading.Event()

    @classmethod
    def meet(cls, place: str) -> None:
        if place != cls.place or (cls.times is not None and next(cls._count) >= cls.times):
            return
        if cls.number is None:
            cls.healed.wait()
        else:
            raise OSError(cls.number, os.strerror(cls.number))

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(path).removeprefix("flaky://").rstrip("/")

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        if path.endswith("deeper"):
            self.meet("listing")
        return super().ls(path, detail, **options)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        self.meet("footer")
        return bytes(super().cat_file(path, start=start, end=end, **options))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> FlakyFile:
        self.meet("opening")
        return FlakyFile(self, path, mode, **{"cache_type": "none", **options})


@pytest.fixture
def flaky(tmp_path: Path) -> Iterator[tuple[str, list[Row]]]:
    """The URL of a directory of such a storage, with another in it, and the rows of their files."""
    fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)
    expected = write_checked(tmp_path / "data")
    (tmp_path / "data" / "deeper").mkdir()
    (tmp_path / "data" / "part-2.parquet").rename(tmp_path / "data" / "deeper" / "part-2.parquet")
    # By their paths, deeper/part-2.parquet is the first file.
    values = [*range(2 * ROWS, 3 * ROWS), *range(2 * ROWS)]
    contents = dict(expected)
    yield f"flaky://{tmp_path}/data", [(row, contents[value]) for row, value in enumerate(values)]
    heal()


def heal() -> None:
    """Let the storage work from now on."""
    FlakyFileSystem.fail("")


OPERATIONS = ("listing", "footer", "opening", "range")


@pairwise(most=5, place=[*OPERATIONS, "glob"], number=[errno.ESTALE, errno.EIO], times=[1, None])
def test_an_error_of_the_system_is_overcome_or_names_the_file(flaky, record, place, number, times):
    url, expected = flaky
    path = f"{url}/**/*.parquet" if place == "glob" else url
    how = f"{errno.errorcode[number]} of a {place} {'once' if times else 'for good'}"
    FlakyFileSystem.fail("listing" if place == "glob" else place, number, times)
    with record(ERRNO_ROW, how) as outcome:
        timeout = ENOUGH_SEC if times else SHORT_SEC / 2
        trainer = deliver(outcome, lambda timeout: open_loader(path, storage_timeout=timeout)[0], timeout, heal)
        outcome.compare(expected, trainer.committed)
    if times:
        assert not trainer.message
    else:
        trainer.require_told(url, f"[Errno {number}]", f"storage_timeout={timeout:g} s")


@pytest.mark.parametrize("place", OPERATIONS)
def test_a_storage_that_never_answers_is_an_error_within_the_timeout(flaky, record, place):
    url, expected = flaky
    FlakyFileSystem.fail(place)
    with record(ERRNO_ROW, f"no answer to a {place}") as outcome:
        trainer = deliver(outcome, lambda timeout: open_loader(url, storage_timeout=timeout)[0], SHORT_SEC / 2, heal)
        outcome.compare(expected, trainer.committed)
    trainer.require_told(url, "no answer within")
