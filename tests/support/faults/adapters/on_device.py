"""This library, with batches that are copied to a device four ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from faults.adapters import ours
from faults.outcome import Row
from faults.trainer import Job

from torch_dataloader_utils import to_device


def open(job: Job, saved: list[Any] | None) -> tuple[Iterator[list[Row]], Callable[[], Any]]:  # noqa: A001
    """Open the loader."""
    return ours.open(job, saved, partial(to_device, device="cpu", depth=4))
