"""Options of the commands that compare settings: lists of numbers, seconds, the shuffle. Imports no torch."""

from __future__ import annotations

import argparse
from typing import Any

from torch_dataloader_utils.cli.options import not_negative, positive

OUTPUT_FORMATS = ("torch", "numpy", "dict", "arrow")


def add_shuffle(parser: argparse.ArgumentParser) -> None:
    """Add the options of a shuffle; `shuffle` returns them as `create_dataloader` takes them."""
    parser.add_argument("--shuffle", action="store_true", help="shuffle the order of shards")
    parser.add_argument("--buffer", type=positive, metavar="ROWS", help="shuffle rows, so many together, as well")


def shuffle(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a shuffle."""
    buffer_size = arguments.buffer
    return {"shuffle": arguments.shuffle or buffer_size is not None, "shuffle_buffer_size": buffer_size}


def counts(text: str) -> tuple[int, ...]:
    """Read integers of at least 0, separated by commas."""
    return tuple(dict.fromkeys(map(not_negative, text.split(","))))


def sizes(text: str) -> tuple[int, ...]:
    """Read integers of at least 1, separated by commas."""
    return tuple(dict.fromkeys(map(positive, text.split(","))))


def seconds(text: str) -> float:
    """Read a number of seconds that is more than 0 and no more than an hour."""
    return _number(text, 3600)


def percent(text: str) -> float:
    """Read a number that is more than 0 and less than 100."""
    return _number(text, 99.9)


def svg(text: str) -> str:
    """Read the name of a picture."""
    if not text.lower().endswith(".svg"):
        raise argparse.ArgumentTypeError(f"{text!r}: the picture is an SVG, so its name ends with .svg")
    return text


def _number(text: str, most: float) -> float:
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < number <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not more than 0 and at most {most:g}")
    return number
