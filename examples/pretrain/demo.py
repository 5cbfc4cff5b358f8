"""Kill the training twice, each time start it on other ranks and workers, and count the tokens.

    python examples/pretrain/demo.py /tmp/pretrain

The numbers printed at the end are counted from the tokens of all batches that the final model was trained on. The
program fails if a token was lost or repeated.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import pyarrow.parquet as pq
import torch

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "flights"))  # for `job`, which starts torchrun and ends all of its processes

from job import running  # noqa: E402

TIME_LIMIT = 600.0
STARTS = ((2, 2, 0.3), (3, 1, 0.6), (1, 2, None))
"""Ranks, workers of each, and after which part of the tokens the training is killed."""


class Counted(NamedTuple):
    """What became of the tokens."""

    tokens: int
    lost: int
    repeated: int


def tokens_in(folder: Path) -> int:
    """Return how many tokens the documents have."""
    return sum(len(pq.read_table(path)["ids"].combine_chunks().flatten()) for path in folder.glob("*.parquet"))


def trained_in(run_dir: Path) -> torch.Tensor:
    """Return the numbers of the tokens that the newest checkpoint was trained on."""
    path = run_dir / "checkpoint.pt"
    return torch.load(path, weights_only=True)["trained"] if path.exists() else torch.empty(0, dtype=torch.int32)


def count(trained: torch.Tensor, tokens: int) -> Counted:
    """Count the tokens that a model was trained on never, and more than once."""
    times = torch.bincount(trained, minlength=tokens)
    return Counted(tokens, int((times == 0).sum()), int((times > 1).sum()))


def run(folder: Path, options: list[str]) -> None:
    """Train to the end, killed and started again on the way."""
    run_dir, tokens = folder / "run", tokens_in(folder / "documents")
    arguments = ["--data", str(folder), "--run-dir", str(run_dir), *options]
    for ranks, workers, part in STARTS:
        done = len(trained_in(run_dir))
        print(f"ranks × workers: {ranks} × {workers}, after {done:,} of {tokens:,} tokens", flush=True)
        with running(HERE / "train.py", [*arguments, "--workers", str(workers)], ranks, scratch=folder) as job:
            if part is None:
                job.finish(TIME_LIMIT)
                continue
            deadline = time.monotonic() + TIME_LIMIT
            while len(trained_in(run_dir)) < part * tokens:
                if not job.is_running() or time.monotonic() > deadline:
                    raise RuntimeError(f"the training did not come so far:\n{job.output()}")
                time.sleep(0.1)
            print(f"killed all {job.kill()} processes with SIGKILL", flush=True)


def main() -> int:
    """Write the documents, train, count, and give the exit status: 0 if no token was lost or repeated."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the blocks that end the jobs are left
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="a new folder, for the documents and the checkpoint")
    parser.add_argument("--documents", type=int, default=200)
    arguments, options = parser.parse_known_args()
    making = [str(HERE / "make_data.py"), str(arguments.folder), "--documents", str(arguments.documents)]
    subprocess.run([sys.executable, *making], check=True)
    run(arguments.folder, options)
    found = count(trained_in(arguments.folder / "run"), tokens_in(arguments.folder / "documents"))
    losses = torch.load(arguments.folder / "run" / "checkpoint.pt", weights_only=True)["losses"]
    part = max(1, len(losses) // 20)
    print(f"{found.tokens:,} tokens in {len(losses)} steps: {found.lost} lost, {found.repeated} repeated; ", end="")
    print(f"loss {mean(losses[:part]):.2f} at first, {mean(losses[-part:]):.2f} at last")
    return int(bool(found.lost or found.repeated))


if __name__ == "__main__":
    sys.exit(main())
