"""The page docs/reliability.md: every fault that is tried, here and with other loaders, from the raw results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure.reliability import LOADERS
from benchmarks.report.markdown import table

__all__ = ["page", "write"]

Results = Mapping[str, Any]

HEAD = """\
# Reliability

Written by `make reliability`, from the raw results in `benchmarks/results/reliability.json`; none of its figures is
written by hand.
"""

METHOD = """\
## How

A row is its id and a hash of all its values. A trainer commits the rows that it has trained together with the state of
its loader, in one file that is synced and renamed. Only what was committed counts. At the end, the committed rows are
compared with those that pyarrow reads from the files.

- **Lost**: never committed, though they should have been. **Repeated**: committed more than once. **Corrupted**:
  committed with other values than the files hold, or not in the files at all.
- **Ended in an error**: the loader stopped with an error that says what was wrong, and delivered nothing wrong before.
- **Slowest**: seconds from the fault to the first batch after it or to the error, where that was measured. The machine
  also did other work.
- **Left behind**: processes, threads, open files and files in shared memory, two seconds later.

Every fault is in `tests/faults`, in a short form that `make test` runs, and in a long one. `make soak` and
`make reliability` run the long one.
"""

PEER_METHOD = """\
## The same kills with other loaders

The same program trains with each loader, in an environment of its own with pinned versions, as the loader's
documentation says: see `tests/support/faults/adapters`. All processes of the job are killed at random moments, which
are the same for all. Ranks commit together, after the same number of steps. What a loader leaves out of an
uninterrupted epoch does not count as lost. The data are small, local Parquet files. This is no measure of speed: some
loaders are imported anew after each kill, and most of their recovery is that.

LitData and the package from PyPI begin the epoch again from a state that was saved after its last batch. So a kill
between that commit and the end of the epoch repeats all rows.

The semaphores that are left behind are those of Python's multiprocessing, for workers that are spawned, as LitData and
LanceDB ask for. This library leaves them as well where its workers are spawned. Here they are forked, as by default.
"""

CHOICES = """\
## Where each of them is the better choice

From their own documentation; [Why, and when not](why.md) has more.

- **torchdata, `StatefulDataLoader`**: any dataset, not only files. It is as exact as the dataset's own state.
  Pipelines can be composed of nodes.
- **Hugging Face datasets**: everything that is on the Hub; `map` and `filter`; images, audio and video
  decoded. Its documentation says that a resume loses the rows of the shuffle buffer.
- **LitData**: preprocessing in parallel; encryption; files in clouds are cached on the local disk; its
  optimized format gives random access to rows. Its elastic resume asks for ranks that step together.
- **LanceDB**: random access, a full shuffle of single rows, SQL filters, packing of sequences, vector search, on tables
  that keep their versions. Its global batches are the same on any number of ranks.
- **torch-dataloader-utils from PyPI**: releases on a package index. Its documentation says that a part of a file that
  was begun is read again from its start after a resume.
- **MosaicML Streaming, Grain and Ray Data** were not tried here. Grain has packing and JAX, Ray Data a
  cluster that preprocesses.
"""

OUTSIDE = """\
## What is outside the promise

- A kill is not a power failure. Whether a synced and renamed file survives that is for the file system and the disk.
- Rows are exact as far as state and model are saved together, in one step. A state that is older or newer than the
  model repeats rows or leaves them out.
- A file that is rewritten with the same size, footer and checksum is not noticed where the storage gives no version.
- When all processes of a job are killed at once and its workers were spawned instead of forked, Python's semaphores
  stay in shared memory, some bytes each.
- What `collate_fn` does besides returning a batch, for example what it writes, is not undone by a resume.
- Memory that flips bits, a pyarrow or torch that returns wrong values, and code that changes the loader's private
  attributes.
- All figures are of one machine, with files on its local disk or on servers of the tests' own on the same machine.
"""

KILLED = "SIGKILL of the whole job at random moments"
REWRITTEN = "A file rewritten with other rows between SIGKILL and resume"

NOTES = {
    REWRITTEN: (
        "The epoch cannot be finished as it was begun, unless the loader keeps the old rows. An error says so. Rows of",
        "the new file in the place of old ones count as corrupted, and the old ones as lost.",
        "",
    )
}

KINDS: dict[str, Callable[[str, str], bool]] = {
    "In order, the same number of ranks": lambda fault, case: (
        _is_kill(fault) and "then" not in case and "order" in case
    ),
    "Rows shuffled, the same number of ranks": lambda fault, case: (
        _is_kill(fault) and "then" not in case and "shuffled" in case
    ),
    "2, then 3 ranks": lambda fault, case: _is_kill(fault) and case.startswith("2, then 3 ranks"),
    "2, then 3, then 1 ranks": lambda fault, case: _is_kill(fault) and case.startswith("2, then 3, then 1 ranks"),
    REWRITTEN: lambda fault, _: fault == REWRITTEN,
}


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
    if results["tests"]:
        lines += _tests(results["tests"])
    lines += [METHOD, PEER_METHOD, *_peers(results["loaders"]), CHOICES, OUTSIDE]
    return "\n".join(lines).rstrip() + "\n"


def _tests(tests: Results) -> Iterator[str]:
    """The table of faults, and the cases of each."""
    by_fault: dict[str, list[Results]] = {}
    for group in tests["outcomes"]:
        by_fault.setdefault(group["fault"], []).append(group)
    yield from ("## What was done to this library, and what became of the rows", "")
    yield from table(
        ["fault", "cases", "faults made", *OUTCOMES, "ended in an error", "slowest, s", "left behind"],
        [
            [
                fault,
                f"{len(groups):,}",
                f"{_sum(groups, 'faults'):,}",
                *(f"{_sum(groups, name):,}" for name in OUTCOMES),
                _errors(groups),
                _slowest(groups),
                _left(groups),
            ]
            for fault, groups in by_fault.items()
        ],
    )
    failed = tests["failed"]
    yield f"{tests['tests']} tests, of which {len(failed) or 'none'} failed{':' if failed else '.'}"
    yield from ("", *(f"- `{name}`" for name in failed))
    yield from ("", _origin(tests, f", {tests['minutes']:g} minutes for each long test"), "", "The cases:", "")
    for fault, groups in by_fault.items():
        names = list(dict.fromkeys(group["case"] for group in groups))
        more = f"; and {len(names) - MOST_CASES} more" if len(names) > MOST_CASES else ""
        yield f"- {fault}: {'; '.join(names[:MOST_CASES])}{more}."
    yield ""


OUTCOMES = ("lost", "repeated", "corrupted")
MOST_CASES = 12


def _peers(loaders: Mapping[str, Results]) -> Iterator[str]:
    loaders = {name: loaders[name] for name in LOADERS if name in loaders}
    ran = {name: found for name, found in loaders.items() if "outcomes" in found}
    for title, belongs in KINDS.items():
        yield from (f"### {title}", "", *NOTES.get(title, ()))
        yield from table(
            ["", "kills", *OUTCOMES, "epochs in the same order", "ended in an error", "slowest, s", "left behind"],
            list(_peer_rows(ran, belongs)),
        )
        examples = [
            f"- {LOADERS[name].title}: `{group['example']}`"
            for name, found in ran.items()
            for group in found["outcomes"]
            if belongs(group["fault"], group["case"]) and group["example"]
        ]
        yield from (*dict.fromkeys(examples), "") if examples else ()
    yield from ("### What ran", "")
    for name, found in loaders.items():
        yield from _ran(name, found)
    yield ""


def _peer_rows(ran: Mapping[str, Results], belongs: Callable[[str, str], bool]) -> Iterator[list[str]]:
    for name, found in ran.items():
        groups = [group for group in found["outcomes"] if belongs(group["fault"], group["case"])]
        if not groups:
            yield [LOADERS[name].title, "not offered", *[""] * 7]
            continue
        compared = _sum(groups, "in_order") + _sum(groups, "in_another_order")
        yield [
            LOADERS[name].title,
            f"{_sum(groups, 'faults'):,}",
            *(f"{_sum(groups, outcome):,}" for outcome in OUTCOMES),
            f"{_sum(groups, 'in_order')} of {compared}" if compared else "not compared",
            _errors(groups),
            _slowest(groups),
            _left(groups),
        ]


def _ran(name: str, found: Results) -> Iterator[str]:
    title, converts = LOADERS[name].title, LOADERS[name].converts
    if "outcomes" not in found:
        yield f"- {title}: not run: {found['missing']}"
        return
    converted = f" It reads {converts} of the files, made beforehand." if converts else ""
    version = f" {found['version']}" if found["version"] else ""
    kills = f", up to {found['kills']} kills a case"
    yield f"- {title}{version}: {_origin(found, kills)}{converted}"
    for group in found["outcomes"]:
        if group["fault"].startswith("None") and (group["not_exact"] or group["errors"]):
            counts = ", ".join(f"{name} {group[name]:,}" for name in OUTCOMES)
            yield f"    - An uninterrupted epoch, {group['case']}: {group['example'] or counts}."


def _origin(found: Results, more: str) -> str:
    """Return on what and when something ran."""
    machine, source = found["machine"], found["code"]
    packages = ", ".join(f"{name} {version}" for name, version in source["packages"].items())
    changed = " with changes" if source["changed"] else ""
    return (
        f"commit `{(source['commit'] or 'unknown')[:12]}`{changed}, {found['begun'][:10]}, {machine['cores']} cores "
        f"({machine['cpu']}), {machine['system']}, Python {machine['python']}; {packages}{more}."
    )


def _is_kill(fault: str) -> bool:
    return fault == KILLED


def _sum(groups: Iterable[Results], name: str) -> int:
    return sum(group[name] for group in groups)


def _errors(groups: Sequence[Results]) -> str:
    return f"{sum(sum(group['errors'].values()) for group in groups):,} of {_sum(groups, 'outcomes'):,}"


def _slowest(groups: Iterable[Results]) -> str:
    seconds = [group["seconds"] for group in groups if group["seconds"] is not None]
    return f"{max(seconds):.1f}" if seconds else ""


def _left(groups: Iterable[Results]) -> str:
    left = sum((Counter(group["left"]) for group in groups), Counter[str]())
    return ", ".join(f"{count} {what}" for what, count in left.items()) or "nothing"
