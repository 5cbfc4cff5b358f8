"""The killed and resumed run that ``tdu demo`` shows: real files, processes and signals, in a temporary directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from torch_dataloader_utils.cli import demo_training
from torch_dataloader_utils.cli.demo_training import CHECKPOINT_EVERY, OPTIONS, STEP
from torch_dataloader_utils.dataset.structured import StructuredDataset

FILES, ROWS_OF_A_FILE, ROW_GROUP = 8, 6_000, 250
KILL_AT = 7 * CHECKPOINT_EVERY // 2
"""The step from which on the training is killed: half way between two checkpoints."""

WAIT_AT = KILL_AT + CHECKPOINT_EVERY // 2 - 1
"""Where it waits for that, on a machine so busy that the signal comes late: before the next checkpoint."""

TIME_LIMIT = 300.0

StepRows = list[tuple[int, npt.NDArray[np.int64]]]
"""The number of each step that was made, and the ids of its rows."""


@dataclass(frozen=True, slots=True)
class KilledRun:
    """What the two runs trained on, counted by the ids of the rows.

    Attributes:
        rows: Rows of the files.
        files: Number of files.
        workers: Worker processes of the training.
        killed_after: Steps that were made when the training was killed.
        resumed_at: The step of the checkpoint from which it went on.
        rolled_back: Rows that were trained on after that checkpoint, and again after the resume, as the model was.
        kept: Rows that the final model was trained on.
        lost: Rows of the files that are not among them.
        repeated: How often a row is among them once more than it should be.
        steps_after: Steps after the resume.
        steps_as_planned: Those of them, and of the steps before, with the rows that ``rows_at`` says, in that order.
        steps: All steps that were kept.
        seconds: How long all of it took.
    """

    rows: int
    files: int
    workers: int
    killed_after: int
    resumed_at: int
    rolled_back: int
    kept: int
    lost: int
    repeated: int
    steps_after: int
    steps_as_planned: int
    steps: int
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether the run was interrupted, and yet each row was trained on once, in the planned order."""
        was_interrupted = 0 < self.resumed_at < self.killed_after and self.steps_after > 0
        return was_interrupted and self.lost == self.repeated == 0 and self.steps_as_planned == self.steps


def killed_run(say: Callable[[str], None]) -> KilledRun:
    """Train, kill, resume, and count. `say` is called with what is being done.

    Raises:
        RuntimeError: If a training fails by itself; the message has what it wrote.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tdu-demo-", ignore_cleanup_errors=True) as folder:
        directory = Path(folder)
        say(f"writing {FILES} Parquet files")
        _write_data(directory / "data")
        say(f"training, with {OPTIONS['num_workers']} workers")
        with _training(directory, WAIT_AT) as process:
            while len(_steps(directory)) < KILL_AT:
                if process.poll() is not None or time.monotonic() - began > TIME_LIMIT:
                    raise RuntimeError(_failure(directory))
                time.sleep(0.01)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        killed = _steps(directory)
        (directory / "steps").unlink()
        resumed_at = int(torch.load(directory / "checkpoint.pt", weights_only=True)["step"])
        say(f"killed at step {len(killed)}; training again, from the checkpoint of step {resumed_at}")
        with _training(directory, -1) as process:
            if process.wait(TIME_LIMIT):
                raise RuntimeError(_failure(directory))
        say("counting")
        kept = [*killed[:resumed_at], *_steps(directory)]
        return _counted(directory, killed, resumed_at, kept, time.monotonic() - began)


def _write_data(directory: Path) -> None:
    directory.mkdir()
    random = np.random.default_rng(1)
    for number in range(FILES):
        x, y = random.normal(size=(2, ROWS_OF_A_FILE)).astype(np.float32)
        ids = np.arange(number * ROWS_OF_A_FILE, (number + 1) * ROWS_OF_A_FILE)
        table = pa.table({"id": ids, "x": x, "y": y, "target": 2 * x - y})
        pq.write_table(table, directory / f"part-{number}.parquet", row_group_size=ROW_GROUP)


@contextmanager
def _training(directory: Path, wait_at: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start the training in a process group of its own, and end all of it at the end."""
    package = str(Path(__file__).parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    single = ("RANK", "WORLD_SIZE")  # of a job in which the demo may be run
    environment = {name: value for name, value in os.environ.items() if name not in single}
    with (directory / "output").open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - this package's own module
            [sys.executable, "-m", demo_training.__name__, str(directory), str(wait_at)],
            env={**environment, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(directory)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _failure(directory: Path) -> str:
    """Return the last line that the training wrote."""
    lines = (directory / "output").read_text(errors="replace").strip().splitlines()
    return f"the training of the demo ended by itself, or took too long: {lines[-1] if lines else 'it wrote nothing'}"


def _steps(directory: Path) -> StepRows:
    """Return the steps that were made, with the ids of their rows. A last step that was cut short is left out."""
    try:
        content = (directory / "steps").read_bytes()
    except FileNotFoundError:
        return []
    found, place = [], 0
    while place + STEP.size <= len(content):
        step, rows = STEP.unpack_from(content, place)
        end = place + STEP.size + 8 * rows
        if end > len(content):
            break
        found.append((step, np.frombuffer(content[place + STEP.size : end], np.int64)))
        place = end
    return found


def _counted(directory: Path, killed: StepRows, resumed_at: int, kept: StepRows, seconds: float) -> KilledRun:
    """Count rows by their ids, and compare each step with what the ledger computes of it."""
    _, dataset = StructuredDataset.create_dataloader(directory / "data", **OPTIONS)
    rows = FILES * ROWS_OF_A_FILE
    ids = np.concatenate([of_step for _, of_step in kept])
    times = np.bincount(ids, minlength=rows)
    return KilledRun(
        rows=rows,
        files=FILES,
        workers=OPTIONS["num_workers"],
        killed_after=len(killed),
        resumed_at=resumed_at,
        rolled_back=sum(len(of_step) for _, of_step in killed[resumed_at:]),
        kept=len(ids),
        lost=int((times[:rows] == 0).sum()),
        repeated=int((times - 1).clip(0).sum()),
        steps_after=len(kept) - resumed_at,
        steps_as_planned=sum(_is_planned(dataset, number, *made) for number, made in enumerate(kept)),
        steps=len(kept),
        seconds=seconds,
    )


def _is_planned(dataset: StructuredDataset, number: int, step: int, ids: npt.NDArray[np.int64]) -> bool:
    """Whether a step is the next one, and has the rows that the ledger says, in that order."""
    if step != number or step >= dataset.num_batches:
        return False
    planned = dataset.rows_at(step)
    firsts = np.array([int(path.removeprefix("part-").removesuffix(".parquet")) for path in planned.files.tolist()])
    return bool(np.array_equal(firsts * ROWS_OF_A_FILE + planned.rows, ids))
