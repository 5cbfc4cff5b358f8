"""A filter is the same in every process, whatever the order of its sets there: states record its digest."""

from __future__ import annotations

import os
import subprocess
import sys


def test_a_set_of_strings_is_the_same_filter_in_every_process():
    code = (
        "from torch_dataloader_utils.dataset.options import parse_filters\n"
        "print(parse_filters([('x', 'in', {'a', 'b', 'c', 'd', 'e'}), ('y', 'not in', {'z', 1, None})]))"
    )
    shown = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(shown) == 1
