"""Pauses of the garbage collector: nested ones, failing functions, forks, and collectors that others have stopped."""

from __future__ import annotations

import gc
import os
import sys

import pytest

from torch_dataloader_utils.gc_pause import without_gc


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
