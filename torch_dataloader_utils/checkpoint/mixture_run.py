"""The sources of a mixture as runs have them and as states record them. Pure.

A state lists each source's files once. Which passes of a source an epoch reaches are numbers; its rows are named by
paths that tell source and pass: see `planning.mixture.source_paths`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, groupby, repeat
from typing import Any

from torch_dataloader_utils.checkpoint.json_value import JsonValue
from torch_dataloader_utils.planning.manifest import Manifest
from torch_dataloader_utils.planning.mixture.weight_schedule import Shares
from torch_dataloader_utils.planning.plan import DeliveredBaseline


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """Where an epoch begins in the endless sequence of a source's passes.

    Attributes:
        number: The first pass of which not all rows were planned before the epoch.
        row: How many of its rows were.
        buffers: The rows of the shuffle buffer in this pass, and in each that follows it in the epoch: for how many
            passes one after the other, and how many rows; None for these without row-level shuffle.
        changed: The passes whose files have changed since they began, each with the paths of files that are left out
            of it, as a mixture names them.
    """

    number: int
    row: int
    buffers: tuple[tuple[int, int | None], ...]
    changed: tuple[tuple[int, tuple[str, ...]], ...] = ()

    @property
    def passes(self) -> range:
        """The passes that the epoch reaches."""
        return range(self.number, self.number + sum(passes for passes, _ in self.buffers))

    def buffers_by_pass(self) -> Iterator[tuple[int, int | None]]:
        """Return the passes that the epoch reaches, each with the rows of its shuffle buffer."""
        rows = chain.from_iterable(repeat(rows, passes) for passes, rows in self.buffers)
        return zip(self.passes, rows, strict=True)


def in_runs(buffers: Iterable[int | None]) -> tuple[tuple[int, int | None], ...]:
    """Return the buffers of passes one after the other as a `SourcePosition` has them."""
    return tuple((len(list(equal)), rows) for rows, equal in groupby(buffers))


@dataclass(frozen=True, slots=True)
class SourceRun:
    """A source of a run: see `Run`, and where the epoch begins in it.

    Attributes:
        name: Its name.
        manifest: Its files, each once.
        weight: Its share from the beginning of the epoch, or the last elastic load, on.
        position: Where the epoch begins in it.
        transform_id: What the user calls its transform; None without one.
    """

    name: str
    manifest: Manifest
    weight: Fraction
    position: SourcePosition
    filter_digest: str | None
    filter_binding: str | None
    filter_bindings: str | None
    format: str
    format_options: str | None
    snapshot_id: int | None = None
    version: int | None = None
    transform_id: str | None = None

    def settings(self) -> dict[str, Any]:
        """Return what must be equal to load a state, by the names that users know. Files are compared separately."""
        return {
            "format": self.format,
            "format_options": self.format_options,
            "snapshot_id": self.snapshot_id,
            "version": self.version,
            "filters": self.filter_digest,
            "filter_binding": self.filter_binding,
            "rows": self.manifest.rows,
            "transform_id": self.transform_id,
        }

    def dump(self, *, lists_files: bool) -> dict[str, Any]:
        """Return what a state records of the source."""
        return {
            "name": self.name,
            "weight": dump_fraction(self.weight),
            "position": [self.position.number, self.position.row],
            "buffers": list(map(list, self.position.buffers)),
            "changed": [[number, list(paths)] for number, paths in self.position.changed],
            **{name: value for name, value in self.settings().items() if name != "transform_id" or value is not None},
            "filter_bindings": self.filter_bindings,
            "fingerprint": self.manifest.fingerprint,
            "root": self.manifest.root,
            "files": [entry.copy() for entry in self.manifest.entries] if lists_files else None,
        }


@dataclass(frozen=True, slots=True)
class MixtureRun:
    """What a run of a mixture has in addition to a single dataset's.

    Attributes:
        sources: The sources, in order.
        rows_per_epoch: Rows of an epoch, of all ranks.
        rows_of_epoch: Those of this epoch, which had begun before other weights changed the number.
        rows_before: Planned rows of the whole run before the epoch, of all ranks.
        schedule: From which planned row of the whole run on which shares of the sources hold, if they change by a
            schedule; else empty.
        carried: Rows that epochs before it have taken out of their turn: an elastic load had left them behind.
        earlier: Rows before the position of each source, of the pass that the epoch continues. They follow from the
            position, unless files change.
        next_weights: The share of each source from the next epoch on, if another was announced.
    """

    sources: tuple[SourceRun, ...]
    rows_per_epoch: int
    rows_of_epoch: int
    rows_before: int
    schedule: Shares
    carried: DeliveredBaseline
    earlier: DeliveredBaseline
    next_weights: tuple[Fraction, ...] | None = None

    def dump(self, *, lists_files: bool) -> dict[str, Any]:
        """Return what a state records of the mixture."""
        announced = {} if self.next_weights is None else {"next_weights": list(map(dump_fraction, self.next_weights))}
        own = {} if self.rows_of_epoch == self.rows_per_epoch else {"rows_of_epoch": self.rows_of_epoch}
        return {
            **announced,
            **own,
            "rows_per_epoch": self.rows_per_epoch,
            "rows_before": self.rows_before,
            "schedule": [[row, list(map(dump_fraction, shares))] for row, shares in self.schedule],
            "sources": [source.dump(lists_files=lists_files) for source in self.sources],
        }


def dump_fraction(value: Fraction) -> str:
    """Return a fraction as a state records it, such as ``"7/10"``."""
    return f"{value.numerator}/{value.denominator}"


def parse_fraction(value: JsonValue) -> Fraction:
    """Return a fraction that a state records, or raise a ValueError."""
    numerator, slash, denominator = value.string().partition("/")
    digits = all(part.isascii() and part.isdigit() for part in (numerator, denominator))
    if not slash or not digits or not int(denominator):
        raise value.fail("a fraction such as '7/10'")
    return Fraction(int(numerator), int(denominator))
