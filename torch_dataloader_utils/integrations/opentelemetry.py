"""OpenTelemetry: the counters of loaders as observable counters, read whenever metrics are collected."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch_dataloader_utils.integrations.figures import FIGURES, Figure, Loaders

try:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation, get_meter_provider
except ImportError as error:
    missing = "observe needs opentelemetry-api: pip install opentelemetry-api"
    raise ImportError(missing) from error

_observed: WeakKeyDictionary[Any, Loaders] = WeakKeyDictionary()
"""The loaders of each provider; those of the global one, which may be set later, by the function that returns it."""


def observe(meter_provider: MeterProvider | None = None, **loaders: Any) -> None:
    """Let OpenTelemetry observe the counters of loaders, such as ``tdu.rows_delivered``.

    Their attributes are ``loader``, the name that is given here, ``rank`` and ``worker``. They are read when the
    provider's readers collect, and cost the training loop nothing. Loaders may be added by further calls: each takes
    the place of an earlier one of its name. OpenTelemetry has no way to end an observation.

    Args:
        meter_provider: The provider; None for the global one.
        **loaders: The loaders of this process, by the value of the attribute ``loader``.

    Raises:
        TypeError: If one is not this package's loader.
        ValueError: If there is none.
    """
    provider = meter_provider or get_meter_provider()
    keys = [provider, get_meter_provider] if provider is get_meter_provider() else [provider]
    for key in keys:
        if key in _observed:  # OpenTelemetry would ignore a second instrument of a name, and its loaders
            _observed[key].add(loaders)
            return
    named = _observed[keys[-1]] = Loaders(loaders)
    meter = provider.get_meter("torch_dataloader_utils")
    for figure in FIGURES:
        read: Callable[[CallbackOptions], Iterable[Observation]] = partial(_observations, named, figure)
        meter.create_observable_counter(figure.name, [read], unit=figure.unit, description=figure.description)


def _observations(loaders: Loaders, figure: Figure, _options: CallbackOptions) -> Iterable[Observation]:
    return [Observation(value, labels) for value, labels in loaders.values(figure)]
