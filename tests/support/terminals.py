"""A real pseudo-terminal, and what a program writes to it."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

END = b"\x00"
"""Ends what is read. The end of the program's side would not: processes that it has forked have that, too."""


class Terminal:
    """A terminal of 120 columns.

    Attributes:
        file: Its side for the program, to write text to.
    """

    def __init__(self) -> None:
        self._screen, program = pty.openpty()
        fcntl.ioctl(program, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
        self.file = io.TextIOWrapper(io.FileIO(program, "w"), write_through=True)
        self._seen = bytearray()
        self._reader = threading.Thread(target=self._read, name="terminal")
        self._reader.start()

    def _read(self) -> None:
        while not self._seen.endswith(END):
            self._seen += os.read(self._screen, 4096)

    def hang_up(self) -> None:
        """Read what has come, and close the side of the screen: what is written from now on is an error."""
        if self._reader.is_alive():
            os.write(self.file.fileno(), END)
            self._reader.join()
            os.close(self._screen)

    def frames(self) -> list[list[str]]:
        """Return of each line that was written all that was drawn on it, one after the other."""
        self.hang_up()
        lines = self._seen.removesuffix(END).decode().replace("\r\n", "\n").split("\n")
        frames = ([frame for frame in line.split("\r") if frame.strip()] for line in lines)
        return [drawn for drawn in frames if drawn]

    def lines(self) -> list[str]:
        """Return each line as it was drawn last."""
        return [drawn[-1] for drawn in self.frames()]

    def ends(self) -> list[tuple[str, str]]:
        """Return of each progress bar its percentage and its count at the end."""
        found = (re.search(r"(\d+%)\|.*\| (\d+/\d+) \[", line) for line in self.lines())
        return [(match[1], match[2]) for match in found if match]


@contextmanager
def terminal() -> Iterator[Terminal]:
    """Yield a terminal that is standard error meanwhile, and hang it up at the end."""
    opened = Terminal()
    try:
        with redirect_stderr(opened.file):
            yield opened
    finally:
        opened.hang_up()
        opened.file.close()
