"""The promised figures, such as ratios to raw Arrow: each with its bound, its aim, and the verdict on results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.measure.peers import PEERS
from benchmarks.measure.workloads import (
    ARROW_DIRECTORY,
    ARROW_FILES,
    ARROW_SCANNER,
    AS_ARROW,
    AS_PACKED,
    FOOTERS_ON_S3,
    HALF_A_GROUP,
    IN_PROCESS,
    OBSTORE,
    PACKED,
    SOURCES,
    TWO_WORKERS,
)

__all__ = [
    "CLAIMS",
    "NEEDED",
    "SETTLED",
    "Claim",
    "NotTakenError",
    "Verdict",
    "aside",
    "errors_of",
    "judge",
    "memory_slope",
    "table",
]

Results = Mapping[str, Any]
SETTLED = 5
"""Epochs after which memory must not grow; before, allocators and caches fill."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A promised figure.

    Attributes:
        name: What is promised.
        workload: The workload that measures it.
        value: Computes it from the workload's results.
        least: The bound.
        aim: What it should be at best.
        at_most: Whether bound and aim are upper limits.
        unit: The unit to print after the figure.
    """

    name: str
    workload: str
    value: Callable[[Results], float]
    least: float
    aim: float
    at_most: bool = False
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a claim.

    Attributes:
        claim: The claim.
        value: The figure; None if it was not measured.
        passed: Whether it holds; None if it was not measured.
        why: Why there is no figure.
    """

    claim: Claim
    value: float | None
    passed: bool | None
    why: str = ""

    @property
    def shown(self) -> str:
        """The figure with its unit."""
        return "-" if self.value is None else f"{self.value:.3g}{self.claim.unit}"


class NotTakenError(LookupError):
    """A contender did not take part, because its environment was not made."""


def judge(results: Results) -> list[Verdict]:
    """Return the verdicts on all claims by the results of one session."""
    verdicts = []
    for claim in CLAIMS:
        workload = results["workloads"].get(claim.workload)
        if workload is None:
            verdicts.append(Verdict(claim, None, passed=None, why="not measured"))
            continue
        try:
            value = claim.value(workload)
        except NotTakenError as reason:
            verdicts.append(Verdict(claim, None, passed=None, why=str(reason)))
        except (LookupError, ZeroDivisionError) as error:
            why = errors_of(workload)
            verdicts.append(Verdict(claim, None, passed=False, why=why or f"no figure: {error!r}"))
        else:
            passed = value <= claim.least if claim.at_most else value >= claim.least
            verdicts.append(Verdict(claim, value, passed=passed))
    return verdicts


def errors_of(workload: Results) -> str:
    """Return the last lines of the errors of a workload's contenders, without repetition."""
    ends = [found["error"].rpartition(" | ")[2][:200] for found in workload["contenders"].values() if found["error"]]
    return "; ".join(dict.fromkeys(ends))


def table(verdicts: Sequence[Verdict]) -> list[str]:
    """Return the lines that `check` prints."""
    lines = [f"{'':72} {'measured':>10} {'bound':>10} {'aim':>10}"]
    for verdict in verdicts:
        claim = verdict.claim
        sign = "<=" if claim.at_most else ">="
        word = {True: "PASS", False: "FAIL", None: "SKIP"}[verdict.passed]
        reached = verdict.value is not None and (
            verdict.value <= claim.aim if claim.at_most else verdict.value >= claim.aim
        )
        word += ", aim reached" if reached and verdict.passed else ""
        bound, aim = f"{sign} {claim.least:g}{claim.unit}", f"{sign} {claim.aim:g}{claim.unit}"
        lines.append(f"{claim.name:72} {verdict.shown:>10} {bound:>10} {aim:>10}  {word} {verdict.why}".rstrip())
    return lines


def _ratio(contender: str, rate: str = "rate") -> Callable[[Results], float]:
    """Return the function that computes a contender's ratio to the workload's baseline."""
    return lambda workload: float(workload["contenders"][contender]["ratio"][rate]["median"])


def _median(workload: Results, contender: str, figure: str) -> float:
    return float(workload["contenders"][contender]["summary"][figure]["median"])


def _versus(contender: str, other: str, rate: str = "rate") -> Callable[[Results], float]:
    """Return the function that computes the median ratio of two contenders' rates in the same round."""

    def value(workload: Results) -> float:
        if other not in workload["contenders"]:
            message = "the other loader's environment is missing: python -m benchmarks peers makes it"
            raise NotTakenError(message)
        pairs = zip(workload["contenders"][contender]["runs"], workload["contenders"][other]["runs"], strict=False)
        ratios = [run[rate] / against[rate] for run, against in pairs]
        if not ratios:
            raise LookupError("no runs of both")
        return float(statistics.median(ratios))

    return value


def _of_fastest(contender: str, rate: str) -> Callable[[Results], float]:
    """Return the function that computes a contender's median ratio to the fastest other S3 reader of the same round."""

    def value(workload: Results) -> float:
        others = [workload["contenders"][name]["runs"] for name in (ARROW_FILES, ARROW_SCANNER, OBSTORE)]
        rounds = zip(workload["contenders"][contender]["runs"], *others, strict=False)
        ratios = [run[rate] / max(other[rate] for other in against) for run, *against in rounds]
        if not ratios:
            raise LookupError("no runs of all")
        return float(statistics.median(ratios))

    return value


def _mixed(way: str) -> Callable[[Results], float]:
    """Return the function that divides the chi-square of a way to shuffle by a perfect window's."""
    return lambda workload: workload["contenders"][way]["checked"]["chi_square"] / workload["facts"]["perfect"][way]


def _requests(contender: str) -> Callable[[Results], float]:
    """Return the function that divides the data requests by the column runs."""
    return lambda workload: (
        workload["contenders"][contender]["checked"]["data_requests"] / workload["facts"]["column_runs"]
    )


def _footer_requests(contender: str) -> Callable[[Results], float]:
    """Return the function that computes the requests for the footer and size of a file."""
    return lambda workload: (
        sum(workload["contenders"][contender]["checked"][f"{kind}_requests"] for kind in ("footer", "head"))
        / workload["facts"]["files"]
    )


def _footers(workload: Results) -> float:
    others = ("plain loop of pq.read_metadata", "pq.read_metadata in 16 threads")
    fastest = min(_median(workload, other, "construction_s") for other in others)
    return _median(workload, "torch_dataloader_utils", "construction_s") / fastest


def _footers_on_s3(workload: Results) -> float:
    return _median(workload, IN_PROCESS, "construction_s") / _median(workload, FOOTERS_ON_S3, "construction_s")


def _set_epoch(workload: Results) -> float:
    cost = _median(workload, "torch_dataloader_utils", "set_epoch_and_plan_s")
    return 100 * cost / _median(workload, "torch_dataloader_utils", "construction_s")


def _bounded(contender: str) -> Callable[[Results], float]:
    """Return the function that divides the peak above the bare import by the documented bound."""
    return lambda workload: (
        workload["contenders"][contender]["checked"]["above_import_anonymous"]
        / workload["facts"]["bound_bytes"][contender]
    )


def _resume(how: str) -> Callable[[Results], float]:
    return lambda workload: (
        _median(workload, f"resume at 99 %, {how}", "first_batch_s")
        / _median(workload, f"fresh start, {how}", "first_batch_s")
    )


def memory_slope(by_epoch: Sequence[float]) -> float:
    """Return by how much a line through the settled epochs rises in each, in % of their mean."""
    settled = by_epoch[SETTLED:]
    mean, middle = sum(settled) / len(settled), (len(settled) - 1) / 2
    rise = sum((number - middle) * value for number, value in enumerate(settled))
    return 100 * rise / sum((number - middle) ** 2 for number in range(len(settled))) / mean


def _slope(contender: str) -> Callable[[Results], float]:
    """Return the function that computes the mean slope of all runs: one swings by more than the bound."""
    return lambda workload: statistics.fmean(
        memory_slope(run["pss_by_epoch"]) for run in _all_runs(workload["contenders"][contender])
    )


def _grown(contender: str, figure: str) -> Callable[[Results], float]:
    """Return the function that computes how much a count grew over the settled epochs, in the run that it grew most."""

    def value(workload: Results) -> float:
        counts = [run[figure][SETTLED:] for run in _all_runs(workload["contenders"][contender])]
        return float(max(max(of_run) - of_run[0] for of_run in counts))

    return value


def _all_runs(found: Results) -> Sequence[Results]:
    """Return a contender's runs, unless one has failed."""
    if found["error"] or not found["runs"]:
        raise LookupError(found["error"] or "no runs")
    runs: Sequence[Results] = found["runs"]
    return runs


HOWS = ("in process", "2 workers")
LOADERS = {"in process": IN_PROCESS, "2 workers": TWO_WORKERS}
PUBLISHED = f"{PEERS['published'].title}, 2 workers"
EPOCH_WAYS = ("in process", "2 persistent workers", "2 new workers each epoch")

CLAIMS: tuple[Claim, ...] = (
    Claim("numeric, in process, of raw Arrow", "numeric", _ratio(IN_PROCESS), 0.75, 0.9),
    Claim("numeric, 2 workers, of raw Arrow", "numeric", _ratio(TWO_WORKERS), 0.45, 0.6),
    *(
        Claim(f"{name}, {how}, of raw Arrow", name, _ratio(LOADERS[how]), least, aim)
        for name in ("groups_of_50k", "groups_of_100k")
        for how, least, aim in (("in process", 0.75, 0.9), ("2 workers", 0.45, 0.6))
    ),
    Claim("strings as Python lists, of raw Arrow", "strings", _ratio(IN_PROCESS), 0.6, 0.8),
    Claim("strings as packed, of raw Arrow", "strings", _ratio(AS_PACKED), 0.85, 1.0),
    Claim("strings as Arrow, of raw Arrow", "strings", _ratio(AS_ARROW), 0.9, 1.0),
    Claim("two of a thousand columns, in process, of raw Arrow", "wide", _ratio(IN_PROCESS), 0.9, 1.0),
    Claim("two of a thousand columns, 2 workers, of raw Arrow", "wide", _ratio(TWO_WORKERS), 0.6, 1.0),
    *(
        Claim(
            f"{name}, in process, start included, of Arrow's reader", name, _ratio(IN_PROCESS, "whole_rate"), least, 1.2
        )
        for name, least in (("orc", 1.0), ("csv", 0.9), ("jsonl", 0.9))
    ),
    Claim("a slow collate_fn, 2 workers, of one", "collate_1ms", _versus("2 workers", "1 workers"), 1.9, 2.0),
    Claim("one rank for four, of no grid", "grid", _ratio("one rank for four"), 0.8, 0.9),
    Claim("numeric, 2 workers, of the published package", "numeric", _versus(TWO_WORKERS, PUBLISHED), 60, 60, unit="x"),
    Claim("tokens, in process, of raw Arrow", "tokens", _ratio(IN_PROCESS), 0.75, 0.95),
    Claim("tokens, 2 workers, of raw Arrow", "tokens", _ratio(TWO_WORKERS), 0.5, 0.75),
    *(
        Claim(f"{name}, {how}, of Arrow's S3 reader file by file", name, _ratio(LOADERS[how]), 1.0, 1.0)
        for name in ("s3", "s3_projected")
        for how in HOWS
    ),
    *(
        Claim(
            f"{name}, {how}, start included, of the fastest", name, _of_fastest(LOADERS[how], "whole_rate"), least, 1.1
        )
        for name in ("s3", "s3_few", "s3_large")
        for how, least in (("in process", 1 / 1.1), ("2 workers", 1 / 1.2))
    ),
    *(
        Claim(
            f"{name}, {how}, a second epoch, of the fastest", name, _of_fastest(LOADERS[how], "second_rate"), 1.0, 1.3
        )
        for name in ("s3", "s3_few", "s3_large")
        for how in HOWS
    ),
    *(
        Claim(f"{name}, {how}: data requests of column runs", name, _requests(LOADERS[how]), 1.2, 1.0, at_most=True)
        for name in ("s3", "s3_projected")
        for how in HOWS
    ),
    *(
        Claim(f"{name}, {how}: requests a footer", name, _footer_requests(LOADERS[how]), 2.0, 1.0, at_most=True)
        for name in ("s3", "s3_projected")
        for how in HOWS
    ),
    Claim("numeric, rows shuffled, of unshuffled", "shuffle", _ratio("rows shuffled"), 0.7, 0.85),
    *(
        Claim(
            f"{what}, row groups larger than the buffer, start included, of unshuffled",
            workload,
            _ratio(contender, "whole_rate"),  # before the first batch a fifth of the rows is read
            0.6,
            0.75,
        )
        for what, workload, contender in (
            ("numeric", "shuffle", HALF_A_GROUP),
            ("labels", "mixing_large", "8 side by side"),
        )
    ),
    *(
        Claim(
            f"mixture of {count} sources, {how}, of one dataset",
            "mixture",
            _versus(f"{count} sources, {how}", f"one dataset, {how}"),
            0.8,
            1.0,
        )
        for count in SOURCES
        for how in HOWS
    ),
    *(
        Claim(f"documents {name}, {how}, of jagged", "packing", _versus(f"{name}, {how}", f"jagged, {how}"), least, aim)
        for name, least, aim in zip(PACKED, (0.8, 0.6), (0.95, 0.8), strict=True)
        for how in HOWS
    ),
    *(
        Claim(f"{name}, {way}: chi-square, of a perfect window's", name, _mixed(way), 1.15, 1.0, at_most=True)
        for name, way in (
            ("mixing_small", "buffer of 5,000 rows"),
            ("mixing_small", "buffer of 50,000 rows"),
            ("mixing_large", "8 side by side"),
        )
    ),
    Claim("10,000 local files: construction, of reading footers", "many_files", _footers, 1.1, 1.0, at_most=True),
    Claim(
        "10,000 files on S3: construction, of reading footers", "s3_many_files", _footers_on_s3, 1.1, 1.0, at_most=True
    ),
    Claim("10,000 local files: set_epoch, of construction", "many_files", _set_epoch, 5, 5, at_most=True, unit=" %"),
    Claim(
        "10,000 local files: state_dict late in an epoch",
        "many_files",
        lambda workload: 1000 * _median(workload, "torch_dataloader_utils", "state_dict_s"),
        5,
        5,
        at_most=True,
        unit=" ms",
    ),
    *(
        Claim(f"memory, {how}: of the documented bound", "memory", _bounded(name), 1.1, 1.0, at_most=True)
        for how, name in (
            *LOADERS.items(),
            ("rows shuffled, in process", "rows shuffled, in process"),
            ("rows shuffled, 2 workers", "rows shuffled, 2 workers"),
        )
    ),
    *(
        Claim(f"resume at 99 %, {how}: first batch, of a fresh start's", "resume", _resume(how), 2.0, 1.0, at_most=True)
        for how in HOWS
    ),
    *(
        Claim(f"{count} epochs, {way}: memory's slope", name, _slope(way), 0.05, 0.0, at_most=True, unit=" %")
        for count, name in ((20, "epochs"), (200, "epochs_200"))
        for way in EPOCH_WAYS
    ),
    *(
        Claim(f"20 epochs, {way}: {word} more", "epochs", _grown(way, figure), 0, 0, at_most=True)
        for way in EPOCH_WAYS
        for word, figure in (("open files", "files_by_epoch"), ("threads", "threads_by_epoch"))
    ),
)

NEEDED = tuple(dict.fromkeys(claim.workload for claim in CLAIMS))
ASIDE = (("s3", IN_PROCESS, ARROW_DIRECTORY), ("s3", TWO_WORKERS, ARROW_DIRECTORY))
"""Ratios that `check` prints without a bound, to Arrow reading a whole directory at once into memory."""


def aside(results: Results) -> list[str]:
    """Return the lines of ratios without a bound."""
    lines = []
    for name, contender, other in ASIDE:
        workload = results["workloads"].get(name)
        if workload is not None:
            try:
                value = _versus(contender, other, "whole_rate")(workload)
            except (LookupError, TypeError):
                continue
            lines.append(f"{name}, {contender}: {value:.3g} of {other}, start included (not judged)")
    return lines
