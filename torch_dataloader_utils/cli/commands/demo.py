"""Kill a training in the middle of an epoch with SIGKILL, start it again, and count the rows that it was trained on.

Takes some seconds, in a temporary directory that is removed at the end. The exit code is 1 if a row was lost or
repeated.
"""

from __future__ import annotations

import argparse
import signal
import sys
from typing import TYPE_CHECKING

from torch_dataloader_utils.cli.report import FINE, MISMATCH, Block, Facts, Line, Report, Text, Tone, count, plain
from torch_dataloader_utils.cli.status_line import status_line

if TYPE_CHECKING:
    from torch_dataloader_utils.cli.killed_run import KilledRun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the demonstration has no settings."""


def run(arguments: argparse.Namespace) -> Report:  # noqa: ARG001 - it has none
    """Run the demonstration."""
    from torch_dataloader_utils.cli.killed_run import killed_run

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))  # so that nothing is left behind
    with status_line("tdu demo") as say:
        found = killed_run(say)
    return Report(plain(found) | {"holds": found.holds}, _blocks(found), FINE if found.holds else MISMATCH)


def _blocks(found: KilledRun) -> list[Block]:
    facts: list[tuple[str, Text]] = [
        ("data", f"{count(found.rows)} rows in {found.files} Parquet files, rows shuffled, {found.workers} workers"),
        ("killed", f"with SIGKILL, after step {found.killed_after - 1}"),
        ("resumed", f"from the checkpoint of step {found.resumed_at}, in a new process"),
        ("rolled back", f"{count(found.rolled_back)} rows, trained on again, as the model was rolled back too"),
        ("kept", f"{count(found.kept)} rows, by the ids of all batches that the final model was trained on"),
    ]
    planned = f"{found.steps_as_planned} of {found.steps} steps have the rows, in the order, that rows_at computes"
    tone: Tone = "good" if found.holds else "bad"
    return [
        Facts(facts, "A training that is killed in the middle of its epoch, and started again"),
        Line(f"{count(found.lost)} rows lost, {count(found.repeated)} rows repeated.", tone),
        Line(f"{planned}. It took {found.seconds:.1f} s.", tone),
    ]
