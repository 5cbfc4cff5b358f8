"""The frameworks take seconds to import: the fork server does it once for all of their tests' processes."""

from __future__ import annotations

import pytest
from jobs.forked import preload_in_fork_server


@pytest.fixture(scope="session", autouse=True)
def preloaded_frameworks() -> None:
    """Let forked processes find the frameworks imported. Those that are not installed stay away."""
    preload_in_fork_server("accelerate", "lightning", "transformers.trainer")
