"""How many batches travel together from workers: no batch comes earlier or later for it."""

from __future__ import annotations

import ctypes
import inspect
import time
from multiprocessing import sharedctypes
from pathlib import Path
from typing import Any

import pytest
from pairwise import pairwise
from support import batches_of, open_loader, rows_of, write_dataset

from torch_dataloader_utils.workers.message_size import MAX_BATCHES, MessageSizer

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")

FILES = ((2400, 2400), (10, 10), (1500, 100), (400, 400), (9, 3), (1200, 1200))
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
    if rows_of(batch)[0] % 1600 == 0:
        time.sleep(0.02)
    return batch


@pairwise(most=3, options=[{}, {"collate_fn": slow_at_times}, {"prefetch_factor": 5}], workers=[2, 3])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_batches_come_in_the_same_order_whatever_travels_together(path, workers, options, monkeypatch):
    loader, _ = open_loader(path, num_workers=workers, batch_size=4, **options)
    grown = [batches_of(loader) for _ in range(2)]
    sizer = loader._channels[0].sizer
    assert sizer.batches(10**6) > 1
    monkeypatch.setattr(MessageSizer, "record", lambda *_: None)
    single = batches_of(loader)
    assert sizer.batches(10**6) == 1
    assert grown == [single, single]


@pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:ranks make different numbers of steps")
def test_streams_of_very_different_lengths_take_turns_batch_by_batch(path):
    loader, _ = open_loader(path, num_workers=3, batch_size=4)
    ranks = [open_loader(path, num_ranks=3, rank=rank, batch_size=4)[0] for rank in range(3)]  # dealt as workers are
    streams = list(map(batches_of, ranks))
    assert min(map(len, streams)) * 3 < max(map(len, streams))
    assert batches_of(loader) == turns(streams)


class Diary:
    """Notes in shared memory how many batches each message of each worker got."""

    def __init__(self, workers: int, numbers: int) -> None:
        self.counts = [sharedctypes.RawArray(ctypes.c_int64, numbers) for _ in range(workers)]

    def __call__(self, worker: int) -> None:
        """Run in a worker as it starts."""
        counts, batches = self.counts[worker], MessageSizer.batches

        def noted(sizer: MessageSizer, number: int) -> int:
            counts[number] = batches(sizer, number)
            return counts[number]

        MessageSizer.batches = noted  # type: ignore[method-assign]


@pytest.mark.parametrize("sizes", [(6000, 6000), (6000, 20)], ids=["even", "uneven"])
def test_all_workers_put_the_same_number_of_batches_into_messages_of_the_same_number(tmp_path, sizes, monkeypatch):
    monkeypatch.setattr(inspect.getmodule(MessageSizer), "QUICK_SEC", 60.0)  # however slow this machine is
    write_dataset(tmp_path, tuple((size, size) for size in sizes))
    diary = Diary(2, 6000)
    loader, _ = open_loader(tmp_path, num_workers=2, batch_size=2, prefetch_factor=4, worker_init_fn=diary)
    for number, _ in enumerate(loader):
        if number < 200:
            time.sleep(0.004)  # so that workers come as far ahead as they can
    sizer = loader._channels[0].sizer
    assert sizer.batches(10**6) == MAX_BATCHES
    for counts in diary.counts:
        made = [count for count in counts if count]
        assert len(made) > 5
        assert made == [sizer.batches(number) for number in range(len(made))]
