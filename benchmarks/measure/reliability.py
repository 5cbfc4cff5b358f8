"""The reliability tests in their long form, and the same kills for other loaders, each in its own environment."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure.environments import Environment, packages_of
from benchmarks.measure.machine import code, machine
from benchmarks.measure.rounds import timestamp
from benchmarks.paths import CONTENDERS, ROOT

__all__ = ["LOADERS", "OWN", "grouped", "run"]

BUILD = ROOT / "build" / "reliability"
SUPPORT = ROOT / "tests" / "support"
OWN = "torch_dataloader_utils"
NAMED = ("torch", "pyarrow", "numpy", "fsspec", "s3fs")

Results = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Loader:
    """A loader under the kills.

    Attributes:
        title: Its name on the page.
        package: The package that is pinned; of this library, none is.
        elastic: Whether its documentation says that it resumes with other numbers of ranks.
        converts: What is made of the files before it reads them; empty for nothing.
    """

    title: str
    package: str = ""
    elastic: bool = False
    converts: str = ""


LOADERS = {
    "ours": Loader(OWN, elastic=True),
    "stateful": Loader("torchdata StatefulDataLoader on pyarrow", "torchdata"),
    "hf_datasets": Loader("Hugging Face datasets, streaming", "datasets"),
    "litdata": Loader("LitData, Parquet", "litdata", elastic=True, converts="an index"),
    "lancedb": Loader("LanceDB StreamingDataset", "lancedb", elastic=True, converts="a Lance table"),
    "published": Loader("torch-dataloader-utils from PyPI", "torch-dataloader-utils"),
}


def run(path: Path, *, minutes: float, kills: int, own: bool, names: Iterable[str]) -> Results:
    """Run the tests and the loaders, and write the results after each.

    Args:
        path: The file of the results. What is not run now is kept from it.
        minutes: For each long test, and for each case of a loader.
        kills: In each case of a loader.
        own: Whether to run the tests of this library.
        names: The loaders, of `LOADERS`.
    """
    if own:
        _keep(path, "tests", _run_tests(minutes))
    for name in names:
        found = _run_loader(name, minutes, kills)
        _keep(path, "loaders", {**_read(path)["loaders"], name: found})
    return _read(path)


def grouped(lines: Iterable[str]) -> list[Results]:
    """Add up outcomes, each a line of JSON, by fault and case.

    Args:
        lines: What `Outcome.append_to` wrote.
    """
    groups: dict[tuple[str, str], Results] = {}
    for line in lines:
        outcome = json.loads(line)
        empty = {"fault": outcome["fault"], "case": _without_paths(outcome["case"]), "seconds": None, "example": None}
        group = groups.setdefault((outcome["fault"], outcome["case"]), empty | {"errors": Counter(), "left": Counter()})
        counts = {name: outcome[name] for name in ("faults", "lost", "repeated", "corrupted")}
        order = outcome["in_order"]
        counts |= {"outcomes": 1, "in_order": int(order is True), "in_another_order": int(order is False)}
        counts["not_exact"] = int(bool(outcome["lost"] or outcome["repeated"] or outcome["corrupted"]))
        for name, count in counts.items():
            group[name] = group.get(name, 0) + count
        group["left"].update(outcome["left"])
        if outcome["seconds"] is not None:
            group["seconds"] = round(max(group["seconds"] or 0.0, outcome["seconds"]), 3)
        if outcome["error"]:
            group["errors"][outcome["error"].partition(":")[0]] += 1
            group["example"] = group["example"] or _without_paths(outcome["error"].splitlines()[0])[:200]
    return list(groups.values())


def _run_tests(minutes: float) -> Results:
    """Run tests/faults in both forms, and return what they recorded."""
    outcomes, report = _fresh("tests.jsonl"), _fresh("tests.xml")
    facts = _facts(sys.executable) | {"minutes": minutes}
    command = [sys.executable, "-m", "pytest", "tests/faults", "-m", "soak or not soak", "--minutes", str(minutes)]
    command += ["--outcomes", str(outcomes), f"--junit-xml={report}"]
    print("  the tests", flush=True)
    subprocess.run(command, cwd=ROOT, check=False)
    cases = list(ET.parse(report).getroot().iter("testcase"))  # noqa: S314 - pytest wrote it
    failed = [f"{case.get('classname')}::{case.get('name')}" for case in cases if case.find("failure") is not None]
    failed += [f"{case.get('classname')}::{case.get('name')}" for case in cases if case.find("error") is not None]
    return facts | {"tests": len(cases), "failed": failed, "outcomes": grouped(_lines(outcomes))}


def _run_loader(name: str, minutes: float, kills: int) -> Results:
    """Kill training jobs with one loader, and return what became of the rows."""
    loader, outcomes = LOADERS[name], _fresh(f"{name}.jsonl")
    python, paths = sys.executable, [str(SUPPORT)]
    print(f"  {loader.title}", flush=True)
    if name == "ours":
        paths.append(str(ROOT))
    else:
        environment = Environment(CONTENDERS / "peers" / f"{name}.txt")
        try:
            environment.prepare()
        except (RuntimeError, OSError) as error:
            return {"missing": str(error)}
        python = environment.python
    command = [sys.executable, "-m", "faults.compared", "--adapter", name, "--loader", loader.title]
    command += ["--python", python, "--out", str(outcomes), "--kills", str(kills), "--minutes", str(minutes)]
    command += ["--elastic"] if loader.elastic else []
    done = subprocess.run(
        [*command, "--paths", *paths], env={**os.environ, "PYTHONPATH": str(SUPPORT)}, check=False, cwd=BUILD
    )
    if done.returncode:
        return {"missing": f"its run ended with status {done.returncode}"}
    version = packages_of(python).get(loader.package, "")
    return _facts(python) | {"version": version, "kills": kills, "outcomes": grouped(_lines(outcomes))}


def _facts(python: str) -> Results:
    found = code(python)
    packages = {name: found["packages"][name] for name in NAMED if name in found["packages"]}
    return {"begun": timestamp(), "machine": machine(), "code": found | {"packages": packages}}


def _fresh(name: str) -> Path:
    BUILD.mkdir(parents=True, exist_ok=True)
    path = BUILD / name
    path.unlink(missing_ok=True)
    return path


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _without_paths(text: str) -> str:
    """Leave of each path its last part: where tests ran is nobody's business."""
    return re.sub(r"(?:\w+://|(?<![\w:/]))/(?:[^\s/'\"\]]+/)+", "", text)


def _read(path: Path) -> Results:
    """Return the results so far."""
    if not path.exists():
        return {"kind": "reliability", "tests": None, "loaders": {}}
    results: Results = json.loads(path.read_text(encoding="utf-8"))
    return results


def _keep(path: Path, name: str, value: Any) -> None:
    """Put something into the file of the results."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(_read(path) | {name: value}, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, path)  # noqa: PTH105 - replaces in one step
