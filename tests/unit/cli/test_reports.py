"""Reports as plain text and as JSON."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass

import numpy as np
import pytest
from rich.console import Console

from torch_dataloader_utils.cli.plain_text import lines_of
from torch_dataloader_utils.cli.report import Cell, Facts, Line, Table, plain, plural, size
from torch_dataloader_utils.cli.styled import print_blocks


@dataclass(frozen=True)
class Found:
    name: str
    rows: np.ndarray


def test_columns_of_plain_text_stand_below_one_another():
    table = Table(["file", "rows"], [["a", "1"], [Cell("long", "bad"), "1,000"]], "Files", frozenset({"file"}))
    assert list(lines_of([Facts([("epoch", "0")], "data"), table, Line("Fine.")])) == [
        "data",
        "  epoch  0",
        "",
        "Files",
        "  file   rows",
        "  a         1",
        "  long  1,000",
        "",
        "Fine.",
    ]


def test_names_cannot_control_a_terminal():
    [line] = lines_of([Facts([("file", "a\x1b[31m\nb")])])
    assert line == "  file  a\\x1b[31m\\nb"


def test_values_become_json():
    assert plain(Found("a", np.array([1, 2]))) == {"name": "a", "rows": [1, 2]}
    assert plain({1: (None, True, np.float32(0.5), {"x"})}) == {"1": [None, True, 0.5, ["x"]]}


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**45, "32.0 TiB")],
    ids=["none", "bytes", "a half", "many"],
)
def test_sizes_have_units(number, text):
    assert size(number) == text


def test_nouns_follow_their_numbers():
    assert (plural(1, "file"), plural(2_000, "file")) == ("1 file", "2,000 files")


@pytest.mark.parametrize("columns", [20, 60, 80, 200])
def test_no_number_is_cut_off_however_narrow_the_terminal_is(columns):
    numbers = [f"{10**power + index:,}" for power in range(4, 10) for index in range(2)]
    names = ["a_long_directory/of_many/part-00000.parquet", "b"]
    rows = [[name, *numbers[index::2]] for index, name in enumerate(names)]
    table = Table(["file", *"abcdef"], rows, "Files", frozenset({"file"}), note="2 files")
    out = io.StringIO()
    print_blocks([table], Console(file=out, width=columns, color_system=None))
    printed = out.getvalue()
    assert sorted(re.findall(r"[\d,]+,\d{3}\b", printed)) == sorted(numbers)
    assert all(text in printed for text in ("Files", "2 files"))
    assert ("╭" in printed) == (columns == 200)
