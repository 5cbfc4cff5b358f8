"""Parameters of Python in messages, as the options of the command that was called. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Collection

OPTIONS = {
    "batch_size": "--batch-size",
    "columns": "--columns",
    "count_rows": "--count-rows",
    "drop_last": "--drop-last",
    "epoch": "--epoch",
    "filters": "--filter",
    "format": "--format",
    "format_options": "--format-option",
    "num_ranks": "--ranks",
    "num_workers": "--workers",
    "partitioning": "--partitioning",
    "rank": "--rank",
    "run_log": "--run-log",
    "scan": "--scan",
    "shuffle": "--shuffle",
    "shuffle_buffer_size": "--buffer",
    "shuffle_interleave": "--interleave",
    "split_bytes": "--split-bytes",
    "storage_options": "--storage-option",
    "uneven_ranks": "--uneven",
    "virtual_ranks": "--virtual-ranks",
    "virtual_workers": "--virtual-workers",
}
"""The options that stand for parameters of ``create_dataloader`` and of the ledger's methods."""

GIVEN = re.compile(
    rf"""(?<![\w/\\.'"])(?P<name>{"|".join(OPTIONS)})=(?P<value>"[^"]*"|'[^']*'|{{[^}}]*}}|\.\.\.|[\w-]+)(?![\w/\\(\['"])"""
)
"""A parameter with a value, which is no part of a path or of a name in quotes."""


def in_options(text: str, options: Collection[str]) -> str:
    """Return a message that names options, of those that a command has, in place of parameters and their values."""

    def option(given: re.Match[str]) -> str:
        name, value = OPTIONS[given["name"]], given["value"].strip("'\"")
        if name not in options:
            return given[0]
        if value in {"None", "False"}:
            return f"no {name}"
        return name if value in {"True", "..."} or value.startswith("{") else f"{name} {value}"

    return GIVEN.sub(option, text)
