"""The page docs/frameworks.md: killed and resumed trainings under each framework, from the raw results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.measure.frameworks import WAYS
from benchmarks.report.markdown import table

__all__ = ["page", "write"]

Results = Mapping[str, Any]

HEAD = """\
# Frameworks

Written by `make bench-frameworks`, from the raw results in `benchmarks/results/frameworks.json`; none of its figures is
written by hand. How to use each framework with this library is in the guide.

The same training of two epochs runs three times under each framework: without an interruption; with all processes
killed in the first epoch, 25 steps after a checkpoint; and from that checkpoint to the end, in new processes. The rows
of a checkpoint are written when the framework writes it, so only rows that a checkpoint holds are trained once.

- **Lost**, **repeated**: rows that the resumed training has trained less or more often than the uninterrupted one.
- **Out of order**: rows that follow another row than in the uninterrupted one.
- **Left out**, **extra**: rows that already the uninterrupted training leaves out, or trains more than once an epoch.
- **First batch**: seconds from the call that begins training to the first batch, at the beginning and after the
  resume. Other work ran on the machine.

Each framework's own way is what its guide says. The files are read by Hugging Face datasets: streaming, or converted to
Arrow files that stay on the disk, of which single rows can be looked up. `shuffle` is a buffer of 2,000 rows; with the
converted files it is a permutation of all rows.
"""

READING = """\
## How to read it

Skipping is exact as long as the loader delivers the same rows in the same order again. To skip, a streaming dataset
reads all rows of the epoch up to the checkpoint again: the time to the first batch grows with the epoch. With converted
files only row numbers are skipped; if a dataset may be converted and its copy kept, this is a good way to resume.
`StatefulDataLoader` saves where the dataset stands. The rows in a streaming dataset's shuffle buffer are lost then, as
its documentation says. None of these ways resumes in the middle of an epoch with another number of ranks.
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
    lines = [HEAD]
    for ranks in (1, 2):
        for shuffle in (False, True):
            order = "rows shuffled" if shuffle else "rows in order"
            lines += [f"## {ranks} rank{'s' if ranks > 1 else ''}, {order}", "", *_table(results, ranks, shuffle)]
    lines += [READING, *_origin(results)]
    return "\n".join(lines).rstrip() + "\n"


def _table(results: Results, ranks: int, shuffle: bool) -> Iterator[str]:  # noqa: FBT001 - which table
    header = ["", "lost", "repeated", "out of order", "left out", "extra", "first batch, s", "after the resume, s"]
    found = {
        (case["module"], case["way"]): case
        for case in results["cases"]
        if (case["ranks"], case["shuffle"]) == (ranks, shuffle)
    }
    yield from table(header, [[title, *_cells(found[key])] for key, title in WAYS.items() if key in found])
    errors = [f"- {WAYS[key]}: `{case['error']}`" for key, case in found.items() if case["error"]]
    yield from (*errors, "") if errors else ()


def _cells(case: Results) -> list[str]:
    if case["error"]:
        return ["an error", *[""] * 6]
    counts = [f"{case[name]:,}" for name in ("lost", "repeated", "out_of_order", "left_out", "extra")]
    return [*counts, f"{case['begin_s']:.2f}", f"{case['resume_s']:.2f}"]


def _origin(results: Results) -> Iterator[str]:
    machine, source = results["machine"], results["code"]
    packages = ", ".join(f"{name} {version}" for name, version in source["packages"].items())
    changed = " with changes" if source["changed"] else ""
    yield "## What ran"
    yield ""
    yield (
        f"Commit `{(source['commit'] or 'unknown')[:12]}`{changed}, {results['begun'][:10]}, {machine['cores']} cores "
        f"({machine['cpu']}), {machine['system']}, Python {machine['python']}; {packages}. "
        f"{results['rows']:,} rows of 6 columns in 8 Parquet files, {results['batch_size']} rows a step, one worker "
        "process a rank."
    )
