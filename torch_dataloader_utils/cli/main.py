"""The entry point of ``tdu``: parse, run the command, print, and end with an exit code."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from torch_dataloader_utils.cli.failures import StandardError
from torch_dataloader_utils.cli.output import print_report
from torch_dataloader_utils.cli.parser import command_module, parse
from torch_dataloader_utils.cli.report import FINE, UNUSABLE


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command and end the process with its exit code. Ctrl-C ends it as it ends any program."""
    words = sys.argv[1:] if argv is None else list(argv)
    standard_error = StandardError(words)
    try:
        if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # see `__main__`
            signal.signal(signal.SIGINT, signal.default_int_handler)
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
    if sys.stdout is None:  # closed by the shell, as with >&-
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - it stays open to the end
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        code, show = _reported(argv)
    except Exception as error:  # noqa: BLE001 - a user is never shown a traceback
        standard_error.fail(error)
        return UNUSABLE
    try:
        show()
        sys.stdout.flush()
    except BrokenPipeError:  # as from `| head`: what was read is enough
        _discard_output()
    except OSError as error:
        _discard_output()
        standard_error.fail(OSError(f"standard output cannot be written: {error.strerror}"))
        return UNUSABLE
    except Exception as error:  # noqa: BLE001
        standard_error.fail(error)
        return UNUSABLE
    return code


def _reported(argv: Sequence[str]) -> tuple[int, Callable[[], Any]]:
    """Run a command; return its exit code, and what prints its report, or the help that was asked for."""
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            arguments = parse(argv)
    except SystemExit:  # of --help and --version; whatever is wrong is a UsageError
        return FINE, partial(sys.stdout.write, text.getvalue())
    report = command_module(arguments.command).run(arguments)
    return report.exit_code, partial(print_report, report, as_json=arguments.json)


def _discard_output() -> None:
    """Let nothing more be written, also when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
