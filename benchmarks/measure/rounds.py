"""Rounds of runs: contenders take turns, each in a new process; then medians, extremes, and ratios within a round."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.contenders.harness import MARK, Job
from benchmarks.measure.processes import Memory, MemorySampler, adopt_orphans, end_all
from benchmarks.paths import CONTENDERS, ROOT, SCRATCH

__all__ = ["Contender", "Hooks", "Measured", "described", "measure", "run_once", "summary", "timestamp"]

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "LITDATA_DISABLE_VERSION_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "AWS_EC2_METADATA_DISABLED": "true",
    "DO_NOT_TRACK": "1",
}
"""Environment variables that keep contenders from contacting anything outside this machine."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to read a workload's data.

    Attributes:
        name: Its name in reports.
        script: Its file in contenders/.
        job: What it has to read, and how.
        python: The interpreter of its environment.
        checkout: The root of the checkout whose package it measures, if it measures this library.
        checksum: The sum that its verifying run must report; None if it reports none.
        rows: The rows that it must deliver, unless a limit stops it.
        timeout_s: Seconds after which it is killed.
    """

    name: str
    script: str
    job: Job
    python: str = sys.executable
    checkout: Path = ROOT
    checksum: int | None = None
    rows: int | None = None
    timeout_s: float = 180.0

    @property
    def is_ours(self) -> bool:
        """Whether it measures this library."""
        return self.script.startswith("ours/")


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a workload does before and after each run, such as counting requests.

    Attributes:
        before: Called before a run.
        after: Called after a run; its figures are added to the run's.
        keep: Processes that are not ended after a run.
    """

    before: Callable[[], None] = lambda: None
    after: Callable[[], Mapping[str, Any]] = dict
    keep: frozenset[int] = frozenset()


@dataclass(slots=True)
class Measured:
    """What was measured of a contender.

    Attributes:
        runs: The figures of each timed run.
        checked: The figures of the first run, which is not timed: it verifies the rows and samples the memory.
        error: Why runs are missing.
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
    """Run contenders in turns: a round that verifies rows and samples memory, then `rounds` that are timed.

    Args:
        contenders: What is measured.
        rounds: Timed rounds.
        baseline: The contender whose rate others' are divided by.
        hooks: What to do before and after each run.
        verify: The column to add up in the verifying round.
        tell: Called with each line of progress.

    Returns:
        Each contender's runs, summary, ratios and error, as they go into the JSON.
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
    return {name: described(found, base) for name, found in measured.items()}


def run_once(contender: Contender, hooks: Hooks, *, verify: str | None, watch: bool) -> dict[str, Any]:
    """Run a contender once.

    Raises:
        RuntimeError: If it fails, takes too long, delivers wrong rows, or measures another package than its checkout's.
    """
    hooks.before()
    adopt_orphans()
    _warm(_local_files(contender.job))
    SCRATCH.mkdir(parents=True, exist_ok=True)
    job = SCRATCH / "job.json"
    described = asdict(contender.job) | {"verify": verify, "scratch": contender.job.scratch or str(SCRATCH)}
    job.write_text(json.dumps(described), encoding="utf-8")
    # -P: peers/grain.py imports the package grain, not itself.
    command = [contender.python, "-P", str(CONTENDERS / contender.script), str(job)]
    load, cpu_before = os.getloadavg()[0], _cpu_of_children()
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
    if result is None:
        lines = said.strip().splitlines()
        raised = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception)\b", line)]
        last = " | ".join(raised[-1:] or lines[-3:])
        message = f"ended with status {status}: {last}".replace(
            f"{contender.checkout}/", ""
        )  # results name no directory
        raise RuntimeError(message)
    figures: dict[str, Any] = json.loads(result.removeprefix(MARK))
    figures |= {"cpu_s": _cpu_of_children() - cpu_before, "load": load, **hooks.after()}
    if isinstance(watched, MemorySampler):
        figures |= _memory(watched.peak, figures)
    if status != 0:  # the figures are complete, but the interpreter did not exit as it should
        figures["exit_status"] = status
    _require_package(contender, figures.pop("package"))
    _require_rows(contender, figures, verify)
    if figures.get("steady_s") and figures.get("steady_rows"):
        figures["rate"] = figures["steady_rows"] / figures["steady_s"]
    if figures.get("whole_s") and figures.get("rows"):
        figures["whole_rate"] = figures["rows"] / figures["whole_s"]
    return figures


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the median, least and greatest of each figure."""
    names = [name for name, value in runs[0].items() if isinstance(value, (int, float)) and not isinstance(value, bool)]
    columns = {name: [run[name] for run in runs if run.get(name) is not None] for name in names}
    return {
        name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
        for name, values in columns.items()
    }


def described(found: Measured, base: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what was measured of a contender as it goes into the JSON, with ratios to the baseline's runs."""
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


def _require_package(contender: Contender, package: str | None) -> None:
    if contender.is_ours and package != str(contender.checkout / "torch_dataloader_utils" / "__init__.py"):
        message = "imported torch_dataloader_utils from elsewhere than the checkout that is measured"
        raise RuntimeError(message)


def _require_rows(contender: Contender, figures: Mapping[str, Any], verify: str | None) -> None:
    if not figures.get("complete", False):
        return
    if contender.rows is not None and {figures["rows"], figures.get("second_rows", contender.rows)} != {contender.rows}:
        message = f"delivered {figures['rows']} rows of {contender.rows}"
        raise RuntimeError(message)
    if verify and contender.checksum is not None and figures.get("checksum") not in (None, contender.checksum):
        message = f"delivered other rows: {verify} adds up to {figures['checksum']}, not to {contender.checksum}"
        raise RuntimeError(message)


def _environment(contender: Contender) -> dict[str, str]:
    """Return the environment variables of a contender: only one that measures this library imports from a checkout."""
    own = [str(contender.checkout)] if contender.is_ours else []
    return dict(os.environ) | OFFLINE | {"PYTHONPATH": os.pathsep.join([*own, str(CONTENDERS)])}


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(timeout_s)
    return None


def _read(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode(errors="replace"))


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
        "exit_status": "then ended with status {}",
    }
    return ", ".join(text.format(figures[name]) for name, text in shown.items() if figures.get(name) is not None)


def _warm(files: Iterable[str | Path]) -> None:
    """Read files once, so that they are in the page cache for every contender.

    A system may give their pages back within minutes, while other contenders run.
    """
    for path in files:
        with Path(path).open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


def _local_files(job: Job) -> Iterable[str | Path]:
    """Return the local files that a contender may read: the data, and what was converted for it."""
    if job.s3 is None:
        yield from job.files
    if job.scratch:
        yield from (path for path in sorted(Path(job.scratch).rglob("*")) if path.is_file())


def timestamp() -> str:
    """Return the time now, in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
