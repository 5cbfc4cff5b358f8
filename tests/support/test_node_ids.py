"""Every process collects the same tests, or pytest-xdist refuses to run them; their ids are plain words."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import COLLECTED
from jobs.processes import inherited
from plain_ids import plain_id

TESTS = Path(__file__).parents[1]
COLLECT = TESTS / "support" / "jobs" / "collect.py"
HOURS = 1000
"""By which the clock of the other process is ahead."""

TIME_DEPENDENT = """
import time
import pytest

@pytest.mark.parametrize("seconds", [int(time.time())])
def test_an_id_that_holds_the_time(seconds):
    pass
"""


@pytest.fixture(scope="module")
def collected_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a process collects that has nothing in common with this one but the files, and a test beside them."""
    directory = tmp_path_factory.mktemp("ids")
    beside, out, scratch = directory / "test_time.py", directory / "ids.json", directory / "scratch"
    beside.write_text(TIME_DEPENDENT)
    scratch.mkdir()
    surroundings = {"PYTHONHASHSEED": "1", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    run = subprocess.run(
        [sys.executable, str(COLLECT), str(HOURS), str(out), str(TESTS), str(beside)],
        cwd=TESTS.parent,
        env=inherited(**surroundings, TZ="Asia/Tokyo", TMPDIR=str(scratch)),
        capture_output=True,
        check=False,
    )
    assert run.returncode == 0, (run.stdout + run.stderr).decode(errors="replace")
    nodes: list[str] = json.loads(out.read_text())
    return nodes


def test_processes_of_other_clocks_hash_seeds_and_locales_collect_the_same_tests_with_ids_in_plain_words(
    collected_elsewhere, request
):
    other = [node for node in collected_elsewhere if "holds_the_time[" not in node]
    assert len(other) > 1000
    own = request.config.stash[COLLECTED]
    if request.config.option.file_or_dir:  # some tests alone were asked for, and in that order
        chosen = set(other)
        other = [node for node in own if node in chosen]
    assert own == other
    assert [node for node in other if re.search(r"0x[0-9a-f]{6}|<(class|function|lambda)| at 0x|[\\{}`]", node)] == []
    assert [node for node in other if not node.isprintable() or str(Path.cwd()) in node] == []


def test_that_comparison_finds_an_id_that_holds_the_time(collected_elsewhere):
    [node] = [node for node in collected_elsewhere if "holds_the_time[" in node]
    assert float(node.rpartition("[")[2].removesuffix("]")) > time.time() + (HOURS - 1) * 3600


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("two words", "two words"),
        ({"batch_size": 0, "options": object()}, "batch_size=0, options"),
        ([1, None, "x"], "1, None, x"),
        ([], "none"),
        (ValueError, "ValueError"),
        ("<b>\n", "b"),
        (object(), None),
        ([object()], None),
    ],
    ids=["text", "options", "list", "nothing", "type", "odd text", "object", "list of an object"],
)
def test_values_have_ids_in_plain_words(value, words):
    assert plain_id(value, "value") == words


@pytest.mark.parametrize("value", [b"bytes", lambda: None], ids=["bytes", "lambda"])
def test_a_value_without_plain_words_needs_an_id_written_by_hand(value):
    with pytest.raises(ValueError, match=r"value=.* has no id in plain words"):
        plain_id(value, "value")
