"""Prometheus: the counters of loaders, read whenever they are scraped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch_dataloader_utils.integrations.figures import FIGURES, Figure, Loaders

try:
    from prometheus_client.metrics_core import CounterMetricFamily
    from prometheus_client.registry import Collector
except ImportError as error:
    missing = "LoaderCollector needs prometheus_client: pip install prometheus-client"
    raise ImportError(missing) from error

UNITS = {"s": "_seconds", "By": "_bytes"}


class LoaderCollector(Collector):  # type: ignore[misc]
    """Collects the counters of loaders for a registry of prometheus_client.

    ``REGISTRY.register(LoaderCollector(train=loader))`` adds ``tdu_rows_delivered_total`` and others to what
    ``start_http_server`` shows. Their labels are ``loader``, the name that is given here, ``rank`` and ``worker``. A
    scrape reads counters and costs the training loop nothing.

    Args:
        **loaders: The loaders of this process, by the value of the label ``loader``.

    Raises:
        TypeError: If one is not this package's loader.
        ValueError: If there is none.
    """

    def __init__(self, **loaders: Any) -> None:
        self._loaders = Loaders(loaders)

    def describe(self) -> Iterator[CounterMetricFamily]:
        """Yield all counters without values: a registry refuses another collector whose counters have these names."""
        return map(_family, FIGURES)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield all counters as they are now."""
        for figure in FIGURES:
            family = _family(figure)
            for value, labels in self._loaders.values(figure):
                family.add_metric([labels[label] for label in figure.labels], value)
            yield family


def _family(figure: Figure) -> CounterMetricFamily:
    name = figure.name.replace(".", "_") + UNITS.get(figure.unit, "")
    return CounterMetricFamily(name, figure.description, labels=figure.labels)
