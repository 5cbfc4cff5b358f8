"""Print what makes a shell complete the commands and options of tdu. Needs shtab: the extra cli."""

from __future__ import annotations

import argparse

from torch_dataloader_utils.cli.parser import COMMANDS, make_parser
from torch_dataloader_utils.cli.report import Raw, Report

SHELLS = ("bash", "zsh", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the shell's name."""
    parser.add_argument("shell", choices=SHELLS, help="the shell")


def run(arguments: argparse.Namespace) -> Report:
    """Return the script for a shell."""
    try:
        import shtab
    except ImportError as error:
        raise ImportError("tdu completion needs shtab: pip install shtab") from error
    script = shtab.complete(make_parser(list(COMMANDS)), shell=arguments.shell)
    return Report({"shell": arguments.shell, "script": script}, [Raw(script)])
