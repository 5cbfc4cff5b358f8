"""The skipped steps of a state from outside to frozen values. Pure."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from torch_dataloader_utils.checkpoint.json_value import JsonValue
from torch_dataloader_utils.checkpoint.saved_state import SavedRestored, SavedRows, SavedSkips
from torch_dataloader_utils.checkpoint.skipped_steps import Mark, Place, SkippedSteps
from torch_dataloader_utils.planning.row_ranges import Windows

PAIR = 2


def parse_skips(skipped: JsonValue, rows: Callable[[JsonValue], SavedRows]) -> SavedSkips:
    """Check what a state records of skipped steps, or raise a ValueError that names the wrong value.

    `rows` checks what it records of their rows.
    """
    skips = tuple(map(_skip, skipped["marks"].items()))
    if any(not _is_before(skip.end, other.begin) for skip, other in pairwise(skips)):
        raise skipped["marks"].fail("ranges of steps in their order")
    restores, restored = skipped["restores"].boolean(), skipped["restored"]
    if not restored.is_null and not restores:
        raise restored.fail("None, as restores is false")
    return SavedSkips(
        steps=parse_steps(skipped["steps"]),
        skips=skips,
        restores=restores,
        restored=None if restored.is_null else _restored(restored),
        rows=rows(skipped),
    )


def parse_steps(steps: JsonValue) -> Windows:
    """Return ranges of steps in rising order, or raise a ValueError."""
    windows = tuple(map(_pair, steps.items()))
    bounds = [bound for window in windows for bound in window]
    if any(bound >= following for bound, following in pairwise(bounds)):
        raise steps.fail("rising ranges of steps of which no two touch")
    return windows


def _skip(marks: JsonValue) -> SkippedSteps:
    found = tuple(map(_mark, marks.items()))
    if len(found) != PAIR or not _is_before(*found) or found[0].step == found[1].step:
        raise marks.fail("the beginning and the end of skipped steps")
    return SkippedSteps(*found)


def _is_before(mark: Mark, other: Mark) -> bool:
    """Whether a mark is not behind another one in any stream."""
    same_streams = len(mark.places) == len(other.places)
    in_order = all(place <= following for place, following in zip(mark.places, other.places, strict=False))
    return mark.step <= other.step and same_streams and in_order


def _mark(mark: JsonValue) -> Mark:
    return Mark(mark["step"].integer(), mark["next_worker"].integer(), _places(mark["places"]))


def _restored(restored: JsonValue) -> SavedRestored:
    return SavedRestored(restored["number"].integer(), restored["next_worker"].integer(), _places(restored["places"]))


def _places(places: JsonValue) -> tuple[Place, ...]:
    return tuple(map(_pair, places.items()))


def _pair(pair: JsonValue) -> tuple[int, int]:
    numbers = [number.integer() for number in pair.items()]
    if len(numbers) != PAIR:
        raise pair.fail("two numbers")
    return numbers[0], numbers[1]
