"""Copies of a loader, and the `worker_init_fn` that a user gave."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairwise import pairwise
from support import batches_of, open_loader, rows_of, write_dataset

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")


def pickled(loader: Any) -> Any:
    return pickle.loads(pickle.dumps(loader))


every_copy = pytest.mark.parametrize("copied", [pickled, copy.deepcopy, copy.copy])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("data")
    write_dataset(directory)
    return directory


@pairwise(most=4, copied=[pickled, copy.deepcopy, copy.copy], workers=[2, 0])
def test_a_copy_continues_where_the_original_stands_and_the_original_goes_on(
    path: Path, copied: Callable[[Any], Any], workers: int
):
    loader, _ = open_loader(path, shuffle=True, num_workers=workers)
    whole = batches_of(loader)
    iterator = iter(loader)
    assert [rows_of(next(iterator)) for _ in range(3)] == whole[:3]

    twin = copied(loader)

    assert twin.state_dict() == loader.state_dict()
    assert batches_of(twin) == whole[3:]
    assert batches_of(twin) == whole
    assert loader.state_dict()["batches_delivered"] == 3
    assert batches_of(iterator) == whole[3:]


@every_copy
def test_a_copy_made_after_a_pass_with_workers_begins_the_epoch(path: Path, copied: Callable[[Any], Any]):
    loader, _ = open_loader(path, shuffle=True, num_workers=2)
    loader.set_epoch(2)
    whole = batches_of(loader)

    twin = copied(loader)

    assert twin.dataset.epoch == 2
    assert batches_of(twin) == whole
    assert batches_of(loader) == whole


class Notes:
    """A `worker_init_fn` that leaves a file behind."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = name

    def __call__(self, worker: int) -> None:
        (self._directory / f"{self._name}-{worker}").touch()


def test_worker_init_fn_stays_what_the_user_gave_and_a_new_one_is_called_by_the_next_workers(path, tmp_path):
    first, second = Notes(tmp_path, "first"), Notes(tmp_path, "second")
    loader, _ = open_loader(path, num_workers=2, worker_init_fn=first, persistent_workers=False)
    assert loader.worker_init_fn is first
    batches_of(loader)
    assert loader.worker_init_fn is first
    loader.worker_init_fn = second
    batches_of(loader)
    assert loader.worker_init_fn is second
    assert {file.name for file in tmp_path.iterdir()} == {f"{name}-{n}" for name in ("first", "second") for n in (0, 1)}
    assert isinstance(loader, torch.utils.data.DataLoader)
