"""Any loader under the same faults: ``compared.py`` trains in one environment and appends what became of the rows.

See ``--help``. Nothing here fails where rows are lost: they are counted.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from faults.killed import (
    CHANGED,
    KILLED,
    Case,
    Epoch,
    JobFailed,
    Trainer,
    prepare,
    rows_of_files,
    whole_epoch,
    write_files,
)
from faults.outcome import Outcome, Row

NO_FAULT = "None: an uninterrupted epoch"

CASES = [
    Case(num_workers, shuffle, ranks)
    for ranks in ((1,), (2,), (2, 3), (2, 3, 1))
    for num_workers in ((0, 2) if len(ranks) == 1 else (0,))  # spawned workers start slowly, and that many times
    for shuffle in (False, True)
]
CHANGES = [Case(shuffle=shuffle, changed=True) for shuffle in (False, True)]


def count(outcome: Outcome, files: list[Row], whole: list[list[Row]], committed: list[Row]) -> None:
    """Count what was lost, repeated and corrupted. What an uninterrupted epoch leaves out was not lost."""
    outcome.compare(files, committed)
    delivered = {row for rows in whole for row, _ in rows} | {row for row, _ in committed}
    outcome.lost -= len({row for row, _ in files} - delivered)


def outcomes(trainer: Trainer, case: Case, directory: Path, options: argparse.Namespace) -> Iterator[Outcome]:
    """Train an epoch that nobody kills, and others that are killed, and give what became of each."""
    data = directory / "data"
    write_files(data)
    files = rows_of_files(data)
    prepare(trainer, data, directory)
    first = Outcome(NO_FAULT, str(Case(case.num_workers, case.shuffle, case.ranks[:1])), options.loader, faults=0)
    try:
        whole = whole_epoch(trainer, case, data, directory / "whole")
    except JobFailed as failed:
        first.error = str(failed)
        yield first
        return
    first.compare(files, [row for rows in whole for row in rows])
    yield first
    end, kills, seed = time.monotonic() + 60 * options.minutes, 0, 0
    while not seed or (kills < options.kills and not case.changed and time.monotonic() < end):
        outcome = Outcome(CHANGED if case.changed else KILLED, str(case), options.loader)
        epoch = Epoch(trainer, case, data, directory / str(seed), random.Random(seed), outcome)
        try:
            epoch.train(options.kills - kills)
        except JobFailed as failed:
            outcome.error = str(failed)
        else:
            count(outcome, files, whole, epoch.rows())
            if len(case.ranks) == 1 and not case.changed:
                outcome.in_order = epoch.committed() == [whole]
        yield outcome
        if outcome.error:
            return
        kills, seed = kills + outcome.faults, seed + 1


def main() -> int:
    """Train with every case."""
    parser = argparse.ArgumentParser(description="Train with one loader under SIGKILL, and count the rows.")
    parser.add_argument("--adapter", required=True, help="a module of faults.adapters")
    parser.add_argument("--loader", required=True, help="its name in the record")
    parser.add_argument("--python", required=True, help="the interpreter of the environment that has it")
    parser.add_argument("--paths", nargs="+", required=True, help="where the adapter imports from besides")
    parser.add_argument("--out", type=Path, required=True, help="the file that gets a line of JSON for each epoch")
    parser.add_argument("--kills", type=int, default=10, help="in each case")
    parser.add_argument("--minutes", type=float, default=2, help="for each case at most")
    parser.add_argument("--elastic", action="store_true", help="whether it can resume with other numbers of ranks")
    options = parser.parse_args()
    with Trainer(options.adapter, options.python, options.paths) as trainer:
        for case in [*CASES, *CHANGES]:
            if len(case.ranks) > 1 and not options.elastic:
                continue
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
                for outcome in outcomes(trainer, case, Path(directory), options):
                    print(outcome.line(), flush=True)  # noqa: T201 - the log
                    outcome.append_to(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
