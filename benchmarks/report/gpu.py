"""The section of docs/benchmarks.md on a GPU that is fed by the loader, from the raw results."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.measure.gpu import WAYS, WORKLOADS
from benchmarks.measure.s3 import DELAY_MS
from benchmarks.report.markdown import table

__all__ = ["section"]

Results = Mapping[str, Any]

METHOD = f"""\
Milliseconds of a training step (forward, backward, optimizer) with the loader and without: **the step alone** runs over
batches that lie on the GPU. Each way is a process of its own. After an epoch that is not timed, for the workers' start
and the first use of each kernel, whole epochs are timed, their start included, until the GPU has finished.

- Rows of numbers: a network of three layers, 2,048 wide, on {WORKLOADS["numbers"].batch_size:,} rows of 22 columns,
  each a tensor of its own. The step is short: beginning its kernels takes the training process as long as the step.
- Sequences of tokens: a language model of four layers, 384 wide, on {WORKLOADS["tokens"].batch_size} sequences of
  1,024.
- S3 is a server on the same machine that waits {DELAY_MS} ms before each answer, as above.
- **Pinned**: `pin_memory=True`. This library copies by `to_device` where nothing else is said.
- **Processor**: milliseconds a step that the training process takes, all its threads. Workers are not in it.
- Figures are medians of the epochs, with the least and the greatest in brackets.
"""


def section(results: Results) -> Iterator[str]:
    """Give the section's lines.

    Args:
        results: The raw results.
    """
    yield from ("## Feeding a GPU", "", METHOD)
    for name, workload in WORKLOADS.items():
        if name in results["workloads"]:
            yield from _workload(workload.title, results["workloads"][name])


def _workload(title: str, found: Results) -> Iterator[str]:
    yield from (f"### {title}", "")
    data = found["data"]
    yield f"{data['rows']:,} rows, {data['file_bytes'] / (1 << 20):,.0f} MiB: {data['note']}."
    yield ""
    alone = _steps(found["ways"]["alone"])
    rows = []
    for name, way in found["ways"].items():
        steps = _steps(way)
        if not steps:
            rows.append([WAYS[name].title, way["error"], "", ""])
            continue
        processor = _figures(way, "processor_s")
        rows.append(
            [
                WAYS[name].title,
                f"{statistics.median(steps):.2f} [{min(steps):.2f}, {max(steps):.2f}]",
                f"{statistics.median(steps) / statistics.median(alone):.2f}",
                f"{statistics.median(processor):.2f}" if processor else "",
            ]
        )
    yield from table(["", "ms a step", "of the step alone", "processor, ms a step"], rows)
    if "note" in found:
        yield from (found["note"], "")
    yield from (_origin(found), "")


def _steps(way: Results) -> list[float]:
    return _figures(way, "seconds")


def _figures(way: Results, name: str) -> list[float]:
    """Return a figure of each epoch, in milliseconds a step."""
    epochs = (epoch for run in way["rounds"] for epoch in run["epochs"])
    return [1000 * epoch[name] / epoch["steps"] for epoch in epochs if name in epoch]


def _origin(found: Results) -> str:
    machine, code = found["machine"], found["code"]
    device = next(run["device"] for way in found["ways"].values() for run in way["rounds"])
    packages = ", ".join(
        f"{name} {code['packages'][name]}" for name in ("torch", "pyarrow") if name in code["packages"]
    )
    commit = f"commit `{(code['commit'] or 'unknown')[:12]}`{' with changes' if code['changed'] else ''}"
    return (
        f"Measured on {found['begun'][:10]}: {device}, {machine['cores']} cores ({machine['cpu']}), Python "
        f"{machine['python']}, {packages}, {commit}."
    )
