"""Collect tests and write their ids as a JSON list: ``collect.py HOURS OUT TESTS...``, with a clock HOURS ahead."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

HOURS, OUT, *TESTS = sys.argv[1:]


class Ids:
    """Writes down what was collected."""

    def pytest_collection_finish(self, session):
        Path(OUT).write_text(json.dumps([item.nodeid for item in session.items]))


def main() -> int:
    """Shift the clock before anything else is imported, and collect."""
    now, now_ns, ahead = time.time, time.time_ns, int(HOURS) * 3600
    time.time = lambda: now() + ahead
    time.time_ns = lambda: now_ns() + ahead * 10**9
    import pytest  # noqa: PLC0415 - it may look at the clock, too

    return int(pytest.main(["--collect-only", "-q", "-m", "", "-p", "no:cacheprovider", *TESTS], plugins=[Ids()]))


if __name__ == "__main__":
    sys.exit(main())
