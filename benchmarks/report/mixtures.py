"""The page docs/mixtures.md: killed and resumed mixtures of two sources, from the raw results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.measure.mixtures import CASES, WAYS
from benchmarks.report.markdown import table
from benchmarks.report.origins import origins, what_was_said

__all__ = ["page", "write"]

Results = Mapping[str, Any]

HEAD = """\
# Mixtures beside others

Written by `make bench-mixtures`, from the raw results in `benchmarks/results/mixtures.json`; none of its figures is
written by hand.

Each library mixes the same two sources: `web` has 7,000 rows, `code` has 3,000, and the shares asked are 0.7 and 0.3.
The job has two ranks with two worker processes each, and batches of 60 rows a rank. Every rank saves its state after
step 40, as the library's documentation says, and kills itself after step 50 with SIGKILL. New processes load the
states and read to the end of the epoch. They do so with the same ranks and weights, on 3 ranks, on 1 rank, with the
weights 0.5 and 0.5, and with these weights on 3 ranks. On other ranks a batch has as many rows of all ranks together
as before.

- **Off the shares**: rows by which a source was off the share asked, at most after any batch of an epoch without an
  interruption; of all ranks together, and of a single rank.
- **Left out**: rows that the epoch without an interruption does not deliver.
- **Lost**, **repeated**, of both sources together. With the same ranks and weights: against the epoch without an
  interruption. Otherwise a pass has each row once. Lost is a row of that epoch which never came although its source
  came to its end; repeated is each time that a row came more often than passes had begun.
- **Out of order**: rows that follow another row of their source than without an interruption.
- **Share after**: the share of `web` in the first 20 steps after the weights changed to 0.5 and 0.5, on the same ranks.
"""

OTHER = ("more", "fewer", "weights", "both")
"""The cases of the second table."""

USES = {
    "ours": "`MixedDataset` of two `Source`, with `shuffle`, `shuffle_buffer_size=500` and `rows_per_epoch=10_000`. "
    "Each rank saves and loads its own state; with other ranks or weights every rank loads all states with "
    "`strict=False`. All ranks make equally many steps. So 3 ranks leave 1 of the 10,000 rows to the next epoch, which "
    "begins with it. With the weights 0.5 and 0.5 `code` comes to its end in the epoch, and begins its next pass.",
    "litdata": "two `StreamingDataset` over indexed Parquet files with `shuffle` and `drop_last`, `weights`, and "
    "`iterate_over_all=False`, without which it takes no weights. Each rank saves and loads the state of its "
    "`StreamingDataLoader`. Each worker ends when one of its sources is at its end.",
    "grain_elastic": "the mixture of two `MapDataset.source`, each with `shuffle`; its state is the same on all "
    "ranks, and every rank loads it. The mixture ends with the first source, and the last incomplete batch is "
    "dropped. The state has one position in the mixture, and none of each source.",
    "grain_iter": "each source with `shuffle`, sliced by rank and made an `IterDataset`; then `mix`, `batch` and "
    "`mp_prefetch`. Each rank saves and loads its own state. Weights that change after a checkpoint are documented; "
    "other ranks are not.",
    "nodes": "for each source `DistributedSampler`, `SamplerWrapper` and a `ParallelMapper` of processes; then the "
    "sampler with `ALL_DATASETS_EXHAUSTED`, `Batcher` and `Loader`. Each rank saves and loads its own state. It draws "
    "the sources at random, so its shares hold in the mean. Neither other ranks nor other weights are documented.",
    "hf": "two streams of Parquet files, `all_exhausted_without_replacement`, `split_dataset_by_node`, and "
    "torchdata's `StatefulDataLoader`. Each rank saves and loads its own state. It draws the sources at random, so "
    "its shares hold in the mean. Neither other ranks nor other weights are documented.",
    "hf_shuffled": "the same, each stream with `shuffle(buffer_size=500)`. Its documentation says that rows in the "
    "buffer are lost on resuming.",
    "mosaic": "two `Stream` of MDS shards that were made of the files, `shuffle=True`, and `StreamingDataLoader`. "
    "Every rank loads the first rank's state. Its shares are those of the epoch, whose rows it shuffles; other ranks "
    "are documented, other proportions in mid-epoch are not. It repeats rows so that ranks have equally many.",
}

READING = """\
## How each was used

Where a library keeps a state for each rank and documents no other number of ranks, each rank loads the state of its own
number. A rank that has none begins its epoch, and a state that no rank takes stays unread: this is what happens to a
job that is started again on other ranks.
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
    ways = {name: results["ways"][name] for name in WAYS if name in results["ways"]}
    ran = {name: found for name, found in ways.items() if "cases" in found}
    lines = [HEAD, "## The same ranks and weights", "", *_same(ran), "## Other ranks, other weights", "", *_other(ran)]
    lines += [*what_was_said(_errors(ran)), READING]
    lines += [f"- {WAYS[name].title}: {USES[name]}" for name in ran if name in USES]
    told = [(WAYS[name].title, WAYS[name].package, found) for name, found in ways.items()]
    lines += ["", "## What ran", "", *origins(told)]
    return "\n".join(lines).rstrip() + "\n"


def _same(ran: Mapping[str, Results]) -> Iterator[str]:
    header = ["", "off the shares", "of a rank", "left out", "lost", "repeated", "out of order"]
    yield from table(header, [[WAYS[name].title, *_same_cells(found)] for name, found in ran.items()])


def _same_cells(found: Results) -> Iterator[str]:
    whole, case = found["uninterrupted"], found["cases"]["same"]
    yield from (f"{whole['deviation'][of]:,.1f}" for of in ("all", "rank"))
    yield f"{sum(whole['left_out']):,}"
    yield from _counts(case, ("lost", "repeated", "out_of_order"))


def _other(ran: Mapping[str, Results]) -> Iterator[str]:
    header = [""]
    for name in OTHER:
        header += [f"{CASES[name].title}: lost", "repeated"]
    yield from table(
        [*header, "share after"], [[WAYS[name].title, *_other_cells(found)] for name, found in ran.items()]
    )


def _other_cells(found: Results) -> Iterator[str]:
    for name in OTHER:
        yield from _counts(found["cases"][name], ("lost", "repeated"))
    share = found["cases"]["weights"].get("share")
    yield "" if share is None else f"{share:.2f}"


def _counts(case: Results, names: tuple[str, ...]) -> list[str]:
    if case["error"]:
        refused = case["error"].startswith("ValueError")
        return ["refused" if refused else "an error", *[""] * (len(names) - 1)]
    return [f"{sum(source[name] for source in case['sources']):,}" for name in names]


def _errors(ran: Mapping[str, Results]) -> Iterator[tuple[str, str]]:
    for name, found in ran.items():
        for case, result in found["cases"].items():
            if result["error"]:
                yield f"{WAYS[name].title}, {CASES[case].title}", result["error"]
