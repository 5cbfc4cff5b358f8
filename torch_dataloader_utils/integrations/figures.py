"""The counters of loaders as monitoring systems want them: each with a name, a unit and few labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch_dataloader_utils.dataset.structured import StructuredDataset
from torch_dataloader_utils.reading.work import STAGES


@dataclass(frozen=True, slots=True)
class Figure:
    """A counter that only grows.

    Attributes:
        name: Its name, as OpenTelemetry writes names.
        unit: ``s``, ``By`` or what is counted in braces, as OpenTelemetry writes units.
        description: What it counts.
        keys: The keys of `get_total_metrics` that it counts, and for each the value of its `label`, if it has one.
        label: What tells these apart; empty where there is only one key.
        by_worker: Whether each worker has its own.
    """

    name: str
    unit: str
    description: str
    keys: Mapping[str, str]
    label: str = ""
    by_worker: bool = True

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of its labels."""
        return tuple(filter(None, ("loader", "rank", "worker" if self.by_worker else "", self.label)))


def _one(name: str, unit: str, description: str, key: str, *, by_worker: bool = True) -> Figure:
    return Figure(name, unit, description, {key: ""}, by_worker=by_worker)


FIGURES = (
    _one("tdu.rows_delivered", "{row}", "Rows that were delivered", "rows_delivered"),
    _one("tdu.batches_delivered", "{batch}", "Batches that were delivered", "batches_delivered"),
    _one("tdu.row_groups_read", "{row_group}", "Row groups that were read", "row_groups_read"),
    _one("tdu.row_groups_read_again", "{row_group}", "Row groups read again after a resume", "row_groups_read_again"),
    _one("tdu.read", "By", "Compressed bytes of the row groups that were read", "bytes_read"),
    _one("tdu.read_again", "By", "Those of them that were read again after a resume", "bytes_read_again"),
    _one("tdu.retries", "{attempt}", "Attempts of the storage that failed and were followed by others", "retries"),
    Figure(
        "tdu.worker_time",
        "s",
        "Where the time of a worker went",
        {stage: stage.removesuffix("_sec") for stage in STAGES},
        label="stage",
    ),
    _one("tdu.worker_cpu", "s", "Time that the threads of a worker were on a CPU", "cpu_sec"),
    Figure(
        "tdu.loop_time",
        "s",
        "Where the time of the training loop went",
        {"first_batch_sec": "first_batch", "waiting_sec": "waiting", "between_batches_sec": "working"},
        label="state",
        by_worker=False,
    ),
    _one(
        "tdu.stalls", "{stall}", "How often the loop waited longer than a second for a batch", "stalls", by_worker=False
    ),
    _one("tdu.rows_dropped", "{row}", "Rows left out by drop_last", "rows_dropped", by_worker=False),
)
"""All counters. No label has a value for each file, row group or step: their number would grow without bound."""


class Loaders:
    """Some loaders by name. It keeps their datasets, not the loaders, whose worker processes would go on with them."""

    def __init__(self, loaders: Mapping[str, Any]) -> None:
        self._datasets: Mapping[str, StructuredDataset] = {}
        self.add(loaders)

    def add(self, loaders: Mapping[str, Any]) -> None:
        """Add loaders. Each takes the place of an earlier one of its name."""
        if not loaders:
            raise ValueError("no loader: name each, as in train=loader")
        added = {name: _dataset_of(name, loader) for name, loader in loaders.items()}
        self._datasets = {**self._datasets, **added}  # another thread may be reading the values of those before

    def values(self, figure: Figure) -> Iterator[tuple[float, dict[str, str]]]:
        """Yield the values of a counter now, each with its labels."""
        for name, dataset in self._datasets.items():
            metrics = dataset.get_total_metrics()
            labels = {"loader": name, "rank": str(dataset.rank)}
            sources = [(labels, metrics)]
            if figure.by_worker:
                sources = [(labels | {"worker": str(number)}, one) for number, one in enumerate(metrics["workers"])]
            for own, counts in sources:
                for key, value in figure.keys.items():
                    yield counts[key], own | ({figure.label: value} if figure.label else {})


def _dataset_of(name: str, loader: Any) -> StructuredDataset:
    dataset = getattr(loader, "dataset", loader)
    if not isinstance(dataset, StructuredDataset):
        raise TypeError(f"{name} is {type(loader).__name__}, expected the loader that create_dataloader returns")
    return dataset
