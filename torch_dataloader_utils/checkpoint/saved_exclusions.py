"""Exclusions in a state: as plain values, checked, and as ranges of files again. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from torch_dataloader_utils.checkpoint.json_value import JsonValue
from torch_dataloader_utils.planning.excluded import NONE_EXCLUDED, Bounds, ExcludedExpression, ExcludedRows, Exclusions
from torch_dataloader_utils.planning.manifest import Layout, Manifest


@dataclass(frozen=True, slots=True)
class SavedExclusions:
    """What a state records as excluded.

    Attributes:
        rows: For each epoch in which rows were excluded, rising, these rows: row numbers of the whole manifest, start,
            stop, start, stop, ..., as the bytes of 64-bit integers.
        expressions: The expressions by which rows are excluded.
    """

    rows: tuple[tuple[int, bytes], ...] = ()
    expressions: tuple[ExcludedExpression, ...] = ()

    def exclusions(self, files: Layout) -> Exclusions:
        """Return them by ranges of files. `files` are those to which row numbers refer."""
        rows = {
            epoch: ExcludedRows.of_row_numbers(np.frombuffer(numbers, "<i8"), files) for epoch, numbers in self.rows
        }
        return Exclusions({epoch: of_files for epoch, of_files in rows.items() if of_files}, self.expressions)


NO_SAVED_EXCLUSIONS = SavedExclusions()


def dump_exclusions(
    manifest: Manifest, exclusions: Exclusions, delivered: ExcludedRows = NONE_EXCLUDED
) -> dict[str, Any] | None:
    """Return exclusions as a state has them; None if there are none.

    `delivered` are the rows that were delivered in the epoch before they were excluded in it.
    """
    if not exclusions:
        return None
    rows = [{"epoch": epoch, "rows": rows.row_numbers(manifest).tolist()} for epoch, rows in exclusions.rows.items()]
    expressions = [{"epoch": one.epoch, "digest": one.digest, "text": one.text} for one in exclusions.expressions]
    return {"rows": rows, "expressions": expressions, "delivered": delivered.row_numbers(manifest).tolist()}


def parse_exclusions(excluded: JsonValue, dataset_rows: int) -> SavedExclusions:
    """Return what a state's ``excluded`` has, or raise a ValueError that names the wrong value."""
    if excluded.missing or excluded.is_null:  # states of earlier releases have none
        return NO_SAVED_EXCLUSIONS
    entries = excluded["rows"].items()
    epochs = [entry["epoch"].integer() for entry in entries]
    if any(epoch >= following for epoch, following in pairwise(epochs)):
        raise excluded["rows"].fail("rising epochs")
    rows = [_row_numbers(entry["rows"], dataset_rows) for entry in entries]
    together = NONE_EXCLUDED
    for numbers in rows:
        of_epoch = ExcludedRows({"": numbers})
        if together.minus(of_epoch) != together:
            raise excluded["rows"].fail("each row in one epoch")
        together = together.union(of_epoch)
    expressions = tuple(
        ExcludedExpression(entry["digest"].string(), entry["text"].string(), entry["epoch"].integer())
        for entry in excluded["expressions"].items()
    )
    if len({expression.digest for expression in expressions}) < len(expressions):
        raise excluded["expressions"].fail("each expression once")
    saved = zip(epochs, (numbers.tobytes() for numbers in rows), strict=True)
    return SavedExclusions(tuple(saved), expressions)


def parse_delivered(excluded: JsonValue, exclusions: SavedExclusions, epoch: int, dataset_rows: int) -> bytes | None:
    """Return the rows that a state records as delivered in its epoch before they were excluded in it.

    None where it does not tell: states of earlier releases do not.
    """
    if excluded.missing or excluded.is_null:
        return b""
    delivered = excluded["delivered"]
    if delivered.missing:
        return None
    if delivered.value == []:
        return b""
    numbers = _row_numbers(delivered, dataset_rows)
    removed = NONE_EXCLUDED
    for since, rows in exclusions.rows:
        if since >= epoch:
            removed = removed.union(ExcludedRows({"": np.frombuffer(rows, "<i8")}))
    if ExcludedRows({"": numbers}).minus(removed):
        raise delivered.fail("rows that were excluded in the state's epoch")
    return numbers.tobytes()


def _row_numbers(numbers: JsonValue, dataset_rows: int) -> Bounds:
    values = numbers.value
    try:
        if isinstance(values, list) and set(map(type, values)) == {int} and not len(values) % 2:
            bounds = np.array(values, dtype="<i8")
            if bounds[0] >= 0 and bounds[-1] <= dataset_rows and (np.diff(bounds) > 0).all():
                return bounds
    except OverflowError:
        pass
    raise numbers.fail("rising pairs of row numbers, none above the dataset's number of rows")
