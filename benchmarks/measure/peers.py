"""The peers, other loaders: their workloads, conversions and environments.

Each has a script and a file of pinned requirements in contenders/peers/.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.data.dataset import Data
from benchmarks.measure.environments import Environment
from benchmarks.measure.rounds import Contender, Hooks, run_once
from benchmarks.measure.s3 import url_of
from benchmarks.measure.workloads import job_of
from benchmarks.paths import CONTENDERS, SCRATCH

__all__ = ["PEERS", "PEER_WORKLOADS", "Peer", "PeerMaker", "environment_of", "ready_peers"]

PEER_WORKLOADS = ("numeric", "tokens", "strings", "wide", "rows_shuffled", "s3", "s3_projected")

CONVERTED = ("numeric", "tokens", "strings", "wide")
"""The data sets on the local disk."""

STEADY_S = 15.0
"""Seconds after its first batch at which a peer is stopped; its rate is that of the rows until then."""

START_S = 105.0
"""Seconds that it may take before, for its start and first batch, until it is killed."""

CONVERT_S = 600.0
CONVERTED_ROWS = {"numeric": 400_000, "tokens": 20_000, "strings": 100_000, "wide": 4_000}
"""Rows to convert where a peer converts row by row."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer.

    Attributes:
        title: Its name in reports.
        workers: Numbers of worker processes to measure it with.
        converts: Whether it needs its own format or index, which is made first.
        by_row: Whether it converts row by row; then only some rows are converted.
        reads_s3: Whether it takes part where data is on S3.
        shuffles: Whether it takes part where rows are shuffled.
        environment: The name of its pinned requirements, if not its own.
    """

    title: str
    workers: tuple[int, ...] = (0, 2)
    converts: bool = False
    by_row: bool = False
    reads_s3: bool = False
    shuffles: bool = True
    environment: str = ""


PEERS = {
    "published": Peer("torch-dataloader-utils 0.2.0 from PyPI", reads_s3=True),
    "stateful": Peer("torchdata StatefulDataLoader", reads_s3=True),
    "hf_datasets": Peer("Hugging Face datasets, streaming", reads_s3=True),
    "hf_map": Peer("Hugging Face datasets, map-style", converts=True, environment="hf_datasets"),
    "ray_data": Peer("Ray Data", workers=(2,), reads_s3=True),
    "litdata": Peer("LitData, Parquet", converts=True),
    "grain": Peer("Grain, Parquet"),
    "mds": Peer("MosaicML Streaming, MDS", converts=True, by_row=True),
    "lance": Peer("Lance", converts=True, shuffles=False),
    "lancedb": Peer("LanceDB, StreamingDataset", converts=True),
    "webdataset": Peer("WebDataset, a batch a sample", converts=True, shuffles=False),
}


@dataclass(slots=True)
class PeerMaker:
    """Makes the contenders of some peers for a data set, and converts it for those that need it.

    Attributes:
        names: The peers.
        tell: Called with each line of progress.
        workloads: The data sets that they read.
        conversions: The figures of each conversion so far.
    """

    names: Sequence[str]
    tell: Callable[[str], None] = print
    workloads: tuple[str, ...] = (*CONVERTED, "s3", "s3_projected")
    conversions: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __call__(
        self,
        data: Data,
        s3: dict[str, str] | None,
        *,
        columns: list[str] | None = None,
        shuffle_buffer: int | None = None,
    ) -> list[Contender]:
        """Return the contenders.

        Args:
            data: The data set.
            s3: Endpoint and credentials; None for local files.
            columns: Columns to read; None for all.
            shuffle_buffer: Rows of the buffer in which rows are shuffled, where a peer has one; None not to shuffle.
        """
        options = {"shuffle_buffer": shuffle_buffer} if shuffle_buffer else {}
        made: list[Contender] = []
        if data.name not in self.workloads:
            return made
        for name in self.names:
            if shuffle_buffer and not PEERS[name].shuffles:
                continue
            if s3 is None:
                made += self._local(name, data)
            elif PEERS[name].reads_s3:
                made += [self._on_s3(contender, data, s3) for contender in self._local(name, data)]
        return [replace(each, job=replace(each.job, columns=columns, options=options)) for each in made]

    def _local(self, name: str, data: Data) -> list[Contender]:
        peer = PEERS[name]
        converted = self._convert(name, data) if peer.converts else {}
        if "error" in converted:
            return []
        return [self._contender(name, data, workers, converted.get("rows", data.rows)) for workers in peer.workers]

    def _contender(self, name: str, data: Data, workers: int, rows: int) -> Contender:
        peer = PEERS[name]
        job = replace(job_of(data, workers), limit_s=STEADY_S, scratch=_scratch(name, data))
        return Contender(
            f"{peer.title}, {f'{workers} workers' if workers else 'in process'}",
            f"peers/{name}.py",
            job,
            python=environment_of(name).python,
            checksum=data.checksum if rows == data.rows else None,
            rows=rows,
            timeout_s=STEADY_S + START_S,
        )

    def _on_s3(self, contender: Contender, data: Data, s3: dict[str, str]) -> Contender:
        url = url_of(data)
        files = [f"{url}/{Path(path).name}" for path in data.files]
        return replace(contender, job=replace(contender.job, path=url, files=files, s3=s3))

    def _convert(self, name: str, data: Data) -> dict[str, Any]:
        peer = PEERS[name]
        self.tell(f"  {name}: converting {data.name}")
        most = CONVERTED_ROWS.get(data.name) if peer.by_row else None
        job = replace(job_of(data, convert=True), scratch=_scratch(name, data), max_rows=most)
        contender = Contender(
            f"{name}: conversion", f"peers/{name}.py", job, environment_of(name).python, timeout_s=CONVERT_S
        )
        try:
            figures = run_once(contender, Hooks(), verify=None, watch=False)
        except RuntimeError as error:
            figures = {"error": str(error)}
            self.tell(f"  {name}: {str(error).splitlines()[0]}")
        self.conversions[peer.title] = figures
        return figures


def environment_of(name: str) -> Environment:
    """Return a peer's environment."""
    return Environment(CONTENDERS / "peers" / f"{PEERS[name].environment or name}.txt")


def ready_peers(names: Sequence[str], *, only_installed: bool = False) -> tuple[list[str], dict[str, str]]:
    """Return the peers whose environment is ready, and for each other peer why not.

    Args:
        names: The peers.
        only_installed: Whether to take only environments that are ready, and make none.
    """
    ready, missing = [], {}
    for name in names:
        if only_installed and not environment_of(name).is_ready:
            missing[PEERS[name].title] = "its environment is not there"
            continue
        try:
            environment_of(name).prepare()
        except (RuntimeError, OSError) as error:
            missing[PEERS[name].title] = str(error)
        else:
            ready.append(name)
    return ready, missing


def _scratch(name: str, data: Data) -> str:
    return str(SCRATCH / name / Path(data.directory).name)
