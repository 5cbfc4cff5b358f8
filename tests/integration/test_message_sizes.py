"""How many batches travel together from workers: no batch comes earlier or later for it."""

from __future__ import annotations

import ctypes
import time
from multiprocessing import sharedctypes
from pathlib import Path
from typing import Any

import pytest
from pairwise import pairwise
from support import batches_of, open_loader, rows_of, write_dataset
from torch.utils.data import get_worker_info

from torch_dataloader_utils.workers.message_size import GROWTH, MessageSizer

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")

FILES = ((600, 600), (10, 10), (400, 50), (100, 100), (9, 3), (300, 300))
"""Row groups that cannot be parted: streams of very different lengths."""


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    directory: Path = tmp_path_factory.mktemp("sizer")
    write_dataset(directory, FILES)
    return directory


def turns(streams: list[list[Any]]) -> list[Any]:
    """Take one from each in turn, as long as it has any."""
    taken = []
    while any(streams):
        taken += [stream.pop(0) for stream in streams if stream]
    return taken


def slow_at_times(batch: Any) -> Any:
    if rows_of(batch)[0] % 200 == 0:
        time.sleep(0.02)
    return batch


class Diary:
    """Notes in shared memory the most batches that a message of each worker was to hold."""

    def __init__(self, workers: int) -> None:
        self.most = sharedctypes.RawArray(ctypes.c_int64, workers)

    def __call__(self, worker: int) -> None:
        """Run in a worker as it starts."""
        record = MessageSizer.record

        def noted(sizer: MessageSizer, batches: int, size: int, seconds: float) -> None:
            record(sizer, batches, size, seconds)
            self.most[worker] = max(self.most[worker], sizer.batches)

        MessageSizer.record = noted  # type: ignore[method-assign]


def keep_single(_worker: int) -> None:
    MessageSizer.record = lambda *_: None  # type: ignore[method-assign]


@pairwise(most=3, options=[{}, {"collate_fn": slow_at_times}, {"prefetch_factor": 5}], workers=[2, 3])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_batches_come_in_the_same_order_whatever_travels_together(path, workers, options):
    diary = Diary(workers)
    loader, _ = open_loader(path, num_workers=workers, batch_size=4, worker_init_fn=diary, **options)
    grown = [batches_of(loader) for _ in range(2)]
    assert max(diary.most) > 1
    single = batches_of(open_loader(path, num_workers=workers, batch_size=4, worker_init_fn=keep_single, **options)[0])
    assert grown == [single, single]


@pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:ranks make different numbers of steps")
def test_streams_of_very_different_lengths_take_turns_batch_by_batch(path):
    loader, _ = open_loader(path, num_workers=3, batch_size=4)
    ranks = [open_loader(path, num_ranks=3, rank=rank, batch_size=4)[0] for rank in range(3)]  # dealt as workers are
    streams = list(map(batches_of, ranks))
    assert min(map(len, streams)) * 3 < max(map(len, streams))
    assert batches_of(loader) == turns(streams)


def slow_in_worker_0(batch: Any) -> Any:
    if get_worker_info().id == 0:
        time.sleep(0.03)
    return batch


@pytest.mark.parametrize("sizes", [(240, 240), (240, 20)], ids=["even", "uneven"])
def test_each_worker_decides_on_its_own_messages_and_batches_still_take_turns(tmp_path, sizes):
    write_dataset(tmp_path, tuple((size, size) for size in sizes))
    diary = Diary(2)
    options = {"batch_size": 4, "collate_fn": slow_in_worker_0, "worker_init_fn": diary}
    loader, _ = open_loader(tmp_path, num_workers=2, **options)
    ranks = [open_loader(tmp_path, num_ranks=2, rank=rank, batch_size=4)[0] for rank in range(2)]
    assert batches_of(loader) == turns(list(map(batches_of, ranks)))
    assert diary.most[0] == 1
    assert diary.most[1] >= GROWTH or len(set(sizes)) > 1


def test_a_worker_gets_no_further_ahead_of_the_training_loop_than_its_messages_in_transit(tmp_path):
    write_dataset(tmp_path, ((800, 400),))
    made = sharedctypes.RawArray(ctypes.c_int64, 2)

    def count(batch: Any) -> Any:
        made[get_worker_info().id] += 1
        return batch

    loader, _ = open_loader(
        tmp_path, num_workers=2, batch_size=4, collate_fn=count, worker_init_fn=keep_single, prefetch_factor=3
    )
    for number, _ in enumerate(loader):
        if number < 50:
            time.sleep(0.005)
            assert max(made) <= number // 2 + 1 + 3
    assert sum(made) == 200
