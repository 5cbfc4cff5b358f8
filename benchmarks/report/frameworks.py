"""The page docs/frameworks.md: killed and resumed trainings under each framework, from the raw results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure.frameworks import RESIZED, WAYS, cases
from benchmarks.report.markdown import table

__all__ = ["page", "write"]

Results = Mapping[str, Any]

HEAD = """\
# Frameworks

Written by `make bench-frameworks`, from the raw results in `benchmarks/results/frameworks.json`; none of its figures is
written by hand. How to use each framework with this library is in the guide.

The same training of two epochs runs three times under each framework: without an interruption; with one process killed
by SIGKILL in the first epoch, half-way between two checkpoints, whereupon the others are ended; and from the newest
checkpoint to the end, in new processes. An epoch has ten checkpoints; the newest one is that at 70 % of the epoch. The
rows of a checkpoint are written when the framework writes it, so only rows that a checkpoint holds are trained once.

- **Rows**: those of the dataset; a filter lets half of them pass.
- **Lost**, **repeated**: rows that the resumed training has trained less or more often than the uninterrupted one.
- **Out of order**: rows that follow another row than in the uninterrupted one.
- **Left out**, **extra**: rows that already the uninterrupted training leaves out, or trains more than once an epoch.
- **First batch**: seconds from the call that begins training, or loads the checkpoint, to the first batch, at the
  beginning and after the resume. Other work ran on the machine: compare the times only roughly.

Each framework's own way is what its guide says. The files are read by Hugging Face datasets: streaming, or converted to
Arrow files that stay on the disk, of which single rows can be looked up. `shuffle` is a buffer of 2,000 rows; with the
converted files it is a permutation of all rows.

- **DCP**: a plain loop with DistributedDataParallel and `torch.distributed.checkpoint`. With this library it holds a
  `CheckpointEntry(loader, elastic=True)`; else the state of each rank's StatefulDataLoader under the rank's own name,
  beside the number of ranks, as torchtitan does it.
- **torchrun's restart**: one rank is killed, and `torchrun --max-restarts` starts all of them again. With this library
  rank 0 writes one file with what `gather_states` returns; else each rank writes a file of its own.
- **Device mesh**: the data-parallel ranks times two processes that hold parts of each layer, checkpoints by DCP.
- **`CheckpointStore`**: this library's, beside a directory a checkpoint, to which each rank writes a file.
"""

RESIZED_HEAD = """\
## Resumed on another number of ranks

Rows are shuffled. A step of all ranks keeps its number of rows, so a rank's batches are of another size. The order is
not compared. The rows of the epoch in which the training was killed and those of the next epoch are counted apart: each
should be trained once. Where a way refuses to continue, or fails, its error stands below the table.
"""

READING = """\
## How to read it

Skipping is exact as long as the loader delivers the same rows in the same order again. To skip, a streaming dataset
reads all rows of the epoch up to the checkpoint again: the time to the first batch grows with the epoch. With converted
files only row numbers are skipped; if a dataset may be converted and its copy kept, this is a good way to resume.
`StatefulDataLoader` saves where the dataset stands. The rows in a streaming dataset's shuffle buffer are lost then, as
its documentation says. With converted files nothing is lost.

On another number of ranks skipping goes on, too, if a step of all ranks keeps its number of rows and one order is
divided among the ranks: as many steps are the same rows then. The states of `StatefulDataLoader` belong to ranks and
workers: another number of ranks finds no state, or one that does not fit.
"""


def write(results: Results, path: Path) -> None:
    """Write the page.

    Args:
        results: The raw results.
        path: The Markdown file.
    """
    path.write_text(page(results), encoding="utf-8")


def page(results: Results) -> str:
    """Return the page's text."""
    same = [case for case in results["cases"] if case["ranks"] == case["resumed"]]
    plain = [case for case in same if not case["filtered"]]
    lines = [HEAD]
    for ranks in (1, 2):
        for shuffle in (False, True):
            order = "rows shuffled" if shuffle else "rows in order"
            found = [case for case in plain if (case["ranks"], case["shuffle"]) == (ranks, shuffle)]
            lines += [f"## {_ranks(ranks)}, {order}", "", *_table(found)]
    lines += ["## 1 rank, rows shuffled and filtered, so that the length of an epoch is unknown", ""]
    lines += _table([case for case in same if case["filtered"]])
    lines += [RESIZED_HEAD]
    for ranks, resumed in RESIZED:
        found = [case for case in results["cases"] if (case["ranks"], case["resumed"]) == (ranks, resumed)]
        lines += [f"### {ranks} → {_ranks(resumed)}", "", *_resized_table(found)]
    lines += [READING, *_origin(results)]
    return "\n".join(lines).rstrip() + "\n"


def _ranks(number: int) -> str:
    return f"{number} rank{'s' if number > 1 else ''}"


def _table(cases: Sequence[Results]) -> Iterator[str]:
    header = [
        "",
        "rows",
        "lost",
        "repeated",
        "out of order",
        "left out",
        "extra",
        "first batch, s",
        "after the resume, s",
    ]
    counts = ("rows", "lost", "repeated", "out_of_order", "left_out", "extra")
    yield from _rows(header, cases, counts, ("begin_s", "resume_s"))


def _resized_table(cases: Sequence[Results]) -> Iterator[str]:
    header = ["", "rows", "lost", "repeated", "next epoch: lost", "repeated", "after the resume, s"]
    yield from _rows(header, cases, ("rows", "lost", "repeated", "next_lost", "next_repeated"), ("resume_s",))


def _rows(header: list[str], cases: Sequence[Results], counts: Sequence[str], times: Sequence[str]) -> Iterator[str]:
    """Yield a table, and the errors and what else there is to say below it."""
    found = {(case["module"], case["way"]): case for case in cases}
    lines, notes = [], []
    for key, title in WAYS.items():
        if key not in found:
            continue
        case = found[key]
        if case["error"]:
            lines.append([title, f"{case['rows']:,}", "an error", *[""] * (len(header) - 3)])
            notes.append(f"- {title}: `{case['error']}`")
        else:
            lines.append([title, *(f"{case[name]:,}" for name in counts), *(f"{case[name]:.2f}" for name in times)])
        if case.get("peers_differ"):
            differ = case["peers_differ"]
            notes.append(f"- {title}: {differ} processes trained other rows than those they share a rank with")
    yield from table(header, lines)
    yield from (*notes, "") if notes else ()


def _origin(results: Results) -> Iterator[str]:
    machine, source = results["machine"], results["code"]
    packages = ", ".join(f"{name} {version}" for name, version in source["packages"].items())
    commits = dict.fromkeys((case["commit"], case["changed"]) for case in results["cases"])
    named = ", ".join(f"`{(commit or 'unknown')[:12]}`{' with changes' * changed}" for commit, changed in commits)
    yield "## What ran"
    yield ""
    yield (
        f"Commit {named}, {results['begun'][:10]}, {machine['cores']} cores "
        f"({machine['cpu']}), {machine['system']}, Python {machine['python']}; {packages}. "
        f"{len(results['cases'])} of {len(list(cases()))} cases ran. "
        f"Load average at the beginning: {machine['load_before']:.0f}. "
        f"6 columns in 8 Parquet files, {results['batch_size']} rows a step, one worker process a rank. Processes are "
        "forked from one that has imported the framework, except those of torchrun."
    )
