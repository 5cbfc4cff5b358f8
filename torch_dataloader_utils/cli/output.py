"""Reports as text or JSON, on standard output: aligned plain text, or tables of rich on a terminal."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from typing import TextIO

from torch_dataloader_utils.cli.plain_text import lines_of
from torch_dataloader_utils.cli.report import Report, plain


def print_report(report: Report, *, as_json: bool) -> None:
    """Print a report on standard output."""
    out = sys.stdout
    if as_json:
        out.write(json.dumps(plain(report.value), indent=2) + "\n")
    elif is_styled(out):
        from torch_dataloader_utils.cli.styled import print_styled

        print_styled(report.blocks, out)
    else:
        out.write("".join(f"{line}\n" for line in lines_of(report.blocks)))
    out.flush()


def is_styled(out: TextIO) -> bool:
    """Whether rich is to print: it is installed, and this is a terminal that can do more than print characters."""
    has_rich = importlib.util.find_spec("rich") is not None
    return out.isatty() and os.environ.get("TERM") != "dumb" and has_rich
