"""What a command says on standard error: at most three lines, without secrets, never a traceback."""

from __future__ import annotations

import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_dataloader_utils.cli.option_names import in_options
from torch_dataloader_utils.cli.options import storage_option
from torch_dataloader_utils.cli.parser import COMMANDS, UsageError, options_of
from torch_dataloader_utils.errors import DatasetError, printable
from torch_dataloader_utils.storage.redaction import SECRET_NAMES, Redactor

MOST_LINES = 3
MOST_CHARACTERS = 1000
OPTION = "--sto"
"""How ``--storage-option`` begins, also where it is misspelled further on."""
USERS = (DatasetError, OSError, ValueError, TypeError, ImportError, MemoryError)
"""Errors by which this package says what is wrong with what it was given; all others are defects."""


class StandardError:
    """Standard error, for at most three lines. The last one is kept for an error."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._redactor = _redactor(argv)
        self._command = next((word for word in argv if word in COMMANDS), None)
        self._left = MOST_LINES

    def install(self) -> None:
        """Make warnings one line each, without the line of source that Python adds."""
        warnings.showwarning = self._show_warning  # type: ignore[assignment]

    def fail(self, error: BaseException) -> None:
        """Say what went wrong."""
        for line in _explain(error, self._command)[: self._left]:
            self._write(line)
        self._left = 0

    def _show_warning(self, message: Warning | str, category: type[Warning], *_: Any) -> None:
        is_ours = category.__module__.partition(".")[0] == __name__.partition(".")[0]
        if is_ours and self._left > 1:  # what other libraries warn about is nothing that a user can mend
            self._write(f"tdu: warning: {_in_one_line(str(message))}")

    def _write(self, line: str) -> None:
        self._left -= 1
        text = printable(self._redactor.clean(line))
        if sys.stderr is not None:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()


def _explain(error: BaseException, command: str | None) -> list[str]:
    if isinstance(error, UsageError):
        return [f"{error.program}: {_in_one_line(str(error))}", f"{error.program} --help shows what it takes"]
    if isinstance(error, USERS):
        said = _message(error) if command is None else in_options(_message(error), options_of(command))
        return [f"tdu: {_in_one_line(said)}"]
    where = traceback.extract_tb(error.__traceback__)[-1]
    at = f"{Path(where.filename).name}, line {where.lineno}"
    return [
        f"tdu: {type(error).__name__}: {_in_one_line(str(error))}",
        f"This is a defect of tdu ({at}). Please report it with the command line.",
    ]


def _message(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__


def _in_one_line(text: str) -> str:
    short = " ".join(text.split())
    return short if len(short) <= MOST_CHARACTERS else f"{short[:MOST_CHARACTERS]}..."


def _redactor(argv: Sequence[str]) -> Redactor:
    """Return what removes the secrets of a command line, whether it can be parsed or not."""
    options: list[dict[str, Any]] = []
    for before, word in zip(("", *argv), argv, strict=False):
        key, mark, value = word.rpartition("--storage-option=")[2].partition("=")
        is_option = before.startswith(OPTION) or word.startswith(OPTION) or SECRET_NAMES.search(key)
        if mark and is_option:
            options.append({key.rpartition(".")[2]: [value, storage_option(f"-={value}")[1]]})
    return Redactor({"given": options}, argv)
