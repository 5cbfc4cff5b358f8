"""The page docs/benchmarks.md: method, machine, and every figure, taken from the raw results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure.s3 import DELAY_MS
from benchmarks.report import claims, gpu, resuming, scale
from benchmarks.report.markdown import table
from benchmarks.report.sections import TITLES, is_peer, section

__all__ = ["write"]

Results = Mapping[str, Any]

OWN = "torch_dataloader_utils"

METHOD = f"""\
Each measurement is a fresh process: one interpreter, one epoch, one contender. Contenders take turns, round by round,
so that a machine that slows down slows all of them. Before the rounds that count, each contender runs once: that run
adds up a column and so proves that each row came once, and its memory is watched every 20 ms. Rounds that count are
not watched, and count rows only. Files lie in the page cache: since 26 November 2026,
16:50 UTC, what a contender reads is read once before each of its runs.

- **Rate** (rows/s): rows delivered after the first batch (of raw Arrow: the first row group), by the seconds from then
  to the end. **Of baseline**: that rate by the baseline's, of the same round.
- **With start**: the same, of all rows by all seconds from the beginning of construction. A loader has decoded some
  rows before it hands over its first batch, some have most of the data by then: that flatters the rate, and not this.
  Imports of that process count in neither, those of clients of S3 included; those of processes that it starts count.
- Figures are medians, with the least and the greatest in brackets.
- **Memory**: the peak of all the contender's processes together, each page counted by its share among the processes
  that map it (PSS), less what the contender took with its imports done. Mapped files count; **no file's** leaves them
  out.
- **Raw Arrow**: `ParquetFile.read_row_group` of every row group of the memory-mapped files, with Arrow's own threads;
  nothing is done with the tables, and nothing is read ahead. It allocates in Arrow's default memory pool, this library
  in another one: see [memory](guide/performance.md#memory).
- Data are made up, and written with pyarrow's defaults: dictionary encoding and snappy.
- S3 is a server on the same machine, in a process of its own, that waits {DELAY_MS} ms before each answer. It shares
  the cores with what is measured. It is moto's, but answers reads of objects from memory, piece by piece: moto copies
  all of an object for each range of it.
"""

PEER_METHOD = """\
Each peer has a virtual environment of its own, made from the pinned requirements next to its script in
`benchmarks/contenders/peers/`, and runs with the fastest settings that its documentation names, each said in a line of
that script. A peer
that is still at it 15 s after its first batch is stopped: its rate is that of the rows until then, as the column says.
Where a peer reads a format of its own, converting comes first and is no part of its rate. What a peer does beyond
reading (shuffling, resuming, object stores, clusters) is not measured here.

Raw Arrow is the first of each round, minutes after it ran the last time, and is slower then than in the tables beside
this library alone. So the peers' figures compare with one another, and less with raw Arrow.
"""


def write(sessions: Sequence[Results], page: Path) -> None:
    """Write the page, and its plots into a folder of the same name.

    Args:
        sessions: The raw results.
        page: The Markdown file.
    """
    if not sessions:
        message = "no raw results: python -m benchmarks run writes some"
        raise SystemExit(message)
    plots = page.with_suffix("")
    plots.mkdir(parents=True, exist_ok=True)
    for old in plots.glob("*.svg"):
        old.unlink()
    lines = ["# Benchmarks", "", "Written by `python -m benchmarks report`, from the raw results in"]
    lines += ["`benchmarks/results/`; none of its figures is written by hand.", "", "## How", "", METHOD]
    kinds: set[str] = set()
    for session in sessions:
        kind = session["kind"]
        section_of = {"gpu": gpu.section, "resume": resuming.section, "scale": scale.section}.get(kind)
        if kind in kinds:  # of another machine: its plots have other names
            kind += f"-{session['machine']['cores']}-cores"
        kinds.add(kind)
        lines += section_of(session) if section_of else _session(session, plots, kind)
    page.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _session(session: Results, plots: Path, kind: str) -> Iterator[str]:
    with_peers, cores = session["kind"] == "peers", session["machine"]["cores"]
    yield from ("## Beside its peers" if with_peers else f"## Beside raw Arrow, {cores} cores", "")
    yield from _machine(session)
    if with_peers:
        yield from (PEER_METHOD, *_missing(session), *_wins(session))
    else:
        yield from _claims(session)
    for name, workload in session["workloads"].items():
        yield from section(name, workload, plots, kind)


def _machine(session: Results) -> Iterator[str]:
    machine, code = session["machine"], session["code"]
    versions = ", ".join(
        f"{name} {code['packages'][name]}"
        for name in ("torch", "pyarrow", "numpy", "fsspec", "s3fs")
        if name in code["packages"]
    )
    scale = "" if session["scale"] == 1 else f" **Data scaled to {session['scale']:g}: only to try things out.**"
    yield (
        f"{machine['cores']} cores ({machine['cpu']}), {machine['memory_bytes'] / (1 << 30):.0f} GiB of memory, "
        f"{machine['system']}, Python {machine['python']}; {versions}.{scale}"
    )
    yield ""


def _claims(session: Results) -> Iterator[str]:
    """What `python -m benchmarks check` judges, as far as this session measured it."""
    judged = [verdict for verdict in claims.judge(session) if verdict.passed is not None]
    yield from ("### What has to hold", "")
    yield from table(
        ["", "measured", "bound", "aim", ""],
        [
            [
                verdict.claim.name,
                verdict.shown,
                f"{'<=' if verdict.claim.at_most else '>='} {verdict.claim.least:g}{verdict.claim.unit}",
                f"{verdict.claim.aim:g}{verdict.claim.unit}",
                "holds" if verdict.passed else "**does not hold**",
            ]
            for verdict in judged
        ],
    )


def _missing(session: Results) -> Iterator[str]:
    missing = session.get("missing_peers", {})
    if missing:
        yield from ("Not measured:", "", *(f"- {name}: {why}" for name, why in missing.items()), "")


def _wins(session: Results) -> Iterator[str]:
    """Name the peers that are faster than this library with as many processes, workload by workload."""
    yield from ("### Where a peer wins", "")
    for name, workload in session["workloads"].items():
        wins = [
            f"{peer}: {factor:.2f} times the {words} of {OWN}"
            for figure, words in (("rate", "rate"), ("whole_rate", "rate with start"))
            for peer, factor in _faster(_figures(workload, figure))
        ]
        yield f"- {TITLES[name]}: {'; '.join(wins) if wins else 'none'}."
    yield ""


def _faster(rates: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Give the peers whose rate is above this library's, and how many times that is."""
    for peer, rate in rates.items():
        own = rates.get(f"{OWN}, {_how(peer)}")
        if own and rate > own and is_peer(peer):
            yield peer, rate / own


def _how(name: str) -> str:
    return name.rpartition(", ")[2]


def _figures(workload: Results, figure: str) -> dict[str, float]:
    return {
        name: found["summary"][figure]["median"]
        for name, found in workload["contenders"].items()
        if figure in found.get("summary", {})
    }
