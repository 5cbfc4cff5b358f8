"""Damaged files: what pyarrow's own reader gives, or an error that names the file; no process that ends by them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from faults.damage import FILES, checked_parquet_files
from jobs.forked import start
from jobs.ranks import JOBS

FAULT = "damaged files"
SHORT = 15
LONG = 1000
SHORT_SEC = 240

GOOD = {"exact", "no row", "refused", "refused alone", "both died"}
GOOD |= {"metadata that pyarrow dies of", "undefined in pyarrow"}
"""What may come of a damaged file: pyarrow's rows; an error that names it, even if pyarrow accepts it; what pyarrow
itself dies of; or rows where pyarrow's reader of ORC returns memory that it never wrote, other values each time.

Of some damaged size statistics pyarrow dies when it is asked for a column chunk's metadata, though its reader raises.
"""


def verdicts_of(directory: Path, sound: Iterable[bytes], ending: str, *, part: str, count: int, seconds: float) -> Any:
    """Damage the files in so many ways, and return what came of each."""
    data = directory / "data"
    data.mkdir()
    for number, content in enumerate(sound):
        (data / f"sound-{number}.{ending}").write_bytes(content)
    output = directory / "output.txt"
    arguments = (str(data), ending, part, "0", str(count), str(seconds))
    process = start(JOBS / "damaged_job.py", *arguments, output=output, environment={})
    process.join(seconds + SHORT_SEC)
    process.kill()
    process.join()
    printed = output.read_text(encoding="utf-8")
    assert process.exitcode == 0, printed[-2000:]
    return [json.loads(line) for line in printed.splitlines()]


def require_good(outcome: Any, verdicts: list[dict[str, Any]]) -> None:
    """Note what came of the files, and raise if anything did that should not."""
    counts = Counter(verdict["verdict"] for verdict in verdicts)
    outcome.faults = len(verdicts)
    outcome.case += f": {', '.join(f'{count} {what}' for what, count in sorted(counts.items()))}"
    outcome.corrupted = counts["other rows"] + counts["accepted alone"]
    wrong = [verdict for verdict in verdicts if verdict["verdict"] not in GOOD]
    assert not wrong, f"{outcome.case}; the first: {wrong[0]}"


def seconds_of(config: pytest.Config) -> float:
    """Return the time that a long test may take."""
    return 60 * float(config.getoption("--minutes"))


@pytest.mark.parametrize("ending", FILES)
def test_a_damaged_file_gives_what_pyarrow_gives_or_an_error_that_names_it(tmp_path, record, ending):
    with record(FAULT, f"{SHORT} of {ending}") as outcome:
        require_good(
            outcome, verdicts_of(tmp_path, FILES[ending](), ending, part="whole", count=SHORT, seconds=SHORT_SEC)
        )
        assert outcome.faults == SHORT


def test_damaged_pages_that_have_checksums_give_no_wrong_row(tmp_path, record):
    with record(FAULT, f"{SHORT} of Parquet, in pages with checksums") as outcome:
        verdicts = verdicts_of(
            tmp_path, checked_parquet_files(), "parquet", part="pages", count=SHORT, seconds=SHORT_SEC
        )
        require_good(outcome, verdicts)
        outcome.corrupted += sum(not verdict["is_sound"] for verdict in verdicts)
        assert outcome.faults == SHORT


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("ending", FILES)
def test_a_thousand_damaged_files_give_what_pyarrow_gives_or_errors_that_name_them(
    tmp_path, record, pytestconfig, ending
):
    with record(FAULT, f"of {ending}") as outcome:
        require_good(
            outcome,
            verdicts_of(tmp_path, FILES[ending](), ending, part="whole", count=LONG, seconds=seconds_of(pytestconfig)),
        )


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_a_thousand_damages_to_pages_that_have_checksums_give_no_wrong_row(tmp_path, record, pytestconfig):
    with record(FAULT, "of Parquet, in pages with checksums") as outcome:
        verdicts = verdicts_of(
            tmp_path, checked_parquet_files(), "parquet", part="pages", count=LONG, seconds=seconds_of(pytestconfig)
        )
        require_good(outcome, verdicts)
        outcome.corrupted += sum(not verdict["is_sound"] for verdict in verdicts)
