"""`loader.set_epoch`, and what a call with the current epoch leaves as it is."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from support import DEFAULT_FILES, batches_of, open_loader, rows_of, write_dataset
from torch.utils.data import DataLoader

from torch_dataloader_utils import IterationEndedError, StructuredDataLoader

ROWS = sum(rows for rows, _ in DEFAULT_FILES)

IN_PROCESS = pytest.param({"num_workers": 0}, id="in process")
PERSISTENT = pytest.param({"num_workers": 2, "persistent_workers": True}, id="persistent workers")
NEW: dict[str, Any] = {"num_workers": 2, "persistent_workers": False}

any_workers = pytest.mark.parametrize("workers", [IN_PROCESS, PERSISTENT, pytest.param(NEW, id="new workers")])
workers_started_once = pytest.mark.parametrize(
    "workers", [IN_PROCESS, PERSISTENT, pytest.param(NEW, id="new workers", marks=pytest.mark.soak)]
)
"""Workers are sent the same at the start of an iteration, whether they are new or not."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    write_dataset(directory)
    return directory


def opened(path: Path, **options: Any) -> StructuredDataLoader:
    return open_loader(path, batch_size=32, shuffle=True, **options)[0]


def epochs(path: Path, count: int, **workers: Any) -> list[list[list[int]]]:
    loader = opened(path, **workers)
    whole = []
    for epoch in range(count):
        loader.set_epoch(epoch)
        whole.append(batches_of(loader))
    return whole


def take(iterator: Any, count: int) -> list[list[int]]:
    return [rows_of(batch) for batch in itertools.islice(iterator, count)]


@workers_started_once
def test_the_loader_sets_the_epoch_of_its_dataset(path, workers):
    loader = opened(path, **workers)
    loader.set_epoch(3)
    assert loader.dataset.epoch == loader.state_dict()["epoch"] == 3
    twin = opened(path, **workers)
    twin.dataset.set_epoch(3)
    assert batches_of(loader) == batches_of(twin)
    with pytest.raises(ValueError, match="epoch=-1"):
        loader.set_epoch(-1)


@any_workers
def test_an_iterator_that_has_delivered_nothing_goes_on_after_set_epoch_of_its_epoch(path, workers):
    whole = epochs(path, 2, **workers)
    loader = opened(path, **workers)
    iterator = iter(loader)
    loader.set_epoch(0)
    assert take(iterator, 2) == whole[0][:2]

    loader.set_epoch(0)
    assert loader.state_dict()["batches_delivered"] == 0, "it had delivered: the epoch begins again"
    with pytest.raises(IterationEndedError, match="set_epoch"):
        next(iterator)
    iterator = iter(loader)
    loader.set_epoch(1)
    with pytest.raises(IterationEndedError, match="set_epoch"):
        next(iterator)
    assert batches_of(loader) == whole[1]


@workers_started_once
def test_an_iterator_that_continues_a_state_goes_on_after_set_epoch_of_its_epoch(path, workers):
    whole = epochs(path, 1, **workers)[0]
    saved = opened(path, **workers)
    take(iter(saved), 5)
    state = saved.state_dict()

    loader = opened(path, **workers)
    loader.load_state_dict(state)
    loader.set_epoch(0)
    assert loader.state_dict() == state
    iterator = iter(loader)
    loader.set_epoch(0)
    loader.dataset.set_epoch(0)
    assert loader.state_dict() == state
    assert batches_of(iterator) == whole[5:]


@workers_started_once
def test_set_epoch_of_an_epoch_that_has_ended_begins_it_again(path, workers):
    whole = epochs(path, 1, **workers)[0]
    loader = opened(path, **workers)
    assert batches_of(loader) == whole
    end = loader.state_dict()
    loader.set_epoch(0)
    assert loader.state_dict()["batches_delivered"] == 0

    loader.load_state_dict(end)
    assert batches_of(loader) == []
    loader.set_epoch(0)
    assert loader.state_dict()["batches_delivered"] == 0, "also if the iteration that ended had no batch left"
    assert batches_of(loader) == whole


def fail(batch):
    raise ValueError(batch)


@any_workers
def test_set_epoch_of_an_epoch_whose_iterator_failed_begins_it_again(path, workers):
    whole = epochs(path, 1, **workers)[0]
    saved = opened(path, **workers)
    take(iter(saved), 1)
    loader = opened(path, collate_fn=fail, **workers)
    loader.load_state_dict(saved.state_dict())
    with pytest.raises(ValueError, match="row"):
        next(iter(loader))
    assert loader.state_dict()["batches_delivered"] == 1
    loader.set_epoch(0)
    assert loader.state_dict()["batches_delivered"] == 0
    saved.set_epoch(0)
    assert batches_of(saved) == whole


def test_set_epoch_after_a_plain_loader_read_what_a_state_left_begins_the_epoch_again(path):
    whole = epochs(path, 1, num_workers=1)[0]
    saved = opened(path, num_workers=1)
    take(iter(saved), 2)
    loader = opened(path, num_workers=1)
    loader.load_state_dict(saved.state_dict())
    assert batches_of(DataLoader(loader.dataset, batch_size=None, num_workers=1)) == whole[2:]
    loader.set_epoch(0)
    assert loader.state_dict()["batches_delivered"] == 0
    assert batches_of(loader) == whole


@pytest.mark.parametrize("persistent", [False, True])
def test_set_epoch_of_the_current_epoch_leaves_workers_of_plain_loaders_as_they_are(path, persistent):
    whole = epochs(path, 2, num_workers=2)
    dataset = opened(path, num_workers=2).dataset
    loader = DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=persistent)
    for epoch in (0, 0, 1, 1):
        dataset.set_epoch(epoch)
        dataset.set_epoch(epoch)
        assert batches_of(loader) == whole[epoch]
    dataset.set_epoch(1)
    assert dataset.state_dict()["batches_delivered"] == 0, "workers had delivered: the epoch begins again"


@pytest.mark.parametrize("workers", [0, 2])
def test_the_repr_of_a_loader_is_its_datasets_with_the_batch_size_on_one_line(path, workers):
    loader = opened(path, num_workers=workers)
    dataset = repr(loader.dataset).removeprefix("StructuredDataset(").removesuffix(")")
    assert repr(loader) == str(loader) == f"StructuredDataLoader({dataset}, batch_size=32)"
    assert "\n" not in repr(loader)
