"""Options of the command line, as Python has them."""

from __future__ import annotations

import argparse

import pytest

from torch_dataloader_utils.cli import options, setting_options
from torch_dataloader_utils.cli.options import names, not_negative, positive, storage_option, storage_options
from torch_dataloader_utils.columns import convert
from torch_dataloader_utils.formats import registry


def parsed(texts):
    return storage_options(argparse.Namespace(storage_option=[storage_option(text) for text in texts] or None))


def test_storage_options_are_text_or_json_and_reach_into_dictionaries():
    given = ("key=AKIA=x", "client_kwargs.endpoint_url=http://127.0.0.1:1", "client_kwargs.verify=false", "retries=3")
    assert parsed(given) == {
        "key": "AKIA=x",
        "client_kwargs": {"endpoint_url": "http://127.0.0.1:1", "verify": False},
        "retries": 3,
    }
    assert parsed(()) is None


@pytest.mark.parametrize("given", [("a=1", "a=2"), ("a=1", "a.b=2"), ("a.b=1", "a=2")], ids=["twice", "in", "over"])
def test_storage_options_that_contradict_each_other_are_refused(given):
    with pytest.raises(ValueError, match="--storage-option a"):
        parsed(given)


def test_a_storage_option_without_a_name_is_refused_without_showing_it():
    with pytest.raises(argparse.ArgumentTypeError) as error:
        storage_option("hunter2")
    assert "hunter2" not in str(error.value)


def test_names_and_numbers_are_read_or_refused():
    assert names("x, y") == ["x", "y"]
    assert (positive("3"), not_negative("0")) == (3, 0)
    for read, text in (
        (names, "x,,y"),
        (positive, "0"),
        (not_negative, "-1"),
        (positive, "many"),
        (positive, "9" * 30),
    ):
        with pytest.raises(argparse.ArgumentTypeError):
            read(text)


def test_the_choices_are_those_of_python():
    """The command line has copies of them, since it answers without importing torch."""
    assert set(options.FORMATS) == set(registry.FORMATS)
    assert set(setting_options.OUTPUT_FORMATS) == set(convert.OUTPUT_FORMATS)
