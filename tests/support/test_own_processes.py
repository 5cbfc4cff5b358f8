"""Processes that tests start import what the tests do: the same interpreter, the same modules, from the same places."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from typing import Any

import support
from jobs.processes import collect_garbage, inherited

import torch_dataloader_utils

SHOW = """
import only_here
from importlib.util import find_spec  # to import the modules themselves, and torch, takes seconds
print(find_spec("torch_dataloader_utils").origin, find_spec("support").origin)
"""


def test_a_process_imports_from_where_this_one_does_even_what_was_added_since_it_started(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    said = subprocess.check_output([sys.executable, "-c", SHOW], env=inherited(), cwd="/", text=True)
    assert said.split() == [torch_dataloader_utils.__file__, support.__file__]


def test_garbage_is_collected_although_another_thread_is_at_a_collection():
    begun, end = threading.Event(), threading.Event()
    other = threading.Thread(target=gc.collect)

    def stay(phase: str, _: Any) -> None:
        if threading.current_thread() is other and phase == "start":
            begun.set()
            end.wait()

    gc.callbacks.append(stay)
    other.start()
    begun.wait()
    ring: list[Any] = [threading.Event()]
    ring.append(ring)
    gone = weakref.ref(ring[0])
    del ring
    assert gc.collect() == 0
    assert gone() is not None
    threading.Timer(0.1, end.set).start()
    collect_garbage()
    assert gone() is None
    gc.callbacks.remove(stay)
    other.join()
