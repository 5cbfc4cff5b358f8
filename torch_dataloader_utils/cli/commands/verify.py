"""Compare a checkpoint with today's files, and count for each file what is done, under way, left, missing, twice.

The exit code is 1 if a file differs, rows are missing or recorded twice, or states of ranks are missing or do not fit
together.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch_dataloader_utils.cli.options import (
    TIMEOUT_SEC,
    add_checkpoint,
    add_path,
    add_storage_option,
    storage_options,
)
from torch_dataloader_utils.cli.report import (
    FINE,
    MISMATCH,
    Block,
    Cell,
    Facts,
    Line,
    Report,
    Table,
    Text,
    count,
    plain,
    plural,
)
from torch_dataloader_utils.errors import shown

if TYPE_CHECKING:
    from torch_dataloader_utils.checkpoint.audit_result import Audit, FileAudit

MOST_FILES = 40
"""Files without a finding that the text shows; those with one are all shown."""

ALWAYS = ("rows", "done", "under_way", "left")
BAD = ("missing", "twice")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoint and the dataset."""
    add_checkpoint(parser)
    add_path(parser, nargs="?")
    add_storage_option(parser)


def run(arguments: argparse.Namespace) -> Report:
    """Audit a checkpoint."""
    from torch_dataloader_utils.distributed.audit import audit

    options = storage_options(arguments)
    found = audit(arguments.checkpoint, arguments.path, options, key=arguments.key, storage_timeout=TIMEOUT_SEC)
    missing = sorted(set(range(found.num_ranks)).difference(rank.rank for rank in found.ranks))
    is_fine = found.is_fine and not missing
    value = plain(found) | {"is_fine": is_fine, "missing_ranks": missing}
    return Report(value, _blocks(found, arguments.path, missing), FINE if is_fine else MISMATCH)


def _blocks(found: Audit, path: str | None, missing: Sequence[int]) -> list[Block]:
    blocks: list[Block] = [Facts(_facts(found, path), found.root), _ranks(found), *_files(found)]
    blocks += [Line(f"Note: {note}", "dim") for note in found.notes]
    blocks += [Line(f"Mismatch: {text}", "bad") for text in (*found.problems, *found.differences)]
    return [*blocks, _verdict(found, missing)]


def _facts(found: Audit, path: str | None) -> list[tuple[str, Text]]:
    match: Text = Cell("the same as in the checkpoint", "good")
    if found.files_match is None:
        match = "not compared" if path is None else "not comparable"
    elif not found.files_match:
        match = Cell("differ from the checkpoint", "bad")
    total = found.total
    done = 100 * (total.done + total.under_way) / max(1, total.rows)
    return [
        ("epoch", count(found.epoch)),
        ("step", count(found.batches)),
        (found.unit, f"{count(total.done + total.under_way)} of {count(total.rows)} delivered, {done:.1f} %"),
        ("states", f"{count(len(found.ranks))} of {plural(found.num_ranks, 'rank')}"),
        ("today's files", match),
    ]


def _ranks(found: Audit) -> Table:
    rows = [[count(rank.rank), count(rank.batches), count(rank.rows)] for rank in found.ranks]
    return Table(["rank", "batches", found.unit], rows, "Delivered")


def _files(found: Audit) -> list[Block]:
    shown = [name for name in plain(found.total) if name in ALWAYS or getattr(found.total, name)]
    findings = [file for file in found.files if _has_finding(file)]
    others = [file for file in found.files if not _has_finding(file)]
    listed = sorted([*findings, *others[:MOST_FILES]], key=lambda file: file.path)
    rows = [[file.path, *(_number(name, getattr(file, name)) for name in shown), _change(file)] for file in listed]
    rows.append(["all files", *(_number(name, getattr(found.total, name)) for name in shown), ""])
    left = len(found.files) - len(listed)
    note = f"and {plural(left, 'file')} more, without a finding: --json has all" if left else ""
    columns = ["file", *(found.unit if name == "rows" else name.replace("_", " ") for name in shown), "today"]
    return [Table(columns, rows, "Files", left=frozenset({"file", "today"}), note=note)]


def _has_finding(file: FileAudit) -> bool:
    return file.change is not None or bool(file.missing or file.twice)


def _number(name: str, number: int) -> Text:
    return Cell(count(number), "bad") if name in BAD and number else count(number)


def _change(file: FileAudit) -> Text:
    return "" if file.change is None else Cell(file.change, "bad")


def _verdict(found: Audit, missing: Sequence[int]) -> Line:
    if found.is_fine and missing:
        whose = f"ranks {shown(list(missing))} of {found.num_ranks}"
        return Line(f"Not complete: the states of {whose} are missing, and a run needs those of all ranks.", "bad")
    if found.is_fine:
        return Line("Fine: nothing is missing or recorded twice.", "good")
    parts = [f"the states of ranks {shown(list(missing))} missing"] if missing else []
    files = sum(file.change is not None for file in found.files)
    if files:
        parts.append(f"{plural(files, 'file')} {'differs' if files == 1 else 'differ'}")
    if found.total.missing:
        parts.append(f"{count(found.total.missing)} {found.unit} missing")
    if found.total.twice:
        parts.append(f"{count(found.total.twice)} {found.unit} recorded twice")
    return Line(f"Not fine: {', '.join(parts) or 'see above'}.", "bad")
