"""Worker processes that never get to run: found out, started again, and named if it does not help."""

from __future__ import annotations

import os
import time

import pytest
import torch
from support import all_rows_of, open_loader, write_dataset

import torch_dataloader_utils.loader as loader_module
from torch_dataloader_utils import IterationEndedError

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")


class HangingForks:
    """Makes forked processes hang before their first line, as one does that waits for a lock nobody holds any more."""

    def __init__(self) -> None:
        self.left = 0
        self._hangs = False
        os.register_at_fork(before=self._count, after_in_child=self._hang)

    def _count(self) -> None:
        self._hangs = self.left > 0
        self.left -= self._hangs

    def _hang(self) -> None:
        if self._hangs:
            time.sleep(3600)


HANGING = HangingForks()


@pytest.fixture
def hanging(monkeypatch):
    monkeypatch.setattr(loader_module, "START_SEC", 0.5)
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)  # how long torch waits for the hung
    yield HANGING
    HANGING.left = 0


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("forks", [1, 2, 3])
def test_workers_that_hang_at_their_fork_are_started_again(tmp_path, hanging, persistent, forks):
    rows = write_dataset(tmp_path)
    loader, dataset = open_loader(
        tmp_path, num_workers=2, persistent_workers=persistent, multiprocessing_context="fork"
    )
    whole = all_rows_of(loader)
    loader, dataset = open_loader(
        tmp_path, num_workers=2, persistent_workers=persistent, multiprocessing_context="fork"
    )
    hanging.left = forks
    batches = iter(loader)
    first = next(batches)["row"].tolist()
    dataset.load_state_dict(dataset.state_dict())
    assert first + all_rows_of(loader) == whole
    assert sorted(whole) == list(range(rows))
    assert hanging.left == 0


def test_workers_that_always_hang_are_an_error_that_says_what_to_do(tmp_path, hanging):
    write_dataset(tmp_path)
    loader, dataset = open_loader(tmp_path, num_workers=1, multiprocessing_context="fork")
    hanging.left = 1000
    with pytest.raises(RuntimeError, match=r"hung at their start, 3 times.*multiprocessing_context='forkserver'"):
        iter(loader)
    assert dataset.state_dict()["batches_delivered"] == 0


def test_an_iterator_that_was_replaced_says_so_though_the_new_one_failed(tmp_path, hanging):
    write_dataset(tmp_path)
    loader, dataset = open_loader(tmp_path, num_workers=1, multiprocessing_context="fork", persistent_workers=False)
    first = iter(loader)
    next(first)
    hanging.left = 1000
    with pytest.raises(RuntimeError, match="hung at their start"):
        iter(loader)
    with pytest.raises(IterationEndedError, match="ended by a later iter"):
        next(first)
    assert dataset.state_dict()["batches_delivered"] == 1


def test_a_worker_that_dies_at_its_start_is_torchs_error_at_once(tmp_path):
    write_dataset(tmp_path)
    loader, _ = open_loader(tmp_path, num_workers=2, multiprocessing_context="fork", worker_init_fn=die)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        all_rows_of(loader)
    assert time.monotonic() - start < loader_module.START_SEC


def die(worker: int) -> None:
    if worker:
        os._exit(3)
