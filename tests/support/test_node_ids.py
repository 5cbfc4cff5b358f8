"""Every process collects the same tests, or pytest-xdist refuses to run them; their ids are plain words."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs.processes import inherited
from plain_ids import plain_id

TESTS = Path(__file__).parents[1]
COLLECT = TESTS / "support" / "jobs" / "collect.py"

TIME_DEPENDENT = """
import time
import pytest

@pytest.mark.parametrize("seconds", [int(time.time())])
def test_an_id_that_holds_the_time(seconds):
    pass
"""


@pytest.fixture(scope="module")
def collected_twice(tmp_path_factory: pytest.TempPathFactory) -> list[dict[bool, list[str]]]:
    """What two processes collect that have nothing in common but the files: of the suite, and of a test beside it."""
    directory = tmp_path_factory.mktemp("ids")
    beside = directory / "test_time.py"
    beside.write_text(TIME_DEPENDENT)
    surroundings = [
        {"PYTHONHASHSEED": "1", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "TZ": "UTC"},
        {"PYTHONHASHSEED": "2", "LC_ALL": "C.UTF-8", "TZ": "Asia/Tokyo"},
    ]
    runs = []
    for number, environment in enumerate(surroundings):
        out, scratch = directory / f"ids-{number}.json", directory / f"scratch-{number}"
        scratch.mkdir()
        command = [sys.executable, str(COLLECT), str(1000 * number), str(out), str(TESTS), str(beside)]
        run = subprocess.Popen(
            command,
            cwd=TESTS.parent,
            env=inherited(**environment, TMPDIR=str(scratch)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        runs.append((run, out))
    said = [run.communicate()[0].decode(errors="replace") for run, _ in runs]
    assert [run.returncode for run, _ in runs] == [0, 0], "\n".join(said)
    collected = [json.loads(out.read_text()) for _, out in runs]
    return [
        {
            of_suite: [node for node in nodes if ("holds_the_time[" not in node) == of_suite]
            for of_suite in (True, False)
        }
        for nodes in collected
    ]


def test_processes_of_other_clocks_hash_seeds_and_locales_collect_the_same_tests_with_ids_in_plain_words(
    collected_twice,
):
    one, other = (nodes[True] for nodes in collected_twice)
    assert len(one) > 1000
    assert one == other
    assert [node for node in one if re.search(r"0x[0-9a-f]{6}|<(class|function|lambda)| at 0x|[\\{}`]", node)] == []
    assert [node for node in one if not node.isprintable() or str(Path.cwd()) in node] == []


def test_that_comparison_finds_an_id_that_holds_the_time(collected_twice):
    one, other = (nodes[False] for nodes in collected_twice)
    assert len(one) == len(other) == 1
    assert one != other


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
