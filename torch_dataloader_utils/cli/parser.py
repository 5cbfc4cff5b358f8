"""The parser of ``tdu``: each command's module adds its own arguments. Imports no torch."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, NoReturn

from torch_dataloader_utils.errors import nearest

COMMANDS = {
    "plan": "what an epoch would look like: shards, balance, steps, memory, and advice",
    "verify": "compare a checkpoint with today's files, and count what is done, left, missing or twice",
    "rows": "which rows go into a step",
    "step": "which step a row goes into",
    "diff": "what differs between two states or two manifests",
    "bench": "how fast the loader reads these files, beside Arrow alone, and the setting to use",
    "mixing": "how well labels are mixed for some shuffle buffers, and what each costs",
    "demo": "kill a training, resume it, and count the rows",
    "completion": "print what makes a shell complete the commands",
}
"""Each command, which is a module of `commands`, and what it does."""

DESCRIPTION = "Which rows a training sees, when, and what that costs: from the files, a checkpoint, or both."
EXIT_CODES = "Exit codes: 0 fine, 1 a mismatch, 2 wrong usage or input that cannot be read."


class UsageError(Exception):
    """The command line is wrong. The message says how; `program` is the command whose help shows what is right."""

    def __init__(self, message: str, program: str) -> None:
        super().__init__(message)
        self.program = program


class Parser(argparse.ArgumentParser):
    """An argument parser that raises what is wrong, so that one place says it."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", Formatter)
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Raise a `UsageError`."""
        raise UsageError(message, self.prog)


class Formatter(argparse.HelpFormatter):
    """Help that leaves more room for the names of options."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, **{"max_help_position": 32, **options})


def command_module(name: str) -> ModuleType:
    """Return the module of a command."""
    return import_module(f"{__package__}.commands.{name}")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of a command line.

    Raises:
        UsageError: If it is wrong. Of an option that the command does not have, it names the one that is most like it.
        SystemExit: If help or the version was asked for, and printed.
    """
    arguments, unknown = make_parser([word for word in argv if word in COMMANDS]).parse_known_args(argv)
    if unknown:
        option = next((word.partition("=")[0] for word in unknown if word.startswith("-")), None)
        close = "" if option is None else nearest(option, sorted(options_of(arguments.command)))
        raise UsageError(f"unrecognized arguments: {' '.join(unknown)}{close}", f"tdu {arguments.command}")
    return arguments


def options_of(command: str) -> frozenset[str]:
    """Return the long options of a command."""
    parser = Parser()
    command_module(command).add_arguments(parser)
    return frozenset(re.findall(r"--[a-z][a-z-]*", parser.format_usage()))


def make_parser(commands: Sequence[str] = ()) -> Parser:
    """Return the parser. Of commands that are not named it knows the name and what they do, but no arguments."""
    parser = Parser(prog="tdu", description=DESCRIPTION, epilog=EXIT_CODES)
    parser.add_argument("--version", action="version", version=_version(), help="print the version and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for name, summary in COMMANDS.items():
        of_command = subparsers.add_parser(name, help=summary, description=f"Shows {summary}.", epilog=EXIT_CODES)
        if name in commands:
            module = command_module(name)
            of_command.description = module.__doc__
            module.add_arguments(of_command)
            of_command.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _version() -> str:
    try:
        return f"tdu {version('torch-dataloader-utils')}"
    except PackageNotFoundError:  # run from a folder of sources
        return "tdu, from sources"
