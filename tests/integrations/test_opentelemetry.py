"""OpenTelemetry: what a reader of the SDK collects."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import AggregationTemporality, InMemoryMetricReader
from support import open_loader, rows_of, write_dataset

from torch_dataloader_utils.integrations import opentelemetry
from torch_dataloader_utils.integrations.opentelemetry import observe


@pytest.fixture
def reader():
    """A reader in memory, and the provider that it reads."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    yield reader, provider
    provider.shutdown()


def collected(reader):
    """Return the metrics by name."""
    (resource,) = reader.get_metrics_data().resource_metrics
    (scope,) = resource.scope_metrics
    assert scope.scope.name == "torch_dataloader_utils"
    return {metric.name: metric for metric in scope.metrics}


def points(metric, **attributes: str):
    return [point.value for point in metric.data.data_points if attributes.items() <= point.attributes.items()]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_reader_collects_what_was_delivered_until_now(tmp_path, reader, num_workers):
    write_dataset(tmp_path / "data")
    reader, provider = reader
    loader, dataset = open_loader(tmp_path / "data", num_workers=num_workers)
    observe(provider, train=loader)
    rows = 0
    for batch in loader:
        rows += len(rows_of(batch))
        if rows > 150:
            break
    metrics = collected(reader)
    counted = dataset.get_metrics()
    delivered = metrics["tdu.rows_delivered"]
    assert sum(points(delivered, loader="train", rank="0")) == rows
    assert points(delivered, worker="0") == [counted["workers"][0]["rows_delivered"]]
    assert (delivered.unit, metrics["tdu.read"].unit, metrics["tdu.worker_time"].unit) == ("{row}", "By", "s")
    assert delivered.data.is_monotonic
    assert delivered.data.aggregation_temporality == AggregationTemporality.CUMULATIVE
    assert sum(points(metrics["tdu.read"])) == counted["bytes_read"] > 0
    assert points(metrics["tdu.loop_time"], state="waiting") == [pytest.approx(counted["waiting_sec"])]
    assert points(metrics["tdu.worker_time"], worker="0", stage="decoding") == [
        pytest.approx(counted["workers"][0]["decoding_sec"])
    ]


def test_counters_grow_from_epoch_to_epoch(tmp_path, reader):
    rows = write_dataset(tmp_path / "data")
    reader, provider = reader
    loader, _ = open_loader(tmp_path / "data")
    observe(provider, train=loader)
    for number in (1, 2):
        for _ in loader:
            pass
        assert sum(points(collected(reader)["tdu.rows_delivered"])) == number * rows


@pytest.mark.parametrize("is_global", [False, True], ids=["a provider", "the global provider"])
def test_further_calls_add_loaders_or_put_one_in_the_place_of_another(tmp_path, reader, monkeypatch, is_global):
    rows = write_dataset(tmp_path / "data")
    reader, provider = reader
    if is_global:
        monkeypatch.setattr(opentelemetry, "get_meter_provider", lambda: provider)
    given = () if is_global else (provider,)
    first, second, third = (open_loader(tmp_path / "data")[0] for _ in range(3))
    observe(*given, train=first)
    observe(*given, validation=second)
    for loader in (first, second):
        assert sum(len(rows_of(batch)) for batch in loader) == rows
    delivered = collected(reader)["tdu.rows_delivered"]
    assert (points(delivered, loader="train"), points(delivered, loader="validation")) == ([rows], [rows])
    observe(*given, train=third)
    delivered = collected(reader)["tdu.rows_delivered"]
    assert (points(delivered, loader="train"), points(delivered, loader="validation")) == ([0], [rows])
    with pytest.raises(TypeError, match="train is str"):
        observe(*given, train="loader")


def test_loaders_of_a_provider_that_becomes_the_global_one_stay(tmp_path, reader, monkeypatch):
    rows = write_dataset(tmp_path / "data")
    reader, provider = reader
    loaders = [open_loader(tmp_path / "data")[0] for _ in range(3)]
    observe(provider, first=loaders[0])
    monkeypatch.setattr(opentelemetry, "get_meter_provider", lambda: provider)
    observe(second=loaders[1])
    observe(provider, third=loaders[2])
    for loader in loaders:
        list(loader)
    delivered = collected(reader)["tdu.rows_delivered"]
    assert [points(delivered, loader=name) for name in ("first", "second", "third")] == [[rows]] * 3


def test_another_provider_has_its_own_loaders(tmp_path, reader):
    rows = write_dataset(tmp_path / "data")
    reader, provider = reader
    other = InMemoryMetricReader()
    second = MeterProvider([other])
    loader, _ = open_loader(tmp_path / "data")
    for given in (provider, second):
        observe(given, train=loader)
    assert sum(len(rows_of(batch)) for batch in loader) == rows
    for each in (reader, other):
        assert points(collected(each)["tdu.rows_delivered"]) == [rows]
    second.shutdown()
