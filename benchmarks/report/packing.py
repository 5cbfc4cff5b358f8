"""The page docs/packing.md: documents packed, killed and resumed, from the raw results."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.measure.packing import WAYS
from benchmarks.report.markdown import table
from benchmarks.report.origins import origins, what_was_said

__all__ = ["page", "write"]

Results = Mapping[str, Any]

HEAD = """\
# Packing beside others

Written by `make bench-packing`, from the raw results in `benchmarks/results/packing.json`; none of its figures is
written by hand.

Each library packs the same documents of int32 tokens into sequences of 4,096, in batches of 8 sequences. The lengths
of the documents are drawn from a log-normal distribution (median 330 tokens, longest 20,000), as those of web pages
are. A document that is longer than a sequence is cut, and none of its tokens is to be dropped.

- **Tokens a second**: in one process without workers, from the first batch asked for to the epoch's end; the median of
  the rounds, and their lowest and highest. Everything that is done before, such as packing ahead, is in **before**.
  **Processor time** is that of the process for 100 million tokens, which other work on the machine disturbs less.
- **Fill**: tokens of all places in the sequences.
- **Left out**: tokens that an epoch without an interruption does not deliver.
- **Lost**, **repeated**: the tokens of the documents that never came, or came once more, after a kill. The job saves
  its state in mid-epoch, as the library's documentation says, kills itself with SIGKILL 5 steps later, and new
  processes load the states and read to the end: one rank that goes on as one rank, and 3 ranks that go on as 2.
- **Changed**: sequences that are not the same, at the same place, as without an interruption.
"""

READING = """\
## How each was used

Where a library keeps a state for each rank and documents no other number of ranks, each rank loads the state of its
own number, and a state that no rank takes stays unread.
"""

USES = {
    "ours_concat": '`Packing("tokens", 4096)` with `document_ids` and `position_ids`, as Grain makes; with 2 workers a '
    "rank where it is killed.",
    "ours_best_fit": 'the same with `strategy="best_fit"`.',
    "grain_concat": "`ParquetIterDataset` of a rank's files, the packer, `batch`, and `mp_prefetch` of 2 workers where "
    "it is killed.",
    "grain_first_fit": "the same; documents are cut to the length ahead of the packer, which refuses longer ones, and "
    "64 sequences are filled at a time.",
    "grain_best_fit": "the same.",
    "torchtitan": "a dataset of its own, streamed by Hugging Face datasets, with a tokenizer that returns tokens as "
    "they are. No workers, as by default. It makes labels and positions, too, and cannot be told not to.",
    "trl_wrapped": "the Hugging Face dataset is packed ahead, on disk, by each rank; then torchdata's "
    "`StatefulDataLoader` with its `StatefulDistributedSampler`, with 2 workers where it is killed. TRL itself has no "
    "loader.",
    "trl_bfd": "the same.",
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
    ways = {name: results["ways"][name] for name in WAYS if name in results["ways"]}
    ran = {name: found for name, found in ways.items() if "missing" not in found}
    lines = [HEAD, "## Speed and fill", "", *_speed(ran), *_winners(ran)]
    lines += ["## After a kill", "", *_killed(ran), *what_was_said(_errors(ran)), READING]
    lines += [f"- {WAYS[name].title}: {USES[name]}" for name in ran]
    told = [(WAYS[name].title, WAYS[name].package, found) for name, found in ways.items()]
    lines += ["", "## What ran", "", *origins(told), _loads(ran)]
    return "\n".join(lines).rstrip() + "\n"


def _rates(found: Results) -> list[float]:
    return [run["tokens"] / run["seconds"] for run in found.get("rounds", []) if "tokens" in run]


def _whole_rates(found: Results) -> list[float]:
    return [run["tokens"] / (run["before"] + run["seconds"]) for run in found["rounds"] if "tokens" in run]


def _speed(ran: Mapping[str, Results]) -> Iterator[str]:
    rows = []
    for name, found in ran.items():
        rates = _rates(found)
        if not rates:
            continue
        runs = [run for run in found["rounds"] if "tokens" in run]
        processor = statistics.median(1e8 * run["processor"] / run["tokens"] for run in runs)
        rows.append(
            [
                WAYS[name].title,
                f"{statistics.median(rates) / 1e6:.1f} M [{min(rates) / 1e6:.1f}, {max(rates) / 1e6:.1f}]",
                f"{statistics.median(run['before'] for run in runs):.2f} s",
                f"{processor:.1f} s",
                f"{runs[0]['tokens'] / runs[0]['slots']:.4f}",
                f"{found['same']['left_out']:,}",
            ]
        )
    yield from table(["", "tokens a second", "before", "processor time", "fill", "left out"], rows)


def _winners(ran: Mapping[str, Results]) -> Iterator[str]:
    """Say which of the others is faster than this library, or fills more."""
    yield "Where another wins:"
    yield ""
    own = {name: found for name, found in ran.items() if not WAYS[name].package}
    others = {name: found for name, found in ran.items() if WAYS[name].package and _rates(found)}
    won = []
    for name, found in others.items():
        for mine, of in own.items():
            ratio = statistics.median(_rates(found)) / statistics.median(_rates(of))
            if ratio > 1:
                all_in = statistics.median(_whole_rates(found)) / statistics.median(_whole_rates(of))
                won.append(
                    f"- {WAYS[name].title} delivers {ratio:.2f} times the tokens a second of {WAYS[mine].title}; with "
                    f"what comes before, {all_in:.2f} times."
                )
            more = _fill(found) - _fill(of)
            if more > 0:
                won.append(f"- {WAYS[name].title} fills {100 * more:.3f} % more of a sequence than {WAYS[mine].title}.")
    yield from won or ["- nowhere in these tables."]
    yield ""


def _fill(found: Results) -> float:
    run = next(run for run in found["rounds"] if "tokens" in run)
    return float(run["tokens"] / run["slots"])


def _killed(ran: Mapping[str, Results]) -> Iterator[str]:
    rows = []
    for name, found in ran.items():
        same, fewer = found["same"], found["fewer"]
        one = (
            ["an error", "", ""]
            if same["error"]
            else [f"{same[figure]:,}" for figure in ("lost", "repeated", "sequences_changed")]
        )
        other = ["an error", ""] if fewer["error"] else [f"{fewer[figure]:,}" for figure in ("lost", "repeated")]
        rows.append([WAYS[name].title, *one, *other, f"{same['state_bytes']:,} bytes"])
    header = ["", "1 rank: lost", "repeated", "changed", "3 → 2 ranks: lost", "repeated", "state"]
    yield from table(header, rows)


def _errors(ran: Mapping[str, Results]) -> Iterator[tuple[str, str]]:
    for name, found in ran.items():
        for case, title in (("same", "1 rank"), ("fewer", "3 → 2 ranks")):
            if found[case]["error"]:
                yield f"{WAYS[name].title}, {title}", found[case]["error"]
        for run in found.get("rounds", []):
            if "error" in run:
                yield f"{WAYS[name].title}, timed", run["error"]


def _loads(ran: Mapping[str, Results]) -> str:
    loads = [run["load_before"] for found in ran.values() for run in found.get("rounds", []) if "load_before" in run]
    if not loads:
        return ""
    return f"The machine's load average at the rounds was {min(loads):.1f} to {max(loads):.1f}, other work included."
