"""Claims about parameters in messages: a command names its own options in their place."""

from __future__ import annotations

import pytest

from torch_dataloader_utils.cli.option_names import OPTIONS, in_options
from torch_dataloader_utils.cli.parser import COMMANDS, options_of

ALL = frozenset(OPTIONS.values())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("its name ends in '.csv': pass format=\"csv\"", "its name ends in '.csv': pass --format csv"),
        ("(count_rows=True counts them, once)", "(--count-rows counts them, once)"),
        ("uneven_ranks='drop' has to know", "--uneven drop has to know"),
        (
            "virtual_ranks=3 and virtual_workers=None: give both",
            "--virtual-ranks 3 and no --virtual-workers: give both",
        ),
        ("the run log has them (run_log=...)", "the run log has them (--run-log)"),
        ("or storage_options={'key': ..., 'secret': ...}; x", "or --storage-option; x"),
        ("buffer: shuffle_buffer_size=5, split_bytes=10", "buffer: --buffer 5, --split-bytes 10"),
    ],
    ids=["text", "true", "in quotes", "none", "any", "a dictionary", "numbers"],
)
def test_a_message_names_options_in_place_of_parameters(text, expected):
    assert in_options(text, ALL) == expected


def test_a_command_names_no_option_that_it_does_not_have():
    assert in_options("pass count_rows=True or format='csv'", {"--format"}) == "pass count_rows=True or --format csv"


@pytest.mark.parametrize(
    "path",
    ["/data/format=csv/a.parquet", "format=csv/a.parquet", "a/shuffle=1.parquet", r"C:\format=csv\a", "'format=1'"],
    ids=["within", "first", "a file", "of Windows", "in quotes"],
)
def test_directories_of_partitions_stay_as_they_are(path):
    assert in_options(f"cannot read {path}", ALL) == f"cannot read {path}"


def test_each_option_is_one_of_a_command():
    assert frozenset().union(*map(options_of, COMMANDS)) >= ALL
