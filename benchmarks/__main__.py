"""The benchmarks: ``python -m benchmarks run | peers | check | report``, each with --help."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure.environments import packages_of
from benchmarks.measure.peers import PEER_WORKLOADS, PEERS, PeerMaker, environment_of, ready_peers
from benchmarks.measure.session import Session, read
from benchmarks.measure.workloads import WORKLOADS, Settings
from benchmarks.paths import RESULTS, ROOT
from benchmarks.report import claims, page


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    options = _parser().parse_args(arguments)
    status: int = options.command(options)
    return status


def run(options: argparse.Namespace) -> int:
    """Measure this library and raw Arrow on all workloads."""
    path = options.out or RESULTS / "run.json"
    session = Session("run", path, Settings(options.rounds, options.scale), add=options.add)
    session.measure(options.workloads or list(WORKLOADS))
    return 0


def peers(options: argparse.Namespace) -> int:
    """Measure peers, each in an environment of its own, in turns with this library and raw Arrow."""
    ready, missing = ready_peers(options.peers or list(PEERS))
    for name, why in missing.items():
        print(f"{name}: {why}")
    maker = PeerMaker(ready)
    path = options.out or RESULTS / "peers.json"
    session = Session("peers", path, Settings(options.rounds, options.scale, maker), add=options.add)
    session.note("missing_peers", missing)
    session.note("peer_packages", {PEERS[name].title: packages_of(environment_of(name).python) for name in ready})

    def conversions() -> dict[str, object]:
        made, maker.conversions = maker.conversions, {}
        return {"conversions": made}

    session.measure(options.workloads or list(PEER_WORKLOADS), conversions)
    return 0


def judge(options: argparse.Namespace) -> int:
    """Measure what the claims need, and judge them: exit status 1 if one fails."""
    if options.taken:
        results = read(options.taken)
    else:
        ready, _ = ready_peers(["published"], only_installed=True)
        maker = PeerMaker(ready, workloads=("numeric",))
        settings = Settings(options.rounds, options.scale, maker)
        session = Session("check", options.out or ROOT / "build" / "bench" / "check.json", settings)
        results = session.measure(options.workloads or list(claims.NEEDED))
    verdicts = claims.judge(results)
    print("\n".join([*claims.table(verdicts), *claims.aside(results)]))
    return int(any(verdict.passed is False for verdict in verdicts))


def write(options: argparse.Namespace) -> int:
    """Write the page and its plots from the raw results."""
    page.write([read(path) for path in sorted(options.results.glob("*.json"))], options.page)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure this library and its peers.")
    commands = parser.add_subparsers(required=True)
    for name, command in (("run", run), ("peers", peers), ("check", judge), ("report", write)):
        own = commands.add_parser(name, help=command.__doc__, description=command.__doc__)
        own.set_defaults(command=command)
        if name == "report":
            own.add_argument("--results", type=Path, default=RESULTS, help="directory of raw results")
            own.add_argument("--page", type=Path, default=ROOT / "docs" / "benchmarks.md", help="the page to write")
            continue
        known = PEER_WORKLOADS if name == "peers" else tuple(WORKLOADS)
        own.add_argument("--workloads", type=_Names(known), help=f"some of {','.join(known)}")
        own.add_argument("--rounds", type=int, default=3, help="timed rounds")
        own.add_argument("--scale", type=float, default=1.0, help="shrinks the data, to try things out")
        own.add_argument("--out", type=Path, help="where the raw results go")
        if name != "check":
            own.add_argument("--add", action="store_true", help="keep what is there of other workloads")
        if name == "peers":
            own.add_argument("--peers", type=_Names(tuple(PEERS)), help=f"some of {','.join(PEERS)}")
        if name == "check":
            own.add_argument("--taken", type=Path, metavar="FILE", help="judge these results, measure nothing")
    return parser


class _Names:
    """Turns "a,b" into a list, of known names only."""

    def __init__(self, known: Sequence[str]) -> None:
        self._known = known

    def __call__(self, text: str) -> list[str]:
        names = text.split(",")
        unknown = sorted(set(names).difference(self._known))
        if unknown:
            message = f"unknown: {', '.join(unknown)}; known: {', '.join(self._known)}"
            raise argparse.ArgumentTypeError(message)
        return names


if __name__ == "__main__":
    sys.exit(main())
