"""`tdu mixing`: how well labels are mixed for some shuffle buffers, and what each buffer costs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from torch_dataloader_utils.cli.bench import ROUNDS, Setting, measure_loader
from torch_dataloader_utils.cli.labels import Labels, read_labels
from torch_dataloader_utils.cli.memory_bound import memory_bound, rows_together
from torch_dataloader_utils.cli.opening import OpenedDataset, open_dataset
from torch_dataloader_utils.planning.label_mixing import LabelMixing, label_mixing
from torch_dataloader_utils.planning.manifest import Manifest
from torch_dataloader_utils.planning.planner import make_plan

READ_ROWS = 65_536
"""Rows of the label column that are read at once."""

MOST_BUFFERS = 6
STEP = 4
"""The buffers that are compared by default: all rows, and powers of this below."""


EPOCHS = 3
"""Epochs over which each random order is measured."""


@dataclass(frozen=True, slots=True)
class MixingOptions:
    """What to compare.

    Attributes:
        batch_size: Rows in a batch.
        ranks: Number of ranks.
        workers: Number of worker processes of each rank. A batch comes from one of them.
        buffer_sizes: Values of `shuffle_buffer_size`; None for some up to all rows.
        within: How much less than a whole batch the effective rows of the advised buffer may be, as a part of one.
        seconds: How long to measure the rate of each; None not to measure.
    """

    batch_size: int = 1024
    ranks: int = 1
    workers: int = 0
    buffer_sizes: tuple[int, ...] | None = None
    within: float = 0.1
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Order:
    """An order of rows: without shuffle, of shards in random order, or with a row-level shuffle."""

    shuffle: bool
    buffer_size: int | None = None

    def __str__(self) -> str:
        if not self.shuffle:
            return "file order"
        return "shards only" if self.buffer_size is None else f"{self.buffer_size:,} rows"

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `create_dataloader`."""
        return {"shuffle": self.shuffle, "shuffle_buffer_size": self.buffer_size}


@dataclass(frozen=True, slots=True)
class RowSizes:
    """Bytes of a row: decoded, and as it is fetched where files are not mapped into memory, else 0."""

    decoded: float
    fetched: float

    @classmethod
    def of(cls, dataset: OpenedDataset) -> RowSizes:
        """Return the sizes in the columns of a dataset."""
        opened = dataset.opened
        mapped = all(map(opened.storage.maps, list(opened.files.values())[:1]))
        return cls(dataset.decoded_row_bytes(), 0 if mapped else dataset.stored_row_bytes())


@dataclass(frozen=True, slots=True)
class OrderFound:
    """How well an order mixes labels, and what it costs.

    Attributes:
        order: The order.
        rows_together: Rows that are shuffled together, at most: `split_bytes`, the number of streams and the sizes of
            row groups may make them fewer than the buffer size. 0 without a row-level shuffle.
        mixing: How well labels are mixed.
        effective_part: The effective rows of a batch as a part of its rows: 1 for a uniform shuffle.
        memory_bytes: Decoded rows that the workers of a rank hold together, at most, in bytes.
        rows_per_s: Rows in a second, the median of some rounds, if they were measured.
    """

    order: Order
    rows_together: int
    mixing: LabelMixing
    effective_part: float
    memory_bytes: int
    rows_per_s: float | None


@dataclass(frozen=True, slots=True)
class Mixing:
    """What `tdu mixing` found.

    Attributes:
        root: The files' directory, without credentials.
        files: Number of files.
        rows: Number of rows.
        row_groups: Number of row groups.
        column: The label's column.
        labels: Names of the labels, and how many rows each has.
        described: What the labels are, where they are not simply the column's values.
        row_bytes: Decoded bytes of a row.
        options: What was compared.
        orders: The orders, from none to all rows.
        advised: The index of the advised one; None if none is good enough.
        advice: The advice and its reason.
    """

    root: str
    files: int
    rows: int
    row_groups: int
    column: str
    labels: tuple[tuple[str, int], ...]
    described: str
    row_bytes: float
    options: MixingOptions
    orders: tuple[OrderFound, ...]
    advised: int | None
    advice: str


def mixing(
    path: Any,
    column: str,
    options: MixingOptions,
    *,
    columns: Sequence[str] | None = None,
    progress: Callable[[str], None] = lambda _: None,
    **arguments: Any,
) -> Mixing:
    """Compare orders of some files by how well they mix the labels of a column.

    The order of rows follows from the plan, so only the label column is read, once.

    Args:
        path: The files.
        column: The label.
        options: What to compare.
        columns: The columns that the training reads, for the costs; None for all.
        progress: Called with what is done next.
        **arguments: Those of `create_dataloader`, which says what is raised.

    Raises:
        ColumnError: If the column does not exist, cannot be a label, or has one value alone.
        ValueError: If there is one batch alone.
    """
    progress("listing the files")
    labelled = open_dataset(path, **arguments, columns=[column], output_format="arrow", count_rows=True)
    progress(f"reading column {column!r}")
    labels = read_labels(column, _chunks(labelled, column))
    trained = labelled.with_columns(columns)
    sizes = RowSizes.of(trained)
    compared = _Comparison(labelled, trained, labels, sizes, options)
    manifest, found = labelled.opened.manifest, []
    orders = _orders(manifest.rows, options)
    if options.seconds is not None:
        progress(f"measuring rates, for about {ROUNDS * len(orders) * options.seconds:.0f} s")
    for order, rate in zip(orders, _rates(trained, orders, options), strict=True):
        progress(str(order))
        found.append(compared.of(order, rate))
    advised = _advised(found, options)
    return Mixing(
        root=manifest.root,
        files=len(manifest.files),
        rows=manifest.rows,
        row_groups=sum(len(file.row_groups) for file in manifest.files),
        column=column,
        labels=tuple(zip(labels.names, labels.counts, strict=True)),
        described=labels.described,
        row_bytes=sizes.decoded,
        options=options,
        orders=tuple(found),
        advised=advised,
        advice=_advice(found, advised, manifest, options),
    )


def _chunks(dataset: OpenedDataset, column: str) -> Iterator[pa.Array]:
    """Yield a column in the order of the manifest: one stream delivers it so without shuffle."""
    loader, _ = dataset.loader(batch_size=READ_ROWS)
    for batch in loader:
        yield from batch.column(column).chunks


def _orders(rows: int, options: MixingOptions) -> list[Order]:
    sizes = options.buffer_sizes
    if sizes is None:
        powers = [STEP**power for power in range(5, 40) if STEP**power < rows]
        sizes = (*powers[1 - MOST_BUFFERS :], rows)
    return [Order(shuffle=False), Order(shuffle=True), *(Order(shuffle=True, buffer_size=size) for size in sizes)]


@dataclass(frozen=True, slots=True)
class _Comparison:
    """What all orders are compared with: the files for their labels, and with the columns of the training."""

    labelled: OpenedDataset
    trained: OpenedDataset
    labels: Labels
    sizes: RowSizes
    options: MixingOptions

    def of(self, order: Order, rate: float | None) -> OrderFound:
        """Plan some epochs in an order, and measure how well they mix the labels."""
        manifest, options = self.labelled.opened.manifest, self.options
        plan_options = replace(self.labelled.options.plan, **order.arguments)
        plans = [
            make_plan(manifest, plan_options, epoch=epoch, num_ranks=options.ranks, num_workers=options.workers)
            for epoch in range(EPOCHS if order.shuffle else 1)
        ]
        mixed = label_mixing(
            plans,
            manifest,
            self.labels.codes,
            labels=len(self.labels.names),
            batch_size=options.batch_size,
            seed=plan_options.row_shuffle_seed,
        )
        memory = memory_bound(
            plans[0],
            shuffles_rows=plan_options.shuffles_rows,
            row_bytes=self.sizes.decoded,
            read_ahead_bytes=self.labelled.options.read_ahead_bytes,
            fetched_row_bytes=self.sizes.fetched,
        )
        together = rows_together(plans[0]) if plan_options.shuffles_rows else 0
        return OrderFound(order, together, mixed, 1 / mixed.design_effect, memory, rate)


def _rates(dataset: OpenedDataset, orders: Sequence[Order], options: MixingOptions) -> list[float | None]:
    """Return the rows in a second of each order, measured in turns; None if they are not to be measured."""
    if options.seconds is None:
        return [None] * len(orders)
    setting, rates = Setting(options.workers, options.batch_size), []
    for epoch in range(ROUNDS):
        loaders = [dataset.with_arguments(**order.arguments) for order in orders]
        rates.append([measure_loader(loader, setting, options.seconds, epoch).rate for loader in loaders])
    return [statistics.median(of_order) for of_order in zip(*rates, strict=True)]


def _advised(found: Sequence[OrderFound], options: MixingOptions) -> int | None:
    """Return the first order whose design effect is as small as wanted, as far as so many batches can tell."""
    wanted = 1 / (1 - options.within)
    for number, one in enumerate(found):
        if one.mixing.design_effect <= wanted + 2 * one.mixing.error:
            return number
    return None


def _advice(found: Sequence[OrderFound], advised: int | None, manifest: Manifest, options: MixingOptions) -> str:
    within = f"within {options.within:.0%} of a uniform shuffle"
    if advised is None:
        best = max(found, key=lambda one: one.mixing.effective_rows)
        advice = f"None of them is {within}. The best, {best.order}, makes a batch of {options.batch_size:,} rows as "
        return (
            f"{advice}varied as {best.mixing.effective_rows:,.0f} random rows. {_what_helps(best, manifest, options)}"
        )
    one = found[advised]
    rows = f"a batch of {options.batch_size:,} rows is as varied as {one.mixing.effective_rows:,.0f} random rows"
    if not one.order.shuffle:
        return f"No shuffle is needed for the labels: {rows} already, {within}."
    if one.order.buffer_size is None:
        return f"shuffle=True without a buffer: {rows}, {within}."
    return f"shuffle_buffer_size={one.order.buffer_size}: the smallest of these {within}; {rows}."


def _what_helps(best: OrderFound, manifest: Manifest, options: MixingOptions) -> str:
    """Return what would mix better than the best order."""
    largest = max(group.rows for file in manifest.files for group in file.row_groups)
    text = f"Smaller row groups would mix better (they have up to {largest:,} rows)"
    streams = options.ranks * max(1, options.workers)
    wanted = min(best.order.buffer_size or 0, manifest.rows // streams)
    others = ["fewer workers"] * (options.workers > 1) + ["a larger split_bytes"] * (best.rows_together < wanted // 2)
    return f"{text}, as would {' or '.join(others)}." if others else f"{text}."
