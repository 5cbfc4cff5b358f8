"""Prometheus: what a scrape of a real endpoint shows."""

from __future__ import annotations

import urllib.request

import pytest
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.parser import text_string_to_metric_families
from support import open_loader, rows_of, write_dataset

from torch_dataloader_utils.integrations.prometheus import LoaderCollector


@pytest.fixture
def endpoint():
    """A registry and the port at which it is served."""
    registry = CollectorRegistry()
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    yield registry, server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


def scraped(port):
    """Return the values that are served, by name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    families = text_string_to_metric_families(text)
    return {(one.name, *sorted(one.labels.items())): one.value for family in families for one in family.samples}


def total(values, name, **labels: str):
    return sum(value for key, value in values.items() if key[0] == name and set(labels.items()) <= set(key[1:]))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_scrape_within_an_epoch_shows_what_was_delivered(tmp_path, endpoint, num_workers):
    write_dataset(tmp_path / "data")
    registry, port = endpoint
    train, dataset = open_loader(tmp_path / "data", num_workers=num_workers)
    validation, _ = open_loader(tmp_path / "data", num_ranks=2, rank=1, uneven_ranks="drop")
    registry.register(LoaderCollector(train=train, validation=validation))
    batches = iter(train)
    rows = sum(len(rows_of(next(batches))) for _ in range(11))
    rows_of_one = len(rows_of(next(iter(validation))))
    values = scraped(port)
    assert total(values, "tdu_rows_delivered_total", loader="train", rank="0") == rows
    assert total(values, "tdu_rows_delivered_total", loader="validation", rank="1") == rows_of_one
    assert total(values, "tdu_batches_delivered_total", loader="train") == 11
    metrics = dataset.get_metrics()
    assert total(values, "tdu_read_bytes_total", loader="train") == metrics["bytes_read"] > 0
    for number, worker in enumerate(metrics["workers"]):
        labels = {"loader": "train", "worker": str(number)}
        assert total(values, "tdu_rows_delivered_total", **labels) == worker["rows_delivered"]
        seconds = total(values, "tdu_worker_time_seconds_total", stage="decoding", **labels)
        assert seconds == pytest.approx(worker["decoding_sec"])
    assert total(values, "tdu_loop_time_seconds_total", loader="train", state="waiting") == pytest.approx(
        metrics["waiting_sec"]
    )


def test_counters_grow_from_epoch_to_epoch_and_labels_are_few(tmp_path, endpoint):
    rows = write_dataset(tmp_path / "data")
    registry, port = endpoint
    loader, _ = open_loader(tmp_path / "data", num_workers=2)
    registry.register(LoaderCollector(train=loader))
    series = len(scraped(port))
    for number in (1, 2):
        for _ in loader:
            pass
        assert total(scraped(port), "tdu_rows_delivered_total") == number * rows
    assert len(scraped(port)) == series


def test_what_is_no_loader_is_refused():
    with pytest.raises(TypeError, match="train is list, expected the loader that create_dataloader returns"):
        LoaderCollector(train=[])
    with pytest.raises(ValueError, match="name each, as in train=loader"):
        LoaderCollector()


def test_the_collector_keeps_no_workers_alive(tmp_path, leaves_nothing_behind):
    write_dataset(tmp_path / "data")
    loader, _ = open_loader(tmp_path / "data", num_workers=1)
    collector = LoaderCollector(train=loader)
    next(iter(loader))
    del loader  # `leaves_nothing_behind` looks for its worker while the registry below still has the collector
    registry = CollectorRegistry()
    registry.register(collector)
    assert (
        registry.get_sample_value("tdu_batches_delivered_total", {"loader": "train", "rank": "0", "worker": "0"}) == 1
    )
