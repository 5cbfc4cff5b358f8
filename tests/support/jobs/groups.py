"""Leaving a process group at the end of a job."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

KNOWN_TO_LEAVE = (2, 13)
RELEASE_SEC = 0.3


def leave_group() -> None:
    """Destroy the process group.

    In old releases of torch (2.4 and 2.6 were seen) that waits for gloo's threads and holds Python's lock, for which
    such a thread may wait in turn if it has just ended a collective. So they get the time to let go of it.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) < KNOWN_TO_LEAVE:
        time.sleep(RELEASE_SEC)
    dist.destroy_process_group()
