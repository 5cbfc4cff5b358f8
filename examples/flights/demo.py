"""Kill a training in the middle of an epoch, start it again, and count the rows it was trained on.

    make demo

Two ranks with two workers each train on 336,776 flights (see `train.py`). All of their processes are killed
at once, between two checkpoints. Started again, the training continues from the newest checkpoint. The numbers
printed at the end are counted from the row ids of all batches that the final model was trained on. The program fails
if a row was lost or repeated, or if the order differs from that of an uninterrupted epoch.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from job import Job, running
from ledger import Records, committed, ledger_path, read_ledger, rows_in

HERE = Path(__file__).parent
DATA = HERE / "data"
RANKS = 2
BATCH_SIZE = 256
CHECKPOINT_EVERY = 50
TIME_LIMIT = 120.0


def count_rows(data: Path) -> int:
    """Count the rows of the dataset, from the footers of its files."""
    return sum(pq.read_metadata(path).num_rows for path in data.glob("*.parquet"))


def read_ledgers(run_dir: Path) -> list[Records]:
    """Read the ledgers of all ranks."""
    return [read_ledger(ledger_path(run_dir, rank)) for rank in range(RANKS)]


def read_reports(run_dir: Path) -> list[dict[str, Any]]:
    """Read what each rank reported at its end."""
    return [json.loads((run_dir / f"report-rank-{rank}.json").read_text()) for rank in range(RANKS)]


def start(script: str, run_dir: Path, *arguments: str) -> AbstractContextManager[Job]:
    """Start one of the scripts in this folder on all ranks."""
    common = ["--data", str(DATA), "--run-dir", str(run_dir), "--batch-size", str(BATCH_SIZE)]
    return running(HERE / script, [*common, *arguments], RANKS, scratch=run_dir.parent)


def train(run_dir: Path) -> AbstractContextManager[Job]:
    """Start the training. It continues from the checkpoint in `run_dir` if there is one."""
    return start("train.py", run_dir, "--checkpoint-every", str(CHECKPOINT_EVERY))


def train_and_kill(run_dir: Path, rows: int) -> int:
    """Train to the middle of the epoch and kill. Return the number of killed processes.

    The moment is midway between two checkpoints, so that some steps are always rolled back with the model.
    """
    rows_per_checkpoint = CHECKPOINT_EVERY * BATCH_SIZE * RANKS
    enough = (rows // 2 // rows_per_checkpoint + 0.5) * rows_per_checkpoint
    deadline = time.monotonic() + TIME_LIMIT
    with train(run_dir) as job:
        while sum(rows_in(ledger_path(run_dir, rank)) for rank in range(RANKS)) < enough:
            if not job.is_running() or time.monotonic() > deadline:
                raise RuntimeError(f"the training did not reach the middle of the epoch:\n{job.output()}")
            time.sleep(0.01)
        return job.kill()


def split_by_step(records: Records) -> dict[int, bytes]:
    """Split a ledger into its batches: the row ids of each step, in order."""
    steps, starts = np.unique(records[:, 0], return_index=True)
    batches = np.split(records[:, 1], starts[1:])
    return {int(step): batch.tobytes() for step, batch in zip(steps, batches, strict=True)}


@dataclass(frozen=True, slots=True)
class Evidence:
    """The ledgers of the three runs, one for each rank.

    Args:
        rows: Number of rows of the dataset.
        step: The step of the checkpoint that was resumed from.
        killed: The ledgers when the job was killed.
        kept: The ledgers at the end: the rows that the final model was trained on.
        uninterrupted: The rows that a loader delivers in an epoch that is not interrupted.
    """

    rows: int
    step: int
    killed: list[Records]
    kept: list[Records]
    uninterrupted: list[Records]

    def rows_trained_before_kill(self) -> int:
        """Count the rows trained on when the job was killed, whether a checkpoint holds them or not."""
        return sum(map(len, self.killed))

    def rows_kept_before_kill(self) -> int:
        """Count the rows trained on up to the checkpoint."""
        return sum(len(committed(records, self.step)) for records in self.killed)

    def kept_ids(self) -> list[int]:
        """Return the ids of all rows that were trained on and kept."""
        ids: list[int] = np.concatenate(self.kept)[:, 1].tolist()
        return ids

    def rows_lost(self) -> int:
        """Count the rows that were not kept, except those left out so that all ranks make as many steps."""
        return len(set(range(self.rows)) - set(self.kept_ids())) - self.rows % RANKS

    def rows_repeated(self) -> int:
        """Count the kept rows that were kept before, or that the dataset does not have."""
        ids = self.kept_ids()
        return len(ids) - len(set(ids) & set(range(self.rows)))

    def batches_after_resume(self) -> tuple[int, int]:
        """Count the batches after the resume, and those that the uninterrupted epoch has at the same step."""
        total = same = 0
        for kept, uninterrupted in zip(self.kept, self.uninterrupted, strict=True):
            expected = split_by_step(uninterrupted)
            batches = {step: rows for step, rows in split_by_step(kept).items() if step > self.step}
            total += len(batches)
            same += sum(expected.get(step) == rows for step, rows in batches.items())
        return total, same

    def batches_of_ranks(self) -> list[int]:
        """Count the batches that each rank was trained on and kept."""
        return [len(split_by_step(records)) for records in self.kept]

    def holds(self) -> bool:
        """Return whether the epoch was interrupted and yet delivered exactly once, in its order."""
        total, same = self.batches_after_resume()
        interrupted = self.step > 0 and total > 0
        even = len(set(self.batches_of_ranks())) == 1
        return interrupted and even and self.rows_lost() == self.rows_repeated() == 0 and same == total


def line(label: str, value: float, note: str = "") -> None:
    """Print a number of the ledger."""
    print(f"  {label:<38}{value:>9,}   {note}".rstrip())


def print_ledger(evidence: Evidence) -> None:
    """Print how many rows were trained on, kept, rolled back, lost and repeated."""
    trained, kept = evidence.rows_trained_before_kill(), evidence.rows_kept_before_kill()
    total, same = evidence.batches_after_resume()
    print("\nLedger, in rows")
    line("in the epoch", evidence.rows, "counted from the Parquet footers")
    line("trained on when killed", trained)
    line("  kept: in the checkpoint", kept)
    line("  rolled back with the model", trained - kept, "trained on again after the resume")
    line("trained on and kept after the resume", sum(map(len, evidence.kept)) - kept)
    print(
        f"{evidence.rows_lost():,} rows lost, {evidence.rows_repeated():,} rows repeated, by the ids of the kept rows."
    )
    print(f"{same:,} of {total:,} batches after the resume are those of an uninterrupted epoch, in order.")


def print_cost(resumed: list[dict[str, Any]], replayed: list[dict[str, Any]]) -> None:
    """Print the cost of the resume, and the cost of reading everything up to the same batch again."""
    resume_bytes = sum(report["metrics"]["bytes_read_again"] for report in resumed)
    replay_bytes = sum(report["metrics"]["bytes_read"] for report in replayed)
    resume_seconds = max(report["seconds_to_first_batch"] for report in resumed)
    replay_seconds = max(report["seconds_to_batch"] for report in replayed)
    print("\nCost of coming back                      resume   reading all again")
    print(f"  megabytes read again               {resume_bytes / 1e6:>10.2f}{replay_bytes / 1e6:>20.2f}")
    print(f"  seconds to the next batch          {resume_seconds:>10.2f}{replay_seconds:>20.2f}")


@dataclass(frozen=True, slots=True)
class Demonstration:
    """What the killed run, the resumed run and the uninterrupted epoch left behind.

    Args:
        processes: Processes that were killed.
        last_step: The last step that a rank had made when it was killed.
        evidence: The ledgers.
        resumed: What each rank of the resumed run reported.
        replayed: What each rank reported that read everything again.
    """

    processes: int
    last_step: int
    evidence: Evidence
    resumed: list[dict[str, Any]]
    replayed: list[dict[str, Any]]


def demonstrate() -> Demonstration:
    """Kill a training in the middle of the epoch, resume it, and read the same epoch once without stopping."""
    rows = count_rows(DATA)
    print(f"Training on {rows:,} flights: {RANKS} ranks, a checkpoint every {CHECKPOINT_EVERY} steps.")
    with tempfile.TemporaryDirectory() as folder:
        run_dir, replay_dir = Path(folder, "training"), Path(folder, "replay")

        processes = train_and_kill(run_dir, rows)
        killed = read_ledgers(run_dir)
        last = max(int(records[-1, 0]) for records in killed)
        print(f"Killed all {processes} processes with SIGKILL at step {last}, in the middle of the epoch.")

        with train(run_dir) as job:
            job.finish(TIME_LIMIT)
        resumed = read_reports(run_dir)
        step = resumed[0]["resumed_at_step"]
        print(f"Started again: resumed from the checkpoint of step {step} and finished the epoch.")

        with start("replay.py", replay_dir, "--until-step", str(step)) as job:
            job.finish(TIME_LIMIT)
        evidence = Evidence(rows, step, killed, read_ledgers(run_dir), read_ledgers(replay_dir))
        return Demonstration(processes, last, evidence, resumed, read_reports(replay_dir))


def main() -> int:
    """Run the demonstration and give the exit status: 0 if no row was lost or repeated."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the blocks that end the jobs are left
    shown = demonstrate()
    losses = shown.resumed[0]["losses"]
    before, after = np.mean(losses[:CHECKPOINT_EVERY]), np.mean(losses[-CHECKPOINT_EVERY:])
    batches = " and ".join(map(str, shown.evidence.batches_of_ranks()))
    print(f"The ranks made {batches} steps.")
    print(f"Mean loss: {before:.3f} over the first {CHECKPOINT_EVERY} steps, {after:.3f} over the last.")
    print_ledger(shown.evidence)
    print_cost(shown.resumed, shown.replayed)
    return 0 if shown.evidence.holds() else 1


if __name__ == "__main__":
    sys.exit(main())
