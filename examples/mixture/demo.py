"""Kill the training twice, each time start it on other ranks and workers, and count the rows of each source.

    python examples/mixture/demo.py /tmp/mixture

The numbers printed at the end are counted from the row numbers of all batches that the final model was trained on. The
program fails if a row was lost or repeated. `shares.svg` in the folder shows the shares and the losses over the steps.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "flights"))  # for `job`, which starts torchrun and ends all of its processes

from job import running  # noqa: E402
from shares import show  # noqa: E402
from train import schedule  # noqa: E402

TIME_LIMIT = 600.0
STARTS = ((2, 2, 0.3), (3, 1, 0.7), (1, 2, None))
"""Ranks, workers of each, and after which part of the steps the training is killed."""


def last_step(run_dir: Path) -> int:
    """Return the step of the newest checkpoint, 0 if there is none."""
    path = run_dir / "checkpoint.pt"
    return torch.load(path, weights_only=True)["step"] if path.exists() else 0


def run(folder: Path, epochs: int, rows_per_epoch: int, options: list[str]) -> None:
    """Train to the end, killed and started again on the way."""
    run_dir, steps = folder / "run", epochs * rows_per_epoch // 60
    arguments = ["--data", str(folder / "corpora"), "--run-dir", str(run_dir), *options]
    arguments += ["--epochs", str(epochs), "--rows-per-epoch", str(rows_per_epoch)]
    for ranks, workers, part in STARTS:
        print(f"ranks × workers: {ranks} × {workers}, from step {last_step(run_dir)} on", flush=True)
        with running(HERE / "train.py", [*arguments, "--workers", str(workers)], ranks, scratch=folder) as job:
            if part is None:
                job.finish(TIME_LIMIT)
                continue
            deadline = time.monotonic() + TIME_LIMIT
            while last_step(run_dir) < part * steps:
                if not job.is_running() or time.monotonic() > deadline:
                    raise RuntimeError(f"the training did not come so far:\n{job.output()}")
                time.sleep(0.1)
            print(f"killed all {job.kill()} processes with SIGKILL", flush=True)


def main() -> int:
    """Write the texts, train, count, and give the exit status: 0 if no row was lost or repeated."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the blocks that end the jobs are left
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="a new folder, for the texts and the checkpoint")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rows-per-epoch", type=int, default=7_800)
    arguments, options = parser.parse_known_args()
    subprocess.run([sys.executable, str(HERE / "make_data.py"), str(arguments.folder / "corpora")], check=True)
    run(arguments.folder, arguments.epochs, arguments.rows_per_epoch, options)
    asked = schedule(arguments.epochs * arguments.rows_per_epoch)
    counts = show(arguments.folder / "run", arguments.folder / "corpora", asked)
    return int(any(found.lost or found.repeated for found in counts))


if __name__ == "__main__":
    sys.exit(main())
