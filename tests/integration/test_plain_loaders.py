"""The dataset in loaders that are not ours: torch's plain DataLoader, torchdata's, a bare loop, torch's checkpoints."""

from __future__ import annotations

import copy
import itertools
import json
import os
import pickle
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch.distributed.checkpoint as dcp
from pairwise import pairwise
from row_hashes import entry_of
from stops import at_few_stops
from support import all_rows_of, batches_of, open_loader, rows_of, write_dataset
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils.data import DataLoader
from torch.utils.data import _utils as torch_workers

from torch_dataloader_utils import (
    CheckpointMismatchError,
    IterationEndedError,
    ProgressUnknownError,
    StructuredDataset,
    WorkerError,
)
from torch_dataloader_utils.distributed import CheckpointEntry
from torch_dataloader_utils.loader import plain_loader
from torch_dataloader_utils.reading.arrow_threads import allocate_first

pytestmark = [
    pytest.mark.usefixtures("leaves_nothing_behind"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # more workers than CPUs
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata calls it
    pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning"),
]

FILES = ((37, 10), (5, 5), (29, 8), (40, 7))
ROWS = 111

IN_ORDER: dict[str, Any] = {}
SHARDS_SHUFFLED = {"shuffle": True}
ROWS_SHUFFLED = {"shuffle": True, "shuffle_buffer_size": 30}
SHUFFLES = [IN_ORDER, SHARDS_SHUFFLED, ROWS_SHUFFLED]

FORK = {"multiprocessing_context": "fork"}
SPAWN = {"multiprocessing_context": "spawn"}
SERVED = {"multiprocessing_context": "forkserver"}
KEPT = {"persistent_workers": True}


STARTS = [
    pytest.param(FORK, id="fork"),
    pytest.param({**FORK, **KEPT}, id="fork-kept"),
    pytest.param({**SERVED, **KEPT}, id="forkserver"),
    pytest.param({**SPAWN, **KEPT}, id="spawn", marks=pytest.mark.soak),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plain") / "data"
    assert write_dataset(directory, FILES) == ROWS
    return directory


def open_dataset(data: Path, **options: Any) -> StructuredDataset:
    """Open the dataset alone, in batches of 8."""
    return open_loader(data, batch_size=8, **options)[1]


def plain(dataset: Any, num_workers: int = 0, **options: Any) -> DataLoader[Any]:
    """Put a dataset into the loader that everybody knows."""
    return DataLoader(dataset, batch_size=None, num_workers=num_workers, **options)


def take(batches: Any, count: int) -> list[list[int]]:
    """Return the row ids of the next batches."""
    return [rows_of(batch) for batch in itertools.islice(batches, count)]


def whole_epoch(loader: Any, stop: int) -> tuple[list[list[int]], dict[str, Any]]:
    """Return the row ids of an epoch's batches, and the state after so many of them."""
    batches = iter(loader)
    first = take(batches, stop)
    state = loader.state_dict()
    return first + batches_of(batches), state


# torch's DataLoader: rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_workers", "options", "made_with"),
    [
        (0, {}, 0),
        (0, {}, 2),
        pytest.param(1, FORK, 0, marks=pytest.mark.soak),
        pytest.param(2, FORK, 2, marks=pytest.mark.soak),
        (3, FORK, 2),
        pytest.param(2, {**FORK, **KEPT}, 2, marks=pytest.mark.soak),
        (3, {**FORK, **KEPT}, 0),
        pytest.param(1, SPAWN, 0, marks=pytest.mark.soak),
        (2, {**SERVED, **KEPT}, 0),
        pytest.param(2, {**SPAWN, **KEPT}, 0, marks=pytest.mark.soak),
    ],
)
def test_a_plain_loader_delivers_each_row_of_every_epoch_once(data, num_workers, options, made_with):
    loader = plain(open_dataset(data, num_workers=made_with, **ROWS_SHUFFLED), num_workers, **options)
    for _ in range(2):
        assert sorted(all_rows_of(loader)) == list(range(ROWS))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("options", [{}, {"batch_size": 3}], ids=["torch's default", "3"])
def test_batches_of_batches_are_refused_unless_the_user_puts_them_together(data, num_workers, options):
    _, dataset = open_loader(data, num_workers=0)
    with pytest.raises(TypeError, match="pass batch_size=None to it"):
        next(iter(DataLoader(dataset, num_workers=num_workers, **options)))
    together = DataLoader(dataset, num_workers=num_workers, **options, collate_fn=list)
    assert sorted(row for batches in together for row in all_rows_of(batches)) == list(range(ROWS))


@pytest.mark.parametrize(
    "num_workers", [0, pytest.param(1, marks=pytest.mark.soak), 2, pytest.param(3, marks=pytest.mark.soak)]
)
def test_plain_loaders_of_two_ranks_deliver_each_row_once_together(data, num_workers):
    rows = []
    for rank in range(2):
        dataset = open_dataset(data, num_ranks=2, rank=rank, num_workers=num_workers, **ROWS_SHUFFLED)
        own = all_rows_of(plain(dataset, num_workers))
        assert own
        rows += own
    assert sorted(rows) == list(range(ROWS))


@pairwise(most=4, num_workers=[2, 0], shuffle=SHUFFLES)
def test_a_plain_loader_delivers_the_same_batches_as_the_own_one(data, shuffle, num_workers):
    own, _ = open_loader(data, batch_size=8, num_workers=num_workers, **shuffle)
    assert batches_of(plain(open_dataset(data, num_workers=num_workers, **shuffle), num_workers)) == batches_of(own)


def test_an_abandoned_plain_iteration_leaves_no_trace_in_the_next(data):
    loader = plain(open_dataset(data, **ROWS_SHUFFLED), 2, **FORK, **KEPT)
    take(iter(loader), 3)
    assert sorted(all_rows_of(loader)) == list(range(ROWS))


# torch's DataLoader: progress --------------------------------------------------------------------------------------


def known_again_by_set_epoch(dataset: StructuredDataset, state: dict[str, Any]) -> None:
    dataset.set_epoch(1)


def known_again_by_load_state_dict(dataset: StructuredDataset, state: dict[str, Any]) -> None:
    dataset.load_state_dict(state)


def known_again_by_own_iteration(dataset: StructuredDataset, state: dict[str, Any]) -> None:
    next(iter(dataset))


@pytest.mark.parametrize("options", STARTS)
def test_the_state_is_unknown_once_plain_workers_have_delivered_and_not_before(data, options):
    dataset = open_dataset(data, num_workers=2)
    loader = plain(dataset, 2, **options)
    state = dataset.state_dict()
    assert state["batches_delivered"] == 0
    batches = iter(loader)
    next(batches)
    with pytest.raises(ProgressUnknownError, match="plain DataLoader"):
        dataset.state_dict()
    assert len(list(batches)) > 1
    with pytest.raises(ProgressUnknownError, match="plain DataLoader"):
        dataset.state_dict()


@pytest.mark.parametrize(
    "become_known", [known_again_by_set_epoch, known_again_by_load_state_dict, known_again_by_own_iteration]
)
def test_the_state_is_known_again_after_a_new_beginning(data, become_known):
    dataset = open_dataset(data, num_workers=2)
    state = dataset.state_dict()
    take(plain(dataset, 2), 2)
    with pytest.raises(ProgressUnknownError):
        dataset.state_dict()
    become_known(dataset, state)
    now = dataset.state_dict()
    resumed = open_dataset(data, num_workers=2)
    resumed.load_state_dict(now)
    whole = open_dataset(data, num_workers=2)
    whole.set_epoch(now["epoch"])
    assert batches_of(resumed) == batches_of(whole)[now["batches_delivered"] :]


def test_the_own_loader_knows_its_state_after_a_plain_one_was_used(data):
    loader, dataset = open_loader(data, batch_size=8, num_workers=2)
    take(plain(dataset, 2), 2)
    whole = batches_of(loader)
    batches = iter(loader)
    assert take(batches, 4) == whole[:4]
    resumed, _ = open_loader(data, batch_size=8, num_workers=2)
    resumed.load_state_dict(loader.state_dict())
    assert batches_of(resumed) == whole[4:]


# In a single process ------------------------------------------------------------------------------------------------


def as_it_is(dataset: StructuredDataset) -> Any:
    return dataset


@at_few_stops
@pairwise(most=3, loop_over=[as_it_is, plain], num_workers=[0, 2], shuffle=SHUFFLES)
def test_in_a_single_process_the_state_resumes_at_every_batch(data, shuffle, num_workers, loop_over, stops):
    def fresh() -> StructuredDataset:
        return open_dataset(data, num_workers=num_workers, **shuffle)

    dataset = fresh()
    states, whole = [dataset.state_dict()], []
    for batch in loop_over(dataset):
        whole.append(rows_of(batch))
        states.append(json.loads(json.dumps(dataset.state_dict())))
    assert sorted(itertools.chain(*whole)) == list(range(ROWS))
    for stop in stops(states):
        dataset = fresh()
        dataset.load_state_dict(states[stop])
        assert batches_of(loop_over(dataset)) == whole[stop:]
        assert batches_of(loop_over(dataset)) == whole


def test_a_state_of_a_bare_loop_is_resumed_by_the_own_loader_and_the_other_way_round(data):
    options = {"num_workers": 2, **ROWS_SHUFFLED}
    loader, _ = open_loader(data, batch_size=8, **options)
    whole = batches_of(loader)
    dataset = open_dataset(data, **options)
    take(iter(dataset), 5)
    loader.load_state_dict(dataset.state_dict())
    assert take(iter(loader), 4) == whole[5:9]
    dataset.load_state_dict(loader.state_dict())
    assert batches_of(dataset) == whole[9:]


def test_a_second_iterator_ends_the_first_with_a_clear_error(data):
    dataset = open_dataset(data)
    first = iter(plain(dataset))
    next(first)
    second = iter(plain(dataset))
    next(second)
    with pytest.raises(IterationEndedError, match="iter"):
        next(first)
    assert dataset.state_dict()["batches_delivered"] == 1


# Epochs and loaded states reach plain workers ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def orders(data: Path) -> dict[int, list[list[int]]]:
    """What our loader delivers in some epochs with two workers."""
    loader, dataset = open_loader(data, batch_size=8, num_workers=2, **ROWS_SHUFFLED)
    delivered = {}
    for epoch in (0, 3, 1):
        dataset.set_epoch(epoch)
        delivered[epoch] = batches_of(loader)
    return delivered


@pytest.mark.parametrize(
    ("options", "made_with"),
    [
        pytest.param(FORK, 0, id="fork-0", marks=pytest.mark.soak),
        pytest.param(FORK, 2, id="fork-2"),
        pytest.param({**FORK, **KEPT}, 0, id="fork-kept-0"),
        pytest.param({**FORK, **KEPT}, 2, id="fork-kept-2", marks=pytest.mark.soak),
        pytest.param({**SERVED, **KEPT}, 0, id="forkserver-kept-0"),
        pytest.param({**SPAWN, **KEPT}, 0, id="spawn-kept-0", marks=pytest.mark.soak),
    ],
)
def test_set_epoch_reaches_plain_workers(data, orders, options, made_with):
    dataset = open_dataset(data, num_workers=made_with, **ROWS_SHUFFLED)
    loader = plain(dataset, 2, **options)
    for epoch in (0, 3, 1):
        dataset.set_epoch(epoch)
        assert batches_of(loader) == orders[epoch]
    assert orders[0] != orders[3] != orders[1]
    assert all(sorted(itertools.chain(*order)) == list(range(ROWS)) for order in orders.values())


@pytest.mark.parametrize("options", STARTS)
def test_a_state_loaded_before_a_plain_loader_starts_is_continued_once(data, options):
    own, saved_from = open_loader(data, batch_size=8, num_workers=2, **ROWS_SHUFFLED)
    saved_from.set_epoch(2)
    whole, state = whole_epoch(own, 6)
    dataset = open_dataset(data, num_workers=2, **ROWS_SHUFFLED)
    loader = plain(dataset, 2, **options)
    dataset.load_state_dict(state)
    dataset.set_epoch(2)
    assert batches_of(loader) == whole[6:]
    assert batches_of(loader) == whole
    assert batches_of(loader) == whole


@pytest.mark.parametrize("stop", [1, pytest.param(4, marks=pytest.mark.soak), 5])
def test_a_state_loaded_before_a_plain_loader_starts_is_continued_in_order_from_any_worker(data, stop):
    own, _ = open_loader(data, batch_size=8, num_workers=3)
    whole, state = whole_epoch(own, stop)
    dataset = open_dataset(data, num_workers=3)
    dataset.load_state_dict(state)
    rest = batches_of(plain(dataset, 3))
    assert sorted(itertools.chain(*rest)) == sorted(itertools.chain(*whole[stop:]))
    assert rest == whole[stop:]


def test_a_state_loaded_before_is_continued_by_the_first_iterator_alone_though_that_is_abandoned(data):
    own, _ = open_loader(data, batch_size=8, num_workers=2)
    whole, state = whole_epoch(own, 4)
    dataset = open_dataset(data, num_workers=2)
    dataset.load_state_dict(state)
    loader = plain(dataset, 2, **FORK)
    assert take(iter(loader), 2) == whole[4:6]
    assert batches_of(loader) == whole


def refusal_of(loader: Any) -> str:
    """Return what a plain loader's workers say when they refuse to deliver."""
    batches = iter(loader)
    with pytest.raises(ProgressUnknownError) as raised:
        next(batches)
    batches._shutdown_workers()  # at once, not when the traceback is collected: torch then waits for each
    return str(raised.value)


def test_a_state_of_another_number_of_workers_is_refused_by_plain_workers_with_both_numbers(data):
    own, _ = open_loader(data, batch_size=8, num_workers=2)
    take(iter(own), 3)
    dataset = open_dataset(data, num_workers=2)
    dataset.load_state_dict(own.state_dict())
    refusal = refusal_of(plain(dataset, 3))
    assert "num_workers=2" in refusal
    assert "has 3" in refusal


def test_a_state_loaded_after_persistent_plain_workers_started_is_refused_and_not_forgotten(data):
    own, _ = open_loader(data, batch_size=8, num_workers=2)
    whole, state = whole_epoch(own, 4)
    dataset = open_dataset(data, num_workers=2)
    loader = plain(dataset, 2, **FORK, **KEPT)
    assert batches_of(loader) == whole
    dataset.load_state_dict(state)
    assert "persistent workers" in refusal_of(loader)
    assert batches_of(plain(dataset, 2)) == whole[4:]


# Locks at a fork ----------------------------------------------------------------------------------------------------


def test_a_worker_forked_while_arrows_allocator_is_locked_is_an_error_that_says_what_to_do(data, monkeypatch):
    """The lock is taken for microseconds: hanging in `allocate_buffer` stands for it."""
    monkeypatch.setattr(plain_loader, "ALLOCATE_SEC", 0.2)
    own, allocate = os.getpid(), pa.allocate_buffer

    def in_fork(size: int, **options: Any) -> Any:
        if os.getpid() != own:
            time.sleep(3600)
        return allocate(size, **options)

    monkeypatch.setattr(pa, "allocate_buffer", in_fork)
    monkeypatch.setattr(torch_workers, "MP_STATUS_CHECK_INTERVAL", 0.1)  # so long torch waits for each that hangs
    loader = plain(open_dataset(data), 2, **FORK)
    batches = iter(loader)
    with pytest.raises(WorkerError, match="start workers with multiprocessing_context='forkserver'"):
        next(batches)
    batches._shutdown_workers()


def test_no_process_is_forked_while_a_reading_thread_allocates_for_the_first_time(monkeypatch):
    allocating, forked, allocate = threading.Event(), threading.Event(), pa.allocate_buffer
    seen = []

    def slowly(size: int) -> Any:
        allocating.set()
        seen.append(forked.wait(0.5))
        return allocate(size)

    monkeypatch.setattr(pa, "allocate_buffer", slowly)
    thread = threading.Thread(target=allocate_first)
    thread.start()
    assert allocating.wait(60)
    child = os.fork()
    if not child:
        os._exit(0)
    forked.set()
    os.waitpid(child, 0)
    thread.join()
    assert seen == [False]


# Copies -------------------------------------------------------------------------------------------------------------


def pickled(dataset: StructuredDataset) -> Any:
    return pickle.loads(pickle.dumps(dataset))


@pytest.mark.parametrize("copied", [pickled, copy.deepcopy, copy.copy])
def test_a_copy_delivers_the_same_and_makes_progress_of_its_own(data, copied):
    dataset = open_dataset(data, **ROWS_SHUFFLED)
    dataset.set_epoch(4)
    whole = batches_of(dataset)
    twin = copied(dataset)
    assert take(iter(twin), 5) == whole[:5]
    assert twin.state_dict()["batches_delivered"] == 5
    assert dataset.state_dict()["batches_delivered"] == len(whole)
    take(iter(dataset), 2)
    assert twin.state_dict()["batches_delivered"] == 5
    assert sorted(all_rows_of(plain(twin, 2))) == list(range(ROWS))
    with pytest.raises(ProgressUnknownError):
        twin.state_dict()
    assert dataset.state_dict()["batches_delivered"] == 2


@pytest.mark.parametrize("copied", [pickled, copy.deepcopy])
def test_a_copy_takes_a_loaded_state_along(data, copied):
    dataset = open_dataset(data, **ROWS_SHUFFLED)
    whole = batches_of(dataset)
    take(iter(dataset), 5)
    fresh = open_dataset(data, **ROWS_SHUFFLED)
    fresh.load_state_dict(dataset.state_dict())
    twin = copied(fresh)
    assert batches_of(twin) == whole[5:]
    assert batches_of(fresh) == whole[5:]


# torchdata's StatefulDataLoader -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stateful() -> Callable[..., Any]:
    """Make torchdata's loader."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of its own end
        module = pytest.importorskip("torchdata.stateful_dataloader")
    return lambda dataset, num_workers: module.StatefulDataLoader(dataset, batch_size=None, num_workers=num_workers)


@pytest.mark.parametrize("shuffle", [IN_ORDER, ROWS_SHUFFLED], ids=["in-order", "rows-shuffled"])
def test_torchdatas_loader_resumes_at_every_batch_in_process(data, stateful, shuffle):
    _check_torchdata(lambda: stateful(open_dataset(data, **shuffle), 0), every=1)


@pytest.mark.parametrize(
    ("made_with", "every"), [(2, 5), pytest.param(2, 1, marks=pytest.mark.soak), (0, 8), (None, 8)]
)
def test_torchdatas_loader_resumes_at_every_batch_with_workers(data, stateful, made_with, every):
    _check_torchdata(lambda: stateful(open_dataset(data, num_workers=made_with, **ROWS_SHUFFLED), 2), every=every)


def _check_torchdata(fresh: Callable[[], Any], every: int) -> None:
    loader = fresh()
    states, whole = [loader.state_dict()], []
    for batch in loader:
        whole.append(rows_of(batch))
        states.append(loader.state_dict())
    assert sorted(itertools.chain(*whole)) == list(range(ROWS))
    for stop in sorted({*range(0, len(states), every), len(states) - 1}):
        resumed = fresh()
        resumed.load_state_dict(states[stop])
        assert batches_of(resumed) == whole[stop:]


def test_torchdatas_workers_refuse_a_state_that_excludes_rows_unless_the_dataset_excludes_them_too(data, stateful):
    """Only the workers would know: the next epoch, of new workers, would deliver the rows."""
    excluded, dataset = range(5, 35), open_dataset(data, **ROWS_SHUFFLED)
    dataset.exclude({"part-000.parquet": excluded})
    loader = stateful(dataset, 2)
    begun = [rows_of(batch) for batch in itertools.islice(loader, 4)]
    state = loader.state_dict()
    dataset = open_dataset(data, **ROWS_SHUFFLED)
    loader = stateful(dataset, 2)
    loader.load_state_dict(state)
    with pytest.raises(CheckpointMismatchError, match="excludes 30 rows that this dataset does not exclude"):
        batches_of(loader)
    dataset = open_dataset(data, **ROWS_SHUFFLED)
    dataset.exclude({"part-000.parquet": excluded})
    loader = stateful(dataset, 2)
    loader.load_state_dict(state)
    assert sorted(itertools.chain(*begun, *batches_of(loader))) == sorted(set(range(ROWS)).difference(excluded))
    dataset.set_epoch(1)
    assert sorted(itertools.chain(*batches_of(loader))) == sorted(set(range(ROWS)).difference(excluded))


def test_states_of_torchdatas_workers_have_the_hash_of_each_workers_rows_and_it_goes_on(data, stateful):
    def fresh() -> Any:
        return stateful(open_dataset(data, fingerprint=True, **ROWS_SHUFFLED), 2)

    def states_of(loader: Any) -> list[dict[str, Any]]:
        workers = loader.state_dict()["_snapshot"]["_worker_snapshots"]
        return [workers[f"worker_{number}"]["dataset_state"] for number in range(2)]

    loader = fresh()
    batches = batches_of(loader)
    rows = [itertools.chain(*batches[number::2]) for number in range(2)]
    expected = [[entry_of(state["files"], own)] for state, own in zip(states_of(loader), rows, strict=True)]
    assert [state["delivered_hash"] for state in states_of(loader)] == expected
    broken_off, resumed = fresh(), fresh()
    take(iter(broken_off), 7)
    resumed.load_state_dict(broken_off.state_dict())
    assert batches_of(resumed) == batches[7:]
    assert [state["delivered_hash"] for state in states_of(resumed)] == expected


# torch.distributed.checkpoint -----------------------------------------------------------------------------------------


@pairwise(most=4, num_workers=[2, 0], stop=[7, 0, 1])
@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")  # that there is one process
def test_a_distributed_checkpoint_of_one_process_resumes_exactly(data, tmp_path, num_workers, stop):
    options = {"batch_size": 8, "num_workers": num_workers, **ROWS_SHUFFLED}
    loader, dataset = open_loader(data, **options)
    dataset.set_epoch(2)
    whole = batches_of(loader)
    batches = iter(loader)
    assert take(batches, stop) == whole[:stop]
    dcp.save({"loader": CheckpointEntry(loader)}, checkpoint_id=tmp_path / "checkpoint")
    assert batches_of(batches) == whole[stop:], "saving must not disturb the iteration"

    fresh, _ = open_loader(data, **options)
    dcp.load({"loader": CheckpointEntry(fresh)}, checkpoint_id=tmp_path / "checkpoint")
    assert fresh.state_dict()["epoch"] == 2
    assert batches_of(fresh) == whole[stop:]

    dcp.load({"loader": CheckpointEntry(loader)}, checkpoint_id=tmp_path / "checkpoint")
    assert batches_of(loader) == whole[stop:]
    assert batches_of(loader) == whole


class Wrapped:
    """An object with the states of everything, as torch's tutorial on distributed checkpoints makes one."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self.loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state["loader"])


RAW = {
    "the loader": lambda loader, _: loader,
    "the dataset": lambda _, dataset: dataset,
    "its state": lambda loader, _: loader.state_dict(),
    "an object that returns its state": lambda loader, _: Wrapped(loader),
}


@pytest.mark.parametrize("what", RAW)
@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")  # that there is one process
def test_a_distributed_checkpoint_refuses_what_it_could_not_load_and_names_what_to_use(data, tmp_path, what):
    loader, dataset = open_loader(data, batch_size=8)
    take(iter(loader), 3)
    with pytest.raises(CheckpointException, match=r"refused_by_dcp\.use distributed\.CheckpointEntry"):
        dcp.save({"model": RAW[what](loader, dataset)}, checkpoint_id=tmp_path / "checkpoint")
    with pytest.raises(CheckpointException, match=r"refused_by_dcp"):
        dcp.async_save({"model": RAW[what](loader, dataset)}, checkpoint_id=tmp_path / "other").result()
    assert not (tmp_path / "checkpoint" / ".metadata").exists()
