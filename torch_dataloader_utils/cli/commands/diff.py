"""Show what differs between two states, or between two manifests: settings, files, progress.

The exit code is 1 if settings or files differ. Progress alone is no mismatch.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from torch_dataloader_utils.cli.options import add_storage_option, storage_options
from torch_dataloader_utils.cli.report import (
    FINE,
    MISMATCH,
    Block,
    Cell,
    Line,
    Report,
    Table,
    Text,
    Tone,
    plain,
    plural,
)

if TYPE_CHECKING:
    from torch_dataloader_utils.cli.differences import Change, Differences

TONES: dict[str, Tone] = {"added": "good", "removed": "bad", "rewritten": "warning"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what to compare."""
    about = "a state, a checkpoint or a manifest: a file, a directory, or a URL of one of these"
    parser.add_argument("first", metavar="A", help=about)
    parser.add_argument("second", metavar="B", help="the one to compare it with")
    parser.add_argument("--key", metavar="NAME", help="the key of the states, where there are those of several loaders")
    add_storage_option(parser)


def run(arguments: argparse.Namespace) -> Report:
    """Compare two states or manifests."""
    from torch_dataloader_utils.cli.differences import compare

    found = compare(arguments.first, arguments.second, storage_options(arguments), arguments.key)
    is_mismatch = bool(found.settings or found.files or found.notes)
    return Report(plain(found), _blocks(found), MISMATCH if is_mismatch else FINE)


def _blocks(found: Differences) -> list[Block]:
    blocks: list[Block] = []
    if found.settings:
        blocks.append(_table("Settings", found.settings))
    if found.files:
        rows: list[list[Text]] = [[file.path, Cell(file.change, TONES[file.change]), file.how] for file in found.files]
        blocks.append(Table(["file", "change", "how"], rows, "Files", left=frozenset({"file", "change", "how"})))
    if found.progress:
        blocks.append(_table("Progress", found.progress))
    blocks += [Line(f"Note: {note}", "warning") for note in found.notes]
    return [*blocks, _verdict(found)]


def _table(title: str, changes: tuple[Change, ...]) -> Table:
    from torch_dataloader_utils.cli.differences import in_words

    rows = [[change.name, *in_words(change)] for change in changes]
    return Table(["", "A", "B"], rows, title, left=frozenset({"", "A", "B"}))


def _verdict(found: Differences) -> Line:
    if found.settings or found.files or found.notes:
        parts = [plural(len(found.settings), "setting")] if found.settings else []
        parts += [plural(len(found.files), "file")] if found.files else []
        return Line(f"The {found.kind} differ: {' and '.join(parts) or 'see the notes'}.", "bad")
    if found.progress:
        return Line("Settings and files are the same; only the progress differs.", "good")
    return Line(f"The {found.kind} say the same.", "good")
