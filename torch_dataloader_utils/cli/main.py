"""The entry point of ``tdu``: parse, run the command, print, and end with an exit code."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from torch_dataloader_utils.cli.failures import StandardError
from torch_dataloader_utils.cli.output import print_report
from torch_dataloader_utils.cli.parser import COMMANDS, command_module, make_parser
from torch_dataloader_utils.cli.report import UNUSABLE


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command and end the process with its exit code. Ctrl-C ends it as it ends any program."""
    words = sys.argv[1:] if argv is None else list(argv)
    standard_error = StandardError(words)
    try:
        code = run(words, standard_error)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)  # so that a shell knows, and ends its loop too
        raise
    sys.exit(code)


def run(argv: Sequence[str], standard_error: StandardError) -> int:
    """Run a command and return its exit code."""
    standard_error.install()
    logging.getLogger().addHandler(logging.NullHandler())  # else Python prints what libraries log
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        arguments = make_parser([word for word in argv if word in COMMANDS]).parse_args(argv)
        report = command_module(arguments.command).run(arguments)
    except Exception as error:  # noqa: BLE001 - a user is never shown a traceback
        standard_error.fail(error)
        return UNUSABLE
    try:
        print_report(report, as_json=arguments.json)
    except BrokenPipeError:  # as from `| head`: what was read is enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        standard_error.fail(OSError(f"standard output cannot be written: {error.strerror}"))
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNUSABLE
    exit_code: int = report.exit_code
    return exit_code
