"""A GPU that is fed from local files and from S3: seconds of a training step with and without the loader."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.contenders.harness import Job
from benchmarks.data.dataset import Data, make
from benchmarks.measure import s3
from benchmarks.measure.machine import code, machine
from benchmarks.measure.rounds import Contender, Hooks, run_once, timestamp

__all__ = ["WAYS", "WORKLOADS", "Way", "Workload", "run"]

TIMEOUT_S = 300.0

Results = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Way:
    """A way to feed the GPU.

    Attributes:
        title: Its name in reports.
        workers: Worker processes.
        pin: Whether batches are in pinned memory.
        how: ``"alone"`` steps over batches that are on the device, ``"ahead"`` copies by `to_device`, ``"in the loop"``
            copies each batch when it is needed.
        script: Its file in contenders/.
    """

    title: str
    workers: int
    pin: bool = True
    how: str = "ahead"
    script: str = "ours/on_gpu.py"


WAYS = {
    "alone": Way("the step alone", 0, how="alone"),
    "0_pinned": Way("in process, pinned", 0),
    "0_plain": Way("in process, not pinned", 0, pin=False),
    "2_pinned": Way("2 workers, pinned", 2),
    "2_plain": Way("2 workers, not pinned", 2, pin=False),
    "2_in_the_loop": Way("2 workers, pinned, copied in the loop without `to_device`", 2, how="in the loop"),
    "8_pinned": Way("8 workers, pinned", 8),
    "torch_2": Way("torch's DataLoader on pyarrow, 2 workers, pinned", 2, script="baselines/torch_loader_on_gpu.py"),
    "torch_8": Way("torch's DataLoader on pyarrow, 8 workers, pinned", 8, script="baselines/torch_loader_on_gpu.py"),
}


@dataclass(frozen=True, slots=True)
class Workload:
    """What is trained on.

    Attributes:
        title: Its name in reports.
        network: The name of its network.
        data: The name of its data set.
        share: The share of the data set's rows that is written.
        batch_size: Rows of a step.
        epochs: Epochs, of which the first is not timed.
        ways: The ways to feed it.
        from_s3: Whether the files are on an S3 server.
    """

    title: str
    network: str
    data: str
    share: float
    batch_size: int
    epochs: int
    ways: tuple[str, ...]
    from_s3: bool = False


WORKLOADS = {
    "numbers": Workload(
        "Rows of numbers, local files",
        "numbers",
        "numeric",
        1.0,
        8_192,
        4,
        ("alone", "0_pinned", "0_plain", "2_pinned", "2_plain", "2_in_the_loop", "8_pinned", "torch_8"),
    ),
    "tokens": Workload(
        "Sequences of tokens, local files",
        "tokens",
        "tokens",
        0.1,
        16,
        2,
        ("alone", "0_pinned", "2_pinned", "2_plain", "torch_2"),
    ),
    "numbers_s3": Workload(
        "Rows of numbers, S3",
        "numbers",
        "numeric",
        1.0,
        8_192,
        4,
        ("alone", "0_pinned", "2_pinned", "2_plain"),
        from_s3=True,
    ),
}


def run(path: Path, names: Iterable[str], rounds: int, device: str = "cuda", scale: float = 1.0) -> Results:
    """Train with each way, in turns, each in a new process.

    Args:
        path: The file of the results, written after each run. Workloads that are not run now are kept from it.
        names: The workloads, of `WORKLOADS`.
        rounds: How often each way runs, each time for the epochs of the workload.
        device: Where the network is. Another one than ``"cuda"`` is only to try things out.
        scale: The share of the data; less than 1 for a trial run.
    """
    results: Results = {"kind": "gpu", "workloads": {}}
    if path.exists():
        results = json.loads(path.read_text(encoding="utf-8"))
    path.parent.mkdir(parents=True, exist_ok=True)
    for name in names:
        workload = WORKLOADS[name]
        data = make(workload.data, workload.share * scale)
        found = results["workloads"][name] = {
            "begun": timestamp(),
            "machine": machine(),
            "code": code(sys.executable),
            "data": {"rows": data.rows, "file_bytes": data.file_bytes, "note": data.note},
            "ways": {way: {"rounds": []} for way in workload.ways},
        }
        with s3.serve(data) if workload.from_s3 else nullcontext() as server:
            hooks = Hooks(keep=frozenset([server.pid])) if server else Hooks()
            for number in range(rounds):
                for way in workload.ways:
                    contender = _contender(workload, WAYS[way], data, device, server)
                    _run(contender, hooks, found["ways"][way])
                    print(f"  {name}, round {number + 1}/{rounds}, {_brief(WAYS[way], found['ways'][way])}", flush=True)
                    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results


def _contender(workload: Workload, way: Way, data: Data, device: str, server: Any) -> Contender:
    options = {
        "device": device,
        "network": workload.network,
        "pin": way.pin,
        "how": way.how,
        "epochs": workload.epochs,
    }
    job = Job(data.directory, list(data.files), workload.batch_size, way.workers, options=options)
    if server is not None:
        job = replace(job, path=s3.url_of(data), s3=server.access)
    rows = None if way.how == "alone" else data.rows
    return Contender(way.title, way.script, job, rows=rows, timeout_s=TIMEOUT_S)


def _run(contender: Contender, hooks: Hooks, found: Results) -> None:
    """Run a way and add its figures, or why there are none."""
    try:
        found["rounds"].append(run_once(contender, hooks, verify=None, watch=False))
    except RuntimeError as error:
        found["error"] = str(error)


def _brief(way: Way, found: Results) -> str:
    if not found["rounds"]:
        return f"{way.title}: {found['error']}"
    times = (f"{1000 * epoch['seconds'] / epoch['steps']:.2f}" for epoch in found["rounds"][-1]["epochs"])
    return f"{way.title}: {', '.join(times)} ms a step"
