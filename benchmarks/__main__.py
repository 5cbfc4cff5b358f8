"""The commands of ``python -m benchmarks``.

Each has --help.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.measure import frameworks as jobs
from benchmarks.measure import gpu as training
from benchmarks.measure import ledger as answers
from benchmarks.measure import mixtures as mixed
from benchmarks.measure import packing as packed
from benchmarks.measure import reliability as kills
from benchmarks.measure import resuming
from benchmarks.measure import scale as scaling
from benchmarks.measure.environments import packages_of
from benchmarks.measure.machine import commit
from benchmarks.measure.peers import PEER_WORKLOADS, PEERS, PeerMaker, environment_of, ready_peers
from benchmarks.measure.session import Session, read
from benchmarks.measure.workloads import WORKLOADS, Settings
from benchmarks.paths import RESULTS, ROOT
from benchmarks.report import claims, comparison, page
from benchmarks.report import frameworks as frameworks_page
from benchmarks.report import mixtures as mixtures_page
from benchmarks.report import packing as packing_page
from benchmarks.report import reliability as reliability_page


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    options = _parser().parse_args(arguments)
    status: int = options.command(options)
    return status


def run(options: argparse.Namespace) -> int:
    """Measure this library and raw Arrow."""
    path = options.out or RESULTS / "run.json"
    session = Session("run", path, Settings(options.rounds, options.scale), add=options.add)
    session.measure(options.workloads or list(WORKLOADS))
    return 0


def peers(options: argparse.Namespace) -> int:
    """Measure other loaders, each in its own environment, in turns with this library and raw Arrow."""
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
    """Measure the promised figures and compare them with their bounds; exit status 1 if one fails."""
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


def compare(options: argparse.Namespace) -> int:
    """Measure the promised figures of this checkout and of another one, in turns, and print both.

    The other checkout's package runs in the environment of this one, from the same data, by the scripts of this one.
    Compare a checkout with itself to see how large the noise is. Exit status 1 if a figure is missing.
    """
    path = options.out or ROOT / "build" / "bench" / "compare.json"
    session = Session("compare", path, Settings(options.rounds, options.scale, against=options.against))
    session.note("other", commit(options.against))
    compared = comparison.compare(session.measure(options.workloads or list(claims.NEEDED)))
    print("\n".join(comparison.table(compared)))
    return int(any(one.why for one in compared))


def reliability(options: argparse.Namespace) -> int:
    """Run the reliability tests and the same kills with other loaders, and write docs/reliability.md.

    Exit status 1 if a test failed.
    """
    results = kills.run(
        options.out, minutes=options.minutes, kills=options.kills, own=options.tests, names=options.loaders
    )
    reliability_page.write(results, options.page)
    return int(bool(options.tests and results["tests"]["failed"]))


def frameworks(options: argparse.Namespace) -> int:
    """Kill and resume trainings under each framework, and write docs/frameworks.md."""
    results = jobs.run(options.out, rows=options.rows, batch_size=options.batch_size, only=options.modules)
    frameworks_page.write(results, options.page)
    return 0


def mixtures(options: argparse.Namespace) -> int:
    """Kill and resume mixtures of two sources, with this library and with others, and write docs/mixtures.md."""
    results = mixed.run(options.out, options.ways)
    mixtures_page.write(results, options.page)
    return 0


def packing(options: argparse.Namespace) -> int:
    """Pack documents, kill and resume it, with this library and with others, and write docs/packing.md."""
    results = packed.run(options.out, options.ways, options.rounds)
    packing_page.write(results, options.page)
    return 0


def resume(options: argparse.Namespace) -> int:
    """Come back within an epoch with this library and with others: seconds, bytes, and rows after a kill."""
    resuming.run(options.out, options.ways, options.rounds)
    return 0


def scale(options: argparse.Namespace) -> int:
    """Measure how seconds, memory and states grow with files, row groups and ranks, as one rank of many sees it."""
    scaling.run(options.out, options.curves, options.files)
    return 0


def gpu(options: argparse.Namespace) -> int:
    """Train on a GPU that is fed from local files and from S3: seconds of a step with and without the loader."""
    is_trial = options.device != "cuda" or options.scale < 1
    path = options.out or (ROOT / "build" / "bench" / "gpu.json" if is_trial else RESULTS / "gpu.json")
    training.run(path, options.workloads, options.rounds, options.device, options.scale)
    return 0


def ledger(options: argparse.Namespace) -> int:  # noqa: ARG001 - it has none
    """Print how long the ledger takes to answer on 100,000,000 rows in 100,000 row groups."""
    print("\n".join(answers.table()))
    return 0


def write(options: argparse.Namespace) -> int:
    """Write the pages and their plots from the raw results."""
    results = [read(path) for path in sorted(options.results.glob("*.json"))]
    others = {
        "reliability": reliability_page,
        "frameworks": frameworks_page,
        "mixtures": mixtures_page,
        "packing": packing_page,
    }
    page.write([found for found in results if found["kind"] not in others], options.page)
    for found in results:
        if found["kind"] in others:
            others[found["kind"]].write(found, options.page.with_name(f"{found['kind']}.md"))
    return 0


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "run": run,
    "peers": peers,
    "check": judge,
    "compare": compare,
    "reliability": reliability,
    "frameworks": frameworks,
    "mixtures": mixtures,
    "packing": packing,
    "resume": resume,
    "scale": scale,
    "gpu": gpu,
    "ledger": ledger,
    "report": write,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure this library and its peers.")
    commands = parser.add_subparsers(required=True)
    for name, command in COMMANDS.items():
        summary, _, rest = (command.__doc__ or "").partition("\n\n")
        command_parser = commands.add_parser(name, help=summary, description=f"{summary} {rest}")
        command_parser.set_defaults(command=command)
        if name in OWN_OPTIONS:
            OWN_OPTIONS[name](command_parser)
            continue
        if name == "report":
            command_parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the raw results")
            command_parser.add_argument(
                "--page", type=Path, default=ROOT / "docs" / "benchmarks.md", help="the page to write"
            )
            continue
        known = {"peers": PEER_WORKLOADS, "compare": claims.NEEDED}.get(name, tuple(WORKLOADS))
        command_parser.add_argument("--workloads", type=_Names(known), help=f"some of {','.join(known)}")
        command_parser.add_argument("--rounds", type=int, default=5 if name == "compare" else 3, help="timed rounds")
        command_parser.add_argument(
            "--scale", type=float, default=1.0, help="share of the data; less than 1 for a trial run"
        )
        command_parser.add_argument("--out", type=Path, help="file for the raw results")
        if name in {"run", "peers"}:
            command_parser.add_argument("--add", action="store_true", help="keep the other workloads of that file")
        if name == "peers":
            command_parser.add_argument("--peers", type=_Names(tuple(PEERS)), help=f"some of {','.join(PEERS)}")
        if name == "compare":
            command_parser.add_argument(
                "--against", type=_checkout, required=True, metavar="DIR", help="root of the other checkout"
            )
        if name == "check":
            command_parser.add_argument(
                "--taken", type=Path, metavar="FILE", help="take these results, measure nothing"
            )
    return parser


def _add_reliability(parser: argparse.ArgumentParser) -> None:
    known = tuple(kills.LOADERS)
    parser.add_argument("--minutes", type=float, default=5, help="for each long test, and for each case of a loader")
    parser.add_argument("--kills", type=int, default=20, help="in each case of a loader")
    parser.add_argument("--tests", action=argparse.BooleanOptionalAction, default=True, help="run the tests")
    parser.add_argument("--loaders", type=_Names(known), default=list(known), help=f"some of {','.join(known)}")
    parser.add_argument(
        "--no-peers", dest="loaders", action="store_const", const=["ours"], help="no loader but this library's"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "reliability.json", help="file for the raw results")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "reliability.md", help="the page to write")


def _add_frameworks(parser: argparse.ArgumentParser) -> None:
    known = sorted({module for module, _ in jobs.WAYS})
    parser.add_argument("--modules", type=_Names(known), default=known, help=f"some of {','.join(known)}")
    parser.add_argument("--rows", type=int, default=420_000, help="of the dataset")
    parser.add_argument("--batch-size", type=int, default=600, help="rows of a step, over all ranks")
    parser.add_argument("--out", type=Path, default=RESULTS / "frameworks.json", help="file for the raw results")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "frameworks.md", help="the page to write")


def _add_mixtures(parser: argparse.ArgumentParser) -> None:
    known = tuple(mixed.WAYS)
    parser.add_argument("--ways", type=_Names(known), default=list(known), help=f"some of {','.join(known)}")
    parser.add_argument("--out", type=Path, default=RESULTS / "mixtures.json", help="file for the raw results")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "mixtures.md", help="the page to write")


def _add_packing(parser: argparse.ArgumentParser) -> None:
    known = tuple(packed.WAYS)
    parser.add_argument("--ways", type=_Names(known), default=list(known), help=f"some of {','.join(known)}")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds; 0 keeps the times that are there")
    parser.add_argument("--out", type=Path, default=RESULTS / "packing.json", help="file for the raw results")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "packing.md", help="the page to write")


def _add_resume(parser: argparse.ArgumentParser) -> None:
    known = tuple(resuming.WAYS)
    parser.add_argument("--ways", type=_Names(known), default=list(known), help=f"some of {','.join(known)}")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds")
    parser.add_argument("--out", type=Path, default=RESULTS / "resume.json", help="file for the raw results")


def _add_scale(parser: argparse.ArgumentParser) -> None:
    known = scaling.CURVES
    parser.add_argument("--curves", type=_Names(known), default=list(known), help=f"some of {','.join(known)}")
    parser.add_argument("--files", type=int, default=max(scaling.FILES), help="leave out sizes with more files")
    parser.add_argument("--out", type=Path, default=RESULTS / "scale.json", help="file for the raw results")


def _add_gpu(parser: argparse.ArgumentParser) -> None:
    known = tuple(training.WORKLOADS)
    parser.add_argument("--workloads", type=_Names(known), default=list(known), help=f"some of {','.join(known)}")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of some epochs each")
    parser.add_argument("--device", default="cuda", help="another one only to try things out")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the data; less than 1 for a trial run")
    parser.add_argument("--out", type=Path, help="file for the raw results")


def _add_none(_parser: argparse.ArgumentParser) -> None:
    """Add no option."""


OWN_OPTIONS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "reliability": _add_reliability,
    "frameworks": _add_frameworks,
    "mixtures": _add_mixtures,
    "packing": _add_packing,
    "resume": _add_resume,
    "scale": _add_scale,
    "gpu": _add_gpu,
    "ledger": _add_none,
}


def _checkout(text: str) -> Path:
    """Return the root of a checkout."""
    root = Path(text).resolve()
    if not text or not (root / "torch_dataloader_utils" / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not the root of a checkout: it has no torch_dataloader_utils/")
    return root


class _Names:
    """Parses "a,b" into a list of known names."""

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
