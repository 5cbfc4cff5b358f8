"""Options that several commands have, and what they stand for in Python. Imports no torch."""

from __future__ import annotations

import argparse
import ast
import json
from typing import Any

FORMATS = ("parquet", "orc", "csv", "json", "jsonl")
MOST_COUNT = 10**15
"""The largest number that an option for a count takes: more rows than any dataset has."""

TIMEOUT_SEC = 30.0
"""How long a storage may fail: somebody is waiting, and no training is lost."""

MOST_PROCESSES = 10_000
"""More ranks, and more workers of a rank, than any run has. Planning for a typing error would take hours."""


def add_path(parser: argparse.ArgumentParser, *, nargs: str | None = None) -> None:
    """Add the path of a dataset."""
    about = "a file, a directory, a glob, or a URL of one of these"
    parser.add_argument("path", metavar="PATH", nargs=nargs, help=about)


def add_storage_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--storage-option``; `storage_options` returns what was given."""
    parser.add_argument(
        "--storage-option",
        action="append",
        type=storage_option,
        metavar="KEY=VALUE",
        help="an option of the storage, as storage_options has in Python; client_kwargs.endpoint_url=URL reaches "
        "inside; a number, true, false, null, a list or an object in JSON is taken as such; may be repeated",
    )


def add_format(parser: argparse.ArgumentParser) -> None:
    """Add ``--format`` and ``--partitioning``."""
    parser.add_argument("--format", choices=FORMATS, default="parquet", help="the files' format (default: parquet)")
    parser.add_argument("--partitioning", choices=["hive"], help="make columns of directories such as day=2024-02-29")


def add_columns(parser: argparse.ArgumentParser) -> None:
    """Add ``--columns``."""
    parser.add_argument("--columns", type=names, metavar="NAME,...", help="the columns to deliver (default: all)")


def names(text: str) -> list[str]:
    """Read names that are separated by commas."""
    found = [name.strip() for name in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name: write NAME or NAME,NAME")
    return found


def positive(text: str) -> int:
    """Read an integer of at least 1."""
    return _integer(text, 1)


def not_negative(text: str) -> int:
    """Read an integer of at least 0."""
    return _integer(text, 0)


def ranks(text: str) -> int:
    """Read a number of ranks."""
    return _integer(text, 1, MOST_PROCESSES)


def workers(text: str) -> int:
    """Read a number of workers; 0 means the rank's own process."""
    return _integer(text, 0, MOST_PROCESSES)


def _integer(text: str, least: int, most: int = MOST_COUNT) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not between {least} and {most:,}")
    return number


def storage_option(text: str) -> tuple[str, Any]:
    """Read ``KEY=VALUE``. A message shows no value: it may be a secret."""
    key, mark, value = text.partition("=")
    if not (mark and key):
        raise argparse.ArgumentTypeError("expected KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def storage_options(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Return the storage's options as Python takes them, or None; a dot in a name reaches into a dictionary.

    Raises:
        ValueError: If two of them contradict each other.
    """
    found: dict[str, Any] = {}
    for key, value in arguments.storage_option or ():
        *outer, last = key.split(".")
        inside = found
        for name in outer:
            inside = inside.setdefault(name, {})
            if not isinstance(inside, dict):
                raise ValueError(f"--storage-option {key}: {name} has a value already")  # noqa: TRY004 - not a type
        if last in inside:
            raise ValueError(f"--storage-option {key} is there twice")
        inside[last] = value
    return found or None


def dataset_parameters(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what ``create_dataloader`` takes of `add_path`, `add_format`, `add_columns` and `add_storage_option`."""
    given = {name: getattr(arguments, name) for name in ("path", "format", "partitioning", "columns")}
    return given | {"storage_options": storage_options(arguments)}


def parse_filter(text: str) -> Any:
    """Read a filter in pyarrow's lists of tuples: as JSON, or as Python writes them."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        msg = 'expected lists of conditions, such as [["x", ">", 3], ["y", "in", ["a", "b"]]]'
        raise argparse.ArgumentTypeError(msg) from None


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the path of a checkpoint, and the key under which its states are."""
    about = "a state, or a checkpoint that has states: a file, a directory, or a URL of one of these"
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=about)
    parser.add_argument("--key", metavar="NAME", help="the key of the states, where there are those of several loaders")


def add_dataset_of_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add what opens the dataset of a checkpoint, where the states do not hold it."""
    parser.add_argument("--path", help="the dataset (default: where it was when the checkpoint was saved)")
    add_storage_option(parser)
    parser.add_argument("--epoch", type=not_negative, metavar="N", help="the epoch (default: the checkpoint's)")
    parser.add_argument("--run-log", metavar="URL", help="the run log, for steps before an elastic load")
    parser.add_argument("--scan", action="store_true", help="read what it takes where only reading tells")
    parser.add_argument(
        "--filter",
        type=parse_filter,
        metavar="LISTS",
        help='the filter that the checkpoint was saved with, such as \'[["x", ">", 3]]\'',
    )
    parser.add_argument("--partitioning", choices=["hive"], help="make columns of directories such as day=2024-02-29")
    parser.add_argument(
        "--format-option",
        action="append",
        type=storage_option,
        metavar="KEY=VALUE",
        help="one of format_options that the checkpoint was saved with; may be repeated",
    )
    parser.add_argument(
        "--batch-size", type=positive, metavar="ROWS", help="rows in a batch, for states that do not hold it"
    )
    parser.add_argument("--drop-last", action="store_true", help="for states that do not hold it")
