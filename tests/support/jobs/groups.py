"""Leaving a process group, and ending, at the end of a job."""

from __future__ import annotations

import os
import sys
import time
from typing import NoReturn

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


def end_process() -> NoReturn:
    """End this process without freeing its model.

    A DistributedDataParallel that is freed waits for gloo's threads and holds Python's lock, for which such a thread
    may wait in turn if it has just ended a collective (seen with torch 2.13). Worker processes have to be ended before.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
