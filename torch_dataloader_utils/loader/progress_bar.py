"""A bar on the terminal for an epoch's progress, and the two numbers that any such bar needs."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, TypedDict


class PassProgress(TypedDict):
    """What a bar over the batches of a pass needs, under the names that tqdm has for it.

    Attributes:
        initial: Batches of the epoch that were delivered before.
        total: Batches of the epoch, with those; None if only reading tells.
    """

    initial: int
    total: int | None


def require_tqdm() -> Any:
    """Return tqdm's bar class, or raise an ImportError that says what to install."""
    try:
        return import_module("tqdm").tqdm
    except ImportError as error:
        raise ImportError("show_progress=True needs tqdm: pip install tqdm") from error


class ProgressBar:
    """The bar of one iteration, on standard error. It writes nothing where that is no terminal.

    It is drawn again at most once in `interval` seconds.
    """

    def __init__(self, epoch: int, progress: PassProgress, interval: float) -> None:
        is_closed = sys.stderr is None or getattr(sys.stderr, "closed", False)
        self._bar = require_tqdm()(
            **progress,
            desc=f"epoch {epoch}",
            unit="batch",
            mininterval=interval,
            dynamic_ncols=True,
            disable=is_closed or None,  # None: without a terminal
        )

    def update(self) -> None:
        """Count a batch."""
        self._bar.update()

    def finish(self) -> None:
        """Close the bar at the end of the epoch: now its length is known in any case."""
        self._bar.total = self._bar.n
        self._bar.close()

    def close(self) -> None:
        """Close the bar as it stands, if it is open."""
        self._bar.close()
