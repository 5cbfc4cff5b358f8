"""The reliability tests: their options, and the record that `make reliability` publishes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeAlias

import pytest
from faults.outcome import Outcome, recorded

Record: TypeAlias = Callable[[str, str], contextlib.AbstractContextManager[Outcome]]


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Record:
    """Return what records a case: no row is lost, repeated or corrupted, and nothing is left behind.

    It is called with the fault, which is a row of the published table, and with the case.
    """
    published: str | None = request.config.getoption("--outcomes")
    return partial(recorded, published=None if published is None else Path(published))


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> Callable[[int], Iterator[int]]:
    """Return what counts a long test's cases: up to so many, or until the minutes of `--minutes` have passed."""
    seconds = 60 * float(request.config.getoption("--minutes"))

    def count(most: int) -> Iterator[int]:
        end = time.monotonic() + seconds
        for seed in range(most):
            if time.monotonic() > end:
                return
            yield seed

    return count
