"""Measuring: contenders take turns, each in a fresh process; medians, extremes and ratios within one run."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.contenders.harness import MARK, Job
from benchmarks.measure.processes import Memory, MemorySampler, adopt_orphans, end_all
from benchmarks.paths import CONTENDERS, ROOT, SCRATCH

__all__ = ["Contender", "Hooks", "Measured", "measure", "run_once", "summary", "timestamp", "warm"]

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "LITDATA_DISABLE_VERSION_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "AWS_EC2_METADATA_DISABLED": "true",
    "DO_NOT_TRACK": "1",
}
"""Settings that keep contenders from looking for anything outside this machine."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to read a workload's data.

    Attributes:
        name: What reports call it.
        script: Its file in contenders/.
        job: What it is to do.
        python: The interpreter of its environment.
        checksum: What its verifying run must add up to; None where it cannot tell.
        rows: Rows that it must deliver, unless it is stopped by a limit.
        timeout_s: Seconds after which it is killed.
    """

    name: str
    script: str
    job: Job
    python: str = sys.executable
    checksum: int | None = None
    rows: int | None = None
    timeout_s: float = 180.0


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a workload does around each run, to count requests for example.

    Attributes:
        before: Called before a run.
        after: Called after it; its figures join the run's.
        keep: Processes that must outlive the runs.
    """

    before: Callable[[], None] = lambda: None
    after: Callable[[], Mapping[str, Any]] = dict
    keep: frozenset[int] = frozenset()


@dataclass(slots=True)
class Measured:
    """What became of a contender.

    Attributes:
        runs: The figures of each timed run.
        checked: The figures of the run before, which verified the rows and watched the memory.
        error: Why there are none, or no more.
    """

    runs: list[dict[str, Any]] = field(default_factory=list)
    checked: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


def measure(
    contenders: Sequence[Contender],
    *,
    rounds: int,
    baseline: str | None = None,
    hooks: Hooks | None = None,
    verify: str | None = None,
    tell: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run contenders in turns: one round that verifies and watches memory, then `rounds` that are timed.

    Args:
        contenders: Who takes part.
        rounds: Timed rounds.
        baseline: The contender to which rates are ratios.
        hooks: What to do around each run.
        verify: The column to add up in the verifying round.
        tell: Told what happens.

    Returns:
        For the JSON: each contender's runs, summaries, ratios and errors.
    """
    hooks = hooks or Hooks()
    measured = {contender.name: Measured() for contender in contenders}
    for number in range(rounds + 1):
        for contender in contenders:
            found = measured[contender.name]
            if found.error is not None:
                continue
            try:
                figures = run_once(contender, hooks, verify=verify if number == 0 else None, watch=number == 0)
            except RuntimeError as error:
                found.error = str(error)
                tell(f"  {contender.name}: {str(error).splitlines()[0]}")
                continue
            if number == 0:
                found.checked = figures
            else:
                found.runs.append(figures)
                tell(f"  round {number}/{rounds} {contender.name}: {_brief(figures)}")
    base = measured[baseline].runs if baseline in measured else []
    return {name: _described(found, base) for name, found in measured.items()}


def run_once(contender: Contender, hooks: Hooks, *, verify: str | None, watch: bool) -> dict[str, Any]:
    """Run a contender once.

    Raises:
        RuntimeError: If it fails, takes too long, or delivers other rows than it should.
    """
    hooks.before()
    adopt_orphans()
    SCRATCH.mkdir(parents=True, exist_ok=True)
    job = SCRATCH / "job.json"
    described = asdict(contender.job) | {"verify": verify, "scratch": contender.job.scratch or str(SCRATCH)}
    job.write_text(json.dumps(described), encoding="utf-8")
    # -P: a script of the name of a package it measures must not be imported in its place.
    command = [contender.python, "-P", str(CONTENDERS / contender.script), str(job)]
    cpu_before = _cpu_of_children()
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdout=output, stderr=errors, cwd=SCRATCH, env=_environment(contender), start_new_session=True
        )
        try:
            sampler = MemorySampler(process.pid) if watch else contextlib.nullcontext()
            with sampler as watched:
                status = _wait(process, contender.timeout_s)
        finally:
            process.poll()
            end_all(hooks.keep)
        text, said = _read(output), _read(errors)
    result = next((line for line in reversed(text.splitlines()) if line.startswith(MARK)), None)
    if status is None:
        message = f"no result within {contender.timeout_s:.0f} s, killed"
        raise RuntimeError(message)
    if status != 0 or result is None:
        message = "ended with status {}: {}".format(status, " | ".join(said.strip().splitlines()[-3:]))
        raise RuntimeError(message)
    figures: dict[str, Any] = json.loads(result.removeprefix(MARK))
    figures |= {"cpu_s": _cpu_of_children() - cpu_before, **hooks.after()}
    if isinstance(watched, MemorySampler):
        figures |= _memory(watched.peak, figures)
    _require_rows(contender, figures, verify)
    if figures.get("steady_s") and figures.get("steady_rows"):
        figures["rate"] = figures["steady_rows"] / figures["steady_s"]
    if figures.get("whole_s") and figures.get("rows"):
        figures["whole_rate"] = figures["rows"] / figures["whole_s"]
    return figures


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return median, least and greatest of each figure."""
    names = [name for name, value in runs[0].items() if isinstance(value, (int, float)) and not isinstance(value, bool)]
    columns = {name: [run[name] for run in runs if run.get(name) is not None] for name in names}
    return {
        name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
        for name, values in columns.items()
    }


def _described(found: Measured, base: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    described = asdict(found)
    if found.runs:
        described["summary"] = summary(found.runs)
        pairs = list(zip(found.runs, base, strict=False))
        ratios = {
            name: [run[name] / other[name] for run, other in pairs if run.get(name) and other.get(name)]
            for name in ("rate", "whole_rate")
        }
        described["ratio"] = {
            name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
            for name, values in ratios.items()
            if values
        }
    return described


def _require_rows(contender: Contender, figures: Mapping[str, Any], verify: str | None) -> None:
    if not figures.get("complete", False):
        return
    if contender.rows is not None and figures["rows"] != contender.rows:
        message = f"delivered {figures['rows']} rows of {contender.rows}"
        raise RuntimeError(message)
    if verify and contender.checksum is not None and figures.get("checksum") not in (None, contender.checksum):
        message = f"delivered other rows: {verify} adds up to {figures['checksum']}, not to {contender.checksum}"
        raise RuntimeError(message)


def _environment(contender: Contender) -> dict[str, str]:
    """Return a contender's environment: only this project's own interpreter sees the working tree."""
    own = [str(ROOT)] if contender.python == sys.executable else []
    return dict(os.environ) | OFFLINE | {"PYTHONPATH": os.pathsep.join([*own, str(CONTENDERS)])}


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(timeout_s)
    return None


def _read(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode(errors="replace")).replace(f"{ROOT}/", "")  # results name no place of this machine


def _memory(peak: Memory, figures: Mapping[str, Any]) -> dict[str, int]:
    return {
        "peak_pss": peak.pss,
        "peak_anonymous": peak.anonymous,
        "above_import_pss": peak.pss - figures.get("import_pss", 0),
        "above_import_anonymous": peak.anonymous - figures.get("import_anonymous", 0),
    }


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _brief(figures: Mapping[str, Any]) -> str:
    shown = {
        "rate": "{:,.0f} rows/s",
        "first_batch_s": "first batch after {:.3f} s",
        "construction_s": "built in {:.3f} s",
    }
    return ", ".join(text.format(figures[name]) for name, text in shown.items() if figures.get(name) is not None)


def warm(files: Sequence[str]) -> None:
    """Read files once, so that each contender finds them in the page cache."""
    for path in files:
        with Path(path).open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


def timestamp() -> str:
    """Return the time now, in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
