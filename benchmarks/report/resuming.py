"""The section of docs/benchmarks.md on coming back within an epoch beside other loaders, from the raw results."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

from benchmarks.measure.resuming import CASES, DIES, POINTS, RANKS, ROWS, SAVED, STEP_ROWS, STEPS, WAYS, WORKERS
from benchmarks.report.markdown import table
from benchmarks.report.origins import origins, what_was_said

__all__ = ["section"]

Results = Mapping[str, Any]

MIB = 1 << 20
OWN = "ours"

METHOD = f"""\
The same {ROWS:,} rows of 16 numbers in 8 Parquet files of 10 row groups for all; {WORKERS} worker processes, and all
columns of each batch. A loader saves its state after 1 %, 50 % and 99 % of its {STEPS} steps of {STEP_ROWS} rows. New
processes load the state and read one batch; at 0 % there is no state.

- **To the first batch**: seconds from the start of the process, imports included, and after **imports**. Medians of
  rounds in which the loaders took turns, files in the page cache. The 0 % point comes first in each turn, and so its
  imports find less of a loader's packages in the page cache than those of the others do.
- **Read**: MiB of its files, of the format that it reads, that are in the page cache once the first batch is there, in
  a run that begins with none of them in it. What the kernel and the loader read ahead counts.
- **Exact**: whether the first batch was the one that follows the state.
- **Lost**, **repeated**: {RANKS} ranks with {WORKERS} worker processes each save their states after step {SAVED} of
  {STEPS}, and kill themselves with SIGKILL after step {DIES}. New processes go on to the end of the epoch, on
  {CASES["same"]} ranks and on {CASES["more"]}. With as many ranks, rows are compared with those of a run without an
  interruption, and **out of order** are rows that follow another row than there. On more ranks, lost is a row of that
  run which never came, repeated is each time that a row came again. **Left out** are rows that the run without an
  interruption does not deliver.
"""

USES = {
    "ours": "each rank saves and loads its own state; on other ranks every rank loads all states with `strict=False`.",
    "ours_shuffled": "`shuffle=True`, `shuffle_buffer_size=10_000`.",
    "published": "the state of its dataset, as its README on PyPI says. It documents no other number of ranks.",
    "stateful": "a dataset with a state of its own, as its documentation recommends, of a worker's share of the row "
    "groups. It documents no other number of ranks.",
    "hf": "`split_dataset_by_node`, `batch`, and torchdata's `StatefulDataLoader`. Other ranks are not documented.",
    "hf_shuffled": "the same with `shuffle(buffer_size=10_000)`. Its documentation says that rows in the buffer are "
    "lost on resuming.",
    "hf_map": "rows by number, from its cache of Arrow files, in torchdata's `StatefulDataLoader`, which goes over the "
    "numbers that were delivered.",
    "grain": "`ParquetIterDataset` of each file, interleaved, `batch`, `mp_prefetch`; files by rank. Other ranks are "
    "not documented.",
    "grain_elastic": "all rows in memory, by number, with `shuffle`; its state is the same on all ranks.",
    "litdata": "`StreamingDataset` over indexed Parquet files with `drop_last`; each rank loads its own state, or the "
    "first one's.",
    "mosaic": "MDS shards that were made of the files; every rank loads the first one's state.",
    "lancedb": "a table that was made of the files; every rank loads the merged states of all.",
    "lance": "a dataset that was made of the files. No state: batches are read and dropped. No worker processes, its "
    "own threads read ahead.",
    "ray": "`iter_torch_batches` with `preserve_order`; files by rank. No state: batches are read and dropped. Ray's "
    "own start counts.",
    "webdataset": "a tar file of each file, 600 rows a sample; `split_by_node`, `split_by_worker`. No state: batches "
    "are read and dropped.",
}

READING = """\
Where a library keeps a state for each rank and documents no other number of ranks, each rank loads the state of its own
number, and a rank that has none begins its epoch: this is what happens to a job that is started again on other ranks.
"""


def section(results: Results) -> Iterator[str]:
    """Give the section's lines.

    Args:
        results: The raw results.
    """
    ways = {name: results["ways"][name] for name in WAYS if name in results["ways"]}
    ran = {name: found for name, found in ways.items() if "missing" not in found}
    told = [(WAYS[name].title, WAYS[name].package, found) for name, found in ways.items()]
    yield from ("## Coming back within an epoch, beside its peers", "", METHOD)
    yield from ("### To the first batch", "", *_seconds(ran), *_load(ran))
    yield from ("### What is read, and whether it is the right batch", "", *_bytes(ran))
    yield from ("### Rows after a kill", "", *_rows(ran), *what_was_said(_errors(ran)), READING)
    yield from (f"- {WAYS[name].title}: {USES[name]}" for name in ran if name in USES)
    yield from ("", "### Where a peer comes back faster", "", *_wins(ran), "", "### What ran", "", *origins(told))


def _seconds(ran: Mapping[str, Results]) -> Iterator[str]:
    header = ["seconds", "imports"]
    for percent in POINTS:
        header += [f"{percent} %", "after imports"]
    yield from table(header, [[WAYS[name].title, *_seconds_cells(found)] for name, found in ran.items()])


def _load(ran: Mapping[str, Results]) -> Iterator[str]:
    """Say what the machine had to do in each round: the load averages before its runs."""
    points = [point for found in ran.values() for point in found["points"].values() if "load" in point]
    rounds = list(zip_longest(*(point["load"] for point in points)))
    if rounds:
        loads = [[load for load in loads if load is not None] for loads in rounds]
        spreads = [f"{min(of):.1f} to {max(of):.1f}" for of in loads]
        yield from (f"Load average of the machine in each round: {', '.join(spreads)}.", "")


def _seconds_cells(found: Results) -> Iterator[str]:
    imports = [seconds for point in found["points"].values() for seconds in point["imported_s"]]
    yield f"{statistics.median(imports):.1f}" if imports else "-"
    for percent in POINTS:
        point = found["points"].get(percent, {})
        whole, after = _medians(point)
        yield from (_refusal(point), "") if whole is None else (f"{whole:.1f}", f"{after:.2f}")


def _medians(point: Results) -> tuple[float, float] | tuple[None, None]:
    """Return the seconds to the first batch, from the start and after the imports."""
    if "error" in point or not point.get("first_batch_s"):
        return None, None
    after = [whole - imported for whole, imported in zip(point["first_batch_s"], point["imported_s"], strict=True)]
    return statistics.median(point["first_batch_s"]), statistics.median(after)


def _bytes(ran: Mapping[str, Results]) -> Iterator[str]:
    header = ["MiB read", *(f"{percent} %" for percent in POINTS), "exact", "state, KiB"]
    yield from table(header, [[WAYS[name].title, *_bytes_cells(found)] for name, found in ran.items()])


def _bytes_cells(found: Results) -> Iterator[str]:
    points = found["points"]
    for percent in POINTS:
        point = points.get(percent, {})
        yield f"{point['bytes'] / MIB:.1f}" if "bytes" in point else _refusal(point)
    exact = [point["exact"] for point in points.values() if "exact" in point]
    yield "yes" if exact and all(exact) else "no" if not any(exact) else f"{sum(exact)} of {len(exact)}"
    sizes = [point["state_bytes"] for point in points.values() if "state_bytes" in point]
    yield f"{max(sizes) / 1024:,.1f}" if sizes else "-"


def _rows(ran: Mapping[str, Results]) -> Iterator[str]:
    header = ["", "left out", f"{RANKS} ranks: lost", "repeated", "out of order"]
    header += [f"{RANKS} to {CASES['more']} ranks: lost", "repeated"]
    yield from table(header, [[WAYS[name].title, *_rows_cells(found["cases"])] for name, found in ran.items()])


def _rows_cells(cases: Results) -> Iterator[str]:
    if cases["error"]:
        yield from (_refusal(cases), "", "", "", "", "")
        return
    yield f"{cases['left_out']:,}"
    for name, counts in (("same", ("lost", "repeated", "out_of_order")), ("more", ("lost", "repeated"))):
        case = cases[name]
        if case["error"]:
            yield from (_refusal(case), *[""] * (len(counts) - 1))
        else:
            yield from (f"{case[count]:,}" for count in counts)


def _refusal(case: Results) -> str:
    """Say in a word what an error is: a value that is refused, or something that went wrong."""
    error = case.get("error")
    if not error:
        return "-"
    return "refused" if error.startswith(("ValueError", "NotImplementedError", "AssertionError")) else "an error"


def _errors(ran: Mapping[str, Results]) -> Iterator[tuple[str, str]]:
    for name, found in ran.items():
        cases = {f"at {percent} %": point for percent, point in found["points"].items()}
        cases["killed"] = found["cases"]
        cases |= {f"on {ranks} ranks": found["cases"].get(case, {}) for case, ranks in CASES.items()}
        for case, result in cases.items():
            if result.get("error"):
                yield f"{WAYS[name].title}, {case}", result["error"]


def _wins(ran: Mapping[str, Results]) -> Iterator[str]:
    """Name, for each point, those that need less time than this library, after the imports and with them."""
    for percent in POINTS:
        own = _medians(ran.get(OWN, {}).get("points", {}).get(percent, {}))
        faster = []
        for name, found in ran.items():
            theirs = _medians(found["points"].get(percent, {}))
            if WAYS[name].module == OWN or None in own or None in theirs:
                continue
            shares = [
                f"{words} {mine - other:.2f} s sooner"
                for words, mine, other in _pairs(own, theirs)
                if round(mine - other, 2) > 0
            ]
            if shares:
                faster.append(f"{WAYS[name].title}: {', '.join(shares)}")
        yield f"- At {percent} %: {'; '.join(faster) if faster else 'none'}."


def _pairs(own: tuple[Any, Any], theirs: tuple[Any, Any]) -> Iterator[tuple[str, float, float]]:
    return zip(("from the start", "after imports"), own, theirs, strict=True)
