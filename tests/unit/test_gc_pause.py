"""Pauses of the garbage collector: nested ones, failing functions, forks, and collectors that others have stopped."""

from __future__ import annotations

import gc
import importlib
import os
import sys

import pytest
from support import open_loader, write_dataset

import torch_dataloader_utils as package
from torch_dataloader_utils.gc_pause import MANY_OBJECTS, count_new_as_old, hidden_from_forks, without_gc


@without_gc
def is_collecting() -> bool:
    return gc.isenabled()


@without_gc
def calls_within() -> tuple[bool, bool]:
    return is_collecting(), gc.isenabled()


def test_the_collector_rests_within_and_goes_on_after_the_outermost_call():
    assert calls_within() == (False, False)
    assert gc.isenabled()


def test_the_collector_goes_on_after_an_error():
    @without_gc
    def fails() -> None:
        raise KeyError("as asked")

    with pytest.raises(KeyError):
        fails()
    assert gc.isenabled()


def test_a_collector_that_the_user_has_stopped_stays_stopped():
    gc.disable()
    try:
        is_collecting()
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
def test_a_process_that_is_forked_within_collects():
    @without_gc
    def forks() -> int:
        child = os.fork()
        if child == 0:
            os._exit(17 if gc.isenabled() else 18)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert forks() == 17
    assert gc.isenabled()


def test_the_collector_rests_while_names_are_imported(monkeypatch):
    monkeypatch.setattr(package, "StructuredDataset", None)  # what is imported again is taken back with it
    monkeypatch.delattr(package, "StructuredDataset")
    done = []

    def noted(name: str) -> object:
        done.append((name, gc.isenabled()))
        return importlib.import_module(name)

    monkeypatch.setattr(package, "import_module", noted)
    monkeypatch.setattr(package, "count_new_as_old", lambda: done.append(("as old", gc.isenabled())))
    assert package.StructuredDataset.__name__ == "StructuredDataset"
    assert done == [("torch_dataloader_utils.dataset.structured", False), ("as old", False)]
    assert gc.isenabled()


@pytest.fixture
def thawed():
    """Let the collector look at everything, also at what was there before the tests began."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    gc.unfreeze()
    if frozen:
        gc.freeze()


@pytest.fixture
def collecting_when_asked():
    """Let no collection begin by itself, as one would in another thread or as soon as the collector goes on."""
    gc.disable()
    yield
    gc.enable()


@without_gc
def made(count: int) -> list[list[int]]:
    made_now: list[list[int]] = [[] for _ in range(count)]
    count_new_as_old()
    return made_now


def are_old(objects: list[list[int]]) -> bool:
    return any(found is objects[-1] for found in gc.get_objects(generation=2))


@pytest.mark.usefixtures("thawed")
def test_many_new_objects_count_as_old():
    gc.collect(1)  # what is young counts as old then; to look at all the rest takes a second
    assert are_old(made(2 * MANY_OBJECTS))
    assert gc.isenabled()


@pytest.mark.usefixtures("thawed", "collecting_when_asked")
def test_few_new_objects_do_not_nor_do_many_where_the_program_has_frozen_some():
    gc.collect(1)  # what is young counts as old then; to look at all the rest takes a second
    assert not are_old(made(MANY_OBJECTS // 2))
    there = [[]]
    gc.freeze()
    assert not are_old(made(2 * MANY_OBJECTS))
    assert not looks_at(there)


def looks_at(there: object) -> bool:
    return any(found is there for found in gc.get_objects())


def forked_looks_at(there: object) -> bool:
    """Return whether the collector of a process that is forked now looks at an object."""
    child = os.fork()
    if child == 0:
        os._exit(17 if looks_at(there) else 18)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (17, 18)
    return status == 17


@pytest.mark.usefixtures("thawed")
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
def test_a_process_that_is_forked_while_objects_are_hidden_does_not_look_at_them():
    there = [[]]
    assert forked_looks_at(there)
    with hidden_from_forks():
        with pytest.raises(KeyError), hidden_from_forks():
            raise KeyError("as asked")
        assert not forked_looks_at(there)
    assert forked_looks_at(there)


@pytest.mark.usefixtures("thawed")
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
def test_in_this_process_hidden_objects_are_as_young_as_they_were():
    gc.collect(1)  # what is young counts as old then; to look at all the rest takes a second
    gc.disable()
    try:
        young = [[]]
        with hidden_from_forks():
            assert not forked_looks_at(young)
        assert any(found is young for found in gc.get_objects(generation=0))
    finally:
        gc.enable()


def count_objects(batch):
    return {**batch, "objects": len(gc.get_objects())}


@pytest.mark.usefixtures("thawed")
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
def test_workers_do_not_look_at_what_was_there_before_they_were_forked(tmp_path):
    write_dataset(tmp_path, [(20, 10)])
    loader, _ = open_loader(
        tmp_path, batch_size=10, num_workers=1, collate_fn=count_objects, multiprocessing_context="fork"
    )
    before = len(gc.get_objects())
    batches = list(loader)
    assert len(batches) == 2
    assert all(batch["objects"] < before // 2 for batch in batches)
    assert len(gc.get_objects()) >= before // 2
