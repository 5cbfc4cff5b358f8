"""Two network namespaces with a cable between them: two machines, as far as torchrun can tell."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HOLD = [sys.executable, str(Path(__file__).parent / "hold.py"), str(os.getpid())]
INTERFACE = "cable"


@dataclass(frozen=True)
class Host:
    """A network namespace.

    Attributes:
        pid: The process that keeps it alive.
        address: Its address; nothing else of the machine's network can be reached from it.
    """

    pid: int
    address: str

    @property
    def entry(self) -> list[str]:
        """What a command begins with that is to run there."""
        return ["nsenter", f"--target={self.pid}", "--user", "--preserve-credentials", "--net", "--"]

    def run(self, *command: str) -> None:
        """Run a command there."""
        subprocess.run([*self.entry, *command], check=True, capture_output=True)


def reason_against() -> str | None:
    """Return why no network namespaces can be made on this machine, or None."""
    try:
        with two_hosts():
            return None
    except (OSError, subprocess.CalledProcessError, AssertionError) as error:
        return f"no right to make network namespaces here: {error!r:.200}"


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make two hosts, and end them when the block is left."""
    with contextlib.ExitStack() as ends:
        first = Host(
            ends.enter_context(_holding(["unshare", "--user", "--map-root-user", "--net", "--"])), "10.231.7.1"
        )
        inside = ["nsenter", f"--target={first.pid}", "--user", "--preserve-credentials", "--"]
        second = Host(ends.enter_context(_holding([*inside, "unshare", "--net", "--"])), "10.231.7.2")
        cable = ["ip", "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", str(second.pid)]
        first.run(*cable)
        for host in (first, second):
            host.run("ip", "address", "add", f"{host.address}/24", "dev", INTERFACE)
            host.run("ip", "link", "set", INTERFACE, "up")
            host.run("ip", "link", "set", "lo", "up")
        yield first, second


@contextlib.contextmanager
def _holding(entry: list[str]) -> Iterator[int]:
    """Start a process in namespaces of its own, and end it when the block is left."""
    process = subprocess.Popen(
        [*entry, *HOLD], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        yield process.pid
    finally:
        process.kill()
        process.communicate()
