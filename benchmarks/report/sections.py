"""The sections of the page, one for each workload, with its tables and its plot."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure.peers import PEERS
from benchmarks.measure.workloads import RAW_ARROW
from benchmarks.report import claims
from benchmarks.report.markdown import table
from benchmarks.report.plots import Bar, Point, bars, dots, points

__all__ = ["TITLES", "is_peer", "section"]

Results = Mapping[str, Any]

MIB = 1 << 20

TITLES = {
    "numeric": "Numeric columns",
    "tokens": "Tokens",
    "groups_of_50k": "Numeric columns, row groups of 50,000 rows",
    "groups_of_100k": "Numeric columns, row groups of 100,000 rows",
    "small_files": "Numeric columns, 200 files of 5,000 rows",
    "small_files_of_strings": "Strings, 200 files of 2,000 rows",
    "strings": "Strings",
    "values": "Times, dates, decimals and categories as Python lists",
    "categories": "Strings of few values as Python lists",
    "wide": "Two of a thousand columns",
    "uneven": "Files of very different sizes",
    "orc": "ORC",
    "csv": "CSV",
    "jsonl": "JSON Lines",
    "s3": "S3, all columns",
    "s3_few": "S3, few large files",
    "s3_large": "S3, 1 GB",
    "s3_projected": "S3, few of many columns",
    "s3_clients": "Three S3 clients behind the loader",
    "collate_1ms": "A collate_fn that takes 1 ms of CPU a batch",
    "shuffle": "Shuffling",
    "rows_shuffled": "Rows shuffled",
    "small_groups_shuffled": "Rows shuffled, row groups of 2,000 rows",
    "mixture": "Mixtures, rows shuffled",
    "grid": "One rank that stands for four",
    "packing": "Documents packed into sequences",
}


MIXING_TITLES = {
    "mixing_small": "Mixing small row groups",
    "mixing_large": "Mixing row groups larger than the buffer",
}


ALL_WARM_SINCE = "2026-11-26T16:50:00Z"
"""When each run began to find what it reads in the page cache. Before, only the first run of a workload surely did."""

NOT_ALL_WARM = (
    "Measured before files were read into the page cache for each run. Raw Arrow, the first of each round, and peers "
    "with a converted copy may have read some from the disk: then its rate is too low, and what others have of it too "
    "high."
)


def section(name: str, workload: Results, plots: Path, kind: str) -> Iterable[str]:
    """Return the lines of a workload's section, and draw its plot.

    Args:
        name: The workload.
        workload: Its raw results.
        plots: The folder for its plot.
        kind: The session's kind, which begins the plot's name; of another machine with its number of cores.
    """
    return SECTIONS.get(name, _rates)(name, workload, plots, kind)


def is_peer(contender: str) -> bool:
    """Whether a contender is neither this library nor Arrow."""
    return contender.startswith(PEER_TITLES)


def _rates(name: str, workload: Results, plots: Path, kind: str) -> Iterator[str]:
    """Rates of all contenders, their first batch and their memory; then the requests to S3."""
    unit = workload["facts"].get("unit", "rows")
    yield from (f"### {TITLES.get(name, name)}", "", *_data(workload))
    yield from table(
        ["", f"{unit}/s", "of baseline", "with start", "first batch, s", "memory, MiB", "no file's, MiB", unit],
        [_rate_row(contender, found, workload) for contender, found in workload["contenders"].items()],
    )
    yield from _remarks(workload)
    if "column_runs" in workload["facts"]:
        yield from _second_epoch(workload)
        yield from _requests(workload)
    shown = [
        Bar(contender, *_spread(found, "rate"), _kind(contender))
        for contender, found in workload["contenders"].items()
        if "rate" in found.get("summary", {})
    ]
    if len(shown) > 1:
        path = plots / f"{kind}-{name}.svg"
        draw = dots if kind == "peers" else bars  # peers are several orders of magnitude apart
        draw(path, TITLES.get(name, name), f"{unit} a second", shown)
        yield from (f"![{unit.capitalize()} a second, {TITLES.get(name, name)}]({plots.name}/{path.name})", "")


def _rate_row(contender: str, found: Results, workload: Results) -> list[str]:
    if "summary" not in found:
        return [contender, *["-"] * 6, "no result" if found["error"] else _memory_only(found)]
    summary, checked = found["summary"], found["checked"]
    rows = summary["rows"]["median"]
    ratio = found.get("ratio", {})
    return [
        contender,
        _with_spread(summary.get("rate"), "{:,.0f}"),
        _with_spread(ratio.get("rate"), "{:.2f}") if contender != workload["baseline"] else "1",
        _with_spread(ratio.get("whole_rate"), "{:.2f}") if contender != workload["baseline"] else "1",
        _with_spread(summary.get("first_batch_s"), "{:.3f}"),
        f"{checked['above_import_pss'] / MIB:,.0f}",
        f"{checked['above_import_anonymous'] / MIB:,.0f}",
        f"{rows:,.0f}" + ("" if rows >= workload["data"]["rows"] else f" of {workload['data']['rows']:,}"),
    ]


def _memory_only(found: Results) -> str:
    return f"{found['checked'].get('rows', 0):,}"


def _remarks(workload: Results) -> Iterator[str]:
    """List errors, contenders that deliver no tensors, and how long conversions took."""
    remarks = [f"{name}: {found['error']}" for name, found in workload["contenders"].items() if found["error"]]
    for name, found in workload["contenders"].items():
        kind = found["checked"].get("kind") or "Tensor"
        if not kind.startswith("Tensor") and not name.startswith((RAW_ARROW, "Arrow's")):
            remarks.append(f"{name} delivers no tensors: its first column is a {kind}.")
    for name, figures in workload["facts"].get("conversions", {}).items():
        if "error" in figures:
            remarks.append(f"{name}: converting failed: {figures['error']}")
        else:
            rows = f" for {figures['rows']:,} rows" if "rows" in figures else ""
            remarks.append(f"{name}: converting or indexing took {figures['convert_s']:.1f} s{rows}.")
    has_peers = bool(workload["facts"].get("conversions"))
    if has_peers and workload["baseline"] == RAW_ARROW and workload["begun"] < ALL_WARM_SINCE:
        remarks.append(NOT_ALL_WARM)
    if remarks:
        yield from (*(f"- {remark.replace('|', '/')}" for remark in remarks), "")


def _second_epoch(workload: Results) -> Iterator[str]:
    found = {name: entry.get("summary", {}).get("second_rate") for name, entry in workload["contenders"].items()}
    rates = {name: rate for name, rate in found.items() if rate is not None}
    if not rates:
        return
    yield (
        "A second epoch by the same loader. Workers are persistent, and footers are known. Arrow and obstore "
        "do not list again; Arrow's reader reads each footer again:"
    )
    yield ""
    yield from table(["", "rows/s"], [[name, _with_spread(rate, "{:,.0f}")] for name, rate in rates.items()])


def _requests(workload: Results) -> Iterator[str]:
    facts = workload["facts"]
    yield (
        f"The wanted column chunks make {facts['column_runs']} runs in {facts['files']} files, row group by row group, "
        f"once gaps up to 64 KiB are merged: {facts['column_bytes'] / MIB:.1f} MiB in all. Requests of an epoch, start "
        "included:"
    )
    yield ""
    names = ("data_requests", "footer_requests", "head_requests", "list_requests", "other_requests")
    yield from table(
        ["", "data", "footers", "HEAD", "LIST", "others", "MiB of data", "MiB in all", "server CPU, s"],
        [
            [
                contender,
                *(f"{found['checked'][name]:.0f}" for name in names),
                *(f"{found['checked'][name] / MIB:.1f}" for name in ("data_bytes", "all_bytes")),
                f"{found['checked']['server_cpu_s']:.2f}",
            ]
            for contender, found in workload["contenders"].items()
            if found["checked"]
        ],
    )


def _many_files(_name: str, workload: Results, _plots: Path, _kind_of_session: str) -> Iterator[str]:
    yield from ("### Many files", "", *_data(workload))
    found = {name: entry.get("summary", {}) for name, entry in workload["contenders"].items()}
    labels = {
        "construction_s": "listing, and reading all footers (of the loader: its whole construction)",
        "set_epoch_and_plan_s": "`set_epoch`, with the planning that it causes",
        "state_dict_s": "`state_dict()` with all but the last batch delivered",
        "state_bytes": "bytes of that state as JSON",
    }
    rows = []
    for figure, label in labels.items():
        for name, summary in found.items():
            if figure in summary:
                shown = _with_spread(summary[figure], "{:,.0f}" if figure == "state_bytes" else "{:.4f}")
                rows.append([label, name, shown])
    yield from table(["", "", "s (or bytes)"], rows)
    yield from _remarks(workload)


def _s3_many_files(_name: str, workload: Results, _plots: Path, _kind_of_session: str) -> Iterator[str]:
    yield from ("### Many files on S3", "", *_data(workload))
    delay_ms = workload["facts"]["delay_ms"]
    yield f"Listing, and reading all footers. The server answers each request after {delay_ms} ms, objects from memory."
    yield ""
    found = {name: entry["summary"] for name, entry in workload["contenders"].items() if "summary" in entry}
    figures = ("construction_s", "requests", "server_cpu_s")
    yield from table(
        ["", "s", "requests", "server's CPU, s"],
        [[name, *(_with_spread(summary[figure], "{:,.2f}") for figure in figures)] for name, summary in found.items()],
    )
    yield from _remarks(workload)


def _resume(name: str, workload: Results, plots: Path, kind: str) -> Iterator[str]:
    yield from ("### Coming back within an epoch", "", *_data(workload))
    yield "Seconds from the beginning of construction to the first batch. Fast-forwarding iterates to the same place."
    yield ""
    yield from table(
        ["", "first batch, s", "loading the state, s"],
        [
            [
                contender,
                _with_spread(found["summary"]["first_batch_s"], "{:.3f}"),
                f"{found['summary']['load_state_s']['median']:.4f}" if contender.startswith("resume") else "-",
            ]
            for contender, found in workload["contenders"].items()
            if "summary" in found
        ],
    )
    yield from _remarks(workload)
    shown = [
        Bar(contender, *_spread(found, "first_batch_s"), "ours" if contender.startswith("resume") else "arrow")
        for contender, found in workload["contenders"].items()
        if "summary" in found
    ]
    if shown:
        bars(plots / f"{kind}-{name}.svg", "Coming back within an epoch", "seconds to the first batch", shown)
        yield from (f"![Seconds to the first batch]({plots.name}/{kind}-{name}.svg)", "")


def _epochs(_name: str, workload: Results, _plots: Path, _kind_of_session: str) -> Iterator[str]:
    yield from (f"### {workload['facts']['epochs']} epochs in one process", "", *_data(workload))
    yield (
        "The slope is that of a line through the memory after each epoch, in % an epoch, from the "
        f"{claims.SETTLED + 1}th to the last; "
        "least and most are of the same epochs. Of several runs, each a process of its own, the slope is the mean. "
        "The gap is from the last batch of an epoch to the first of the next."
    )
    yield ""
    rows = []
    for contender, found in workload["contenders"].items():
        runs = found["runs"]
        if not runs:
            continue
        slopes = [claims.memory_slope(run["pss_by_epoch"]) for run in runs]
        slope = f"{statistics.fmean(slopes):.3f} %" + (
            f" [{min(slopes):.3f}, {max(slopes):.3f}]" if len(slopes) > 1 else ""
        )
        settled = [size / MIB for run in runs for size in run["pss_by_epoch"][claims.SETTLED :]]
        counts = [_least_to_most(run[key] for run in runs) for key in ("files_by_epoch", "threads_by_epoch")]
        gaps = [
            f"{statistics.median(run['gap_s'] for run in runs):.3f}",
            f"{max(run['greatest_gap_s'] for run in runs):.3f}",
        ]
        rows.append([contender, str(len(runs)), slope, f"{min(settled):.0f} to {max(settled):.0f}", *counts, *gaps])
    headings = ["", "runs", "slope", "memory, MiB", "open files", "threads", "median gap, s", "greatest gap, s"]
    yield from table(headings, rows)
    yield from _remarks(workload)


def _least_to_most(by_epoch_of_runs: Iterable[Sequence[int]]) -> str:
    settled = [count for by_epoch in by_epoch_of_runs for count in by_epoch[claims.SETTLED :]]
    return f"{min(settled)} to {max(settled)}"


def _mixing(name: str, workload: Results, plots: Path, kind: str) -> Iterator[str]:
    yield from (f"### {MIXING_TITLES[name]}", "", *_data(workload))
    yield (
        "Chi-square per degree of freedom of the labels of each batch: 1 is a full shuffle. A perfect window takes row "
        "groups in random order and mixes as many rows as the buffer has, perfectly."
    )
    yield ""
    rows, shown = [], []
    for contender, found in workload["contenders"].items():
        if not found["checked"]:
            continue
        measured, perfect = found["checked"]["chi_square"], workload["facts"]["perfect"].get(contender)
        ratio = found.get("ratio", {}).get("rate")
        memory = found["checked"]["above_import_anonymous"] / MIB
        window = ["-", "-"] if perfect is None else [f"{perfect:.2f}", f"{measured / perfect:.2f}"]
        rate = "1" if contender == workload["baseline"] else _with_spread(ratio, "{:.2f}")
        rows.append([contender, f"{measured:.2f}", *window, rate, f"{memory:,.0f}"])
        if perfect is not None:
            shown.append(Point(contender, memory, measured))
    yield from table(["", "chi-square", "perfect window", "of it", "rate of unshuffled", "no file's memory, MiB"], rows)
    yield from _remarks(workload)
    if shown:
        points(plots / f"{kind}-{name}.svg", MIXING_TITLES[name], ("memory, MiB", "chi-square"), shown)
        yield from (f"![Chi-square and memory]({plots.name}/{kind}-{name}.svg)", "")


def _steps(_name: str, workload: Results, _plots: Path, _kind_of_session: str) -> Iterator[str]:
    yield from ("### What a step costs apart from its batch", "", *_data(workload))
    labels = {
        "collate_worker_us": "a `collate_fn` that does nothing, in a worker (CPU): seeding, and a copy of the batch",
        "collate_process_us": "the same in the training process: seeding, and putting the generators back",
        # Of results that were taken when seeding was measured alone.
        "seeding_worker_us": "seeding the generators for a `collate_fn`, in a worker",
        "seeding_process_us": "the same in the training process, where they are put back",
        "in_step_us": "`in_step` of two ranks, on top of a step of about 2 ms without it",
    }
    runs = [run for found in workload["contenders"].values() for run in found["runs"]]
    yield from table(
        ["", "microseconds"],
        [[label, f"{run[key]:.0f}"] for run in runs for key, label in labels.items() if key in run],
    )
    yield from _remarks(workload)


def _memory(_name: str, workload: Results, _plots: Path, _kind_of_session: str) -> Iterator[str]:
    yield from ("### Memory", "", *_data(workload))
    group, bounds = workload["data"]["row_group_bytes"], workload["facts"]["bound_bytes"]
    yield f"The largest row group is {group / MIB:.1f} MiB, once decoded. Peaks are above the bare import."
    yield ""
    rows = []
    for contender, found in workload["contenders"].items():
        if found["checked"]:
            peak, anonymous = (found["checked"][f"above_import_{key}"] for key in ("pss", "anonymous"))
            bound = f"{bounds[contender] / MIB:,.1f}" if contender in bounds else "-"
            rows.append([contender, f"{peak / MIB:,.1f}", f"{anonymous / MIB:,.1f}", f"{anonymous / group:.1f}", bound])
    header = ["", "peak, MiB", "no file's, MiB", "in row groups", "decoded data held, MiB"]
    yield from table(header, rows)
    yield from _remarks(workload)


SECTIONS: Mapping[str, Callable[[str, Results, Path, str], Iterable[str]]] = {
    "many_files": _many_files,
    "s3_many_files": _s3_many_files,
    "mixing_small": _mixing,
    "mixing_large": _mixing,
    "steps": _steps,
    "resume": _resume,
    "epochs": _epochs,
    "epochs_200": _epochs,
    "memory": _memory,
}


def _data(workload: Results) -> Iterator[str]:
    data = workload["data"]
    files = "1 file" if data["files"] == 1 else f"{data['files']:,} files"
    yield (
        f"{data['rows']:,} rows: {data['note']}. {files}, {data['file_bytes'] / MIB:,.0f} MiB, "
        f"batches of {data['batch_size']:,}. {_when(workload)}"
    )
    yield ""


def _when(workload: Results) -> str:
    """Return the commit that was measured, when, and in how many rounds."""
    code, rounds = workload["code"], workload["rounds"]
    commit = f"`{code['commit'][:12]}`{' with changes' if code['changed'] else ''}" if code["commit"] else "unknown"
    return (
        f"Commit {commit}, begun {workload['begun']}, {rounds} {'round' if rounds == 1 else 'rounds'}{_load(workload)}."
    )


def _load(workload: Results) -> str:
    """Return the machine's load averages before the runs, where they were written."""
    runs = [run for found in workload["contenders"].values() for run in found["runs"]]
    loads = [run["load"] for run in runs if "load" in run]
    return f", load average {min(loads):.1f} to {max(loads):.1f}" if loads else ""


def _kind(contender: str) -> str:
    if contender.startswith((RAW_ARROW, "Arrow's")):
        return "arrow"
    return "peer" if is_peer(contender) else "ours"


PEER_TITLES = tuple(peer.title for peer in PEERS.values())


def _spread(found: Results, figure: str) -> tuple[float, float, float]:
    summary = found["summary"][figure]
    return summary["median"], summary["min"], summary["max"]


def _with_spread(summary: Results | None, form: str) -> str:
    if summary is None:
        return "-"
    low, high = form.format(summary["min"]), form.format(summary["max"])
    return form.format(summary["median"]) + (f" [{low}, {high}]" if low != high else "")
