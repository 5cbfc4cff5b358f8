"""Plans and filters are the same under another hash seed: ranks compare them, and states hold their digests."""

from __future__ import annotations

import os
import subprocess
import sys

from jobs import digests
from jobs.processes import inherited


def test_a_process_with_another_hash_seed_makes_the_same_plans_orders_and_filters():
    other = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    printed = subprocess.check_output(
        [sys.executable, str(digests.__file__)], env=inherited(PYTHONHASHSEED=other), text=True
    )
    assert printed.splitlines() == digests.lines()
    assert len(set(digests.lines())) == len(digests.OPTIONS) * 2 + 2
