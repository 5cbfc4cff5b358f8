"""Processes that tests start import what the tests do: the same interpreter, the same modules, from the same places."""

from __future__ import annotations

import subprocess
import sys

import support
from jobs.processes import inherited

import torch_dataloader_utils

SHOW = "import only_here, support, torch_dataloader_utils as package; print(package.__file__, support.__file__)"


def test_a_process_imports_from_where_this_one_does_even_what_was_added_since_it_started(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    said = subprocess.check_output([sys.executable, "-c", SHOW], env=inherited(), cwd="/", text=True)
    assert said.split() == [torch_dataloader_utils.__file__, support.__file__]
