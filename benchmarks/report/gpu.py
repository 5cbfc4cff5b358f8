"""The section of docs/benchmarks.md on a GPU that is fed by the loader, from the raw results."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.measure.gpu import WAYS, WORKLOADS, Workload
from benchmarks.measure.s3 import DELAY_MS
from benchmarks.report.markdown import table
from benchmarks.report.origins import what_was_said

__all__ = ["section"]

Results = Mapping[str, Any]

METHOD = f"""\
Milliseconds of a training step (forward, backward, optimizer) with the loader and without: **the step alone** runs
over batches that are on the GPU already. Each way is a process of its own. After an epoch that is not timed, for the
workers' start and the first use of each kernel, whole epochs are timed, their start included, until the GPU has
finished.

- S3 is a server on the same machine that waits {DELAY_MS} ms before each answer.
- **Pinned**: `pin_memory=True`. This library copies by `to_device` where nothing else is said.
- **Processor**: milliseconds that the training process takes, all its threads. Workers are not in it.
- An epoch's last batches are smaller, one for each worker: figures are those of as many rows as a full batch has.
  They are medians of the epochs, with the least and the greatest in brackets. Epochs of one process are more alike
  than processes are. The machine's cores are shared with others, and their speed changes from moment to moment. So a
  few tenths of a millisecond between two lines of a table, or between two tables, mean little.
- Each table names the commit that was measured.
"""

STEPS = {
    "numbers": "A network of three layers, 2,048 wide, on {batch:,} rows of 22 columns, each a tensor of its own. The "
    "step is short: beginning its kernels takes the training process as long as the step.",
    "tokens": "A language model of four layers, 384 wide, on {batch} sequences of 1,024 tokens.",
}
"""What a step does, by the network."""


def section(results: Results) -> Iterator[str]:
    """Give the section's lines.

    Args:
        results: The raw results.
    """
    yield from ("## Feeding a GPU", "", METHOD)
    for name, workload in WORKLOADS.items():
        if name in results["workloads"]:
            yield from _workload(workload, results["workloads"][name])


def _workload(workload: Workload, found: Results) -> Iterator[str]:
    data = found["data"]
    yield from (f"### {workload.title}", "")
    yield STEPS[workload.network].format(batch=workload.batch_size)
    yield f"The files: {data['rows']:,} rows, {data['file_bytes'] / (1 << 20):,.0f} MiB, {data['note']}."
    yield ""
    figures = {name: _figures(way, "seconds", workload.batch_size) for name, way in found["ways"].items()}
    alone = statistics.median(figures["alone"]) if figures["alone"] else None
    rows, errors = [], []
    for name, way in found["ways"].items():
        title, steps = WAYS[name].title, figures[name]
        if steps:
            middle = statistics.median(steps)
            processor = statistics.median(_figures(way, "processor_s", workload.batch_size))
            spread = f"{middle:.2f} [{min(steps):.2f}, {max(steps):.2f}]"
            rows.append([title, str(len(steps)), spread, f"{middle / alone:.2f}" if alone else "", f"{processor:.2f}"])
        if "error" in way:
            errors.append((title, way["error"]))
    yield from table(["", "epochs", "ms a step", "of the step alone", "processor, ms a step"], rows)
    yield from what_was_said(errors)
    yield from (_origin(found), "")


def _figures(way: Results, name: str, batch_size: int) -> list[float]:
    """Return a figure of each epoch, in milliseconds for as many rows as a batch has."""
    epochs = (epoch for run in way["rounds"] for epoch in run["epochs"])
    return [1000 * epoch[name] * batch_size / epoch["rows"] for epoch in epochs]


def _origin(found: Results) -> str:
    machine, code = found["machine"], found["code"]
    devices = {run["device"] for way in found["ways"].values() for run in way["rounds"]}
    packages = ", ".join(
        f"{name} {code['packages'][name]}" for name in ("torch", "pyarrow") if name in code["packages"]
    )
    commit = f"commit `{(code['commit'] or 'unknown')[:12]}`{' with changes' if code['changed'] else ''}"
    return (
        f"Measured on {found['begun'][:10]}: {', '.join(sorted(devices)) or 'no device'}, {machine['cores']} cores "
        f"({machine['cpu']}), Python {machine['python']}, {packages}, {commit}."
    )
