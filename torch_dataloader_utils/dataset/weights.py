"""What users say of shares: weights by source, and schedules of them, as exact fractions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from numbers import Rational
from typing import Any, TypeAlias

from torch_dataloader_utils.errors import nearest
from torch_dataloader_utils.loader.arguments import require_count

Weights: TypeAlias = Mapping[str, float]
"""The share of each source, by name. They are normalised: only their ratios matter."""

WeightSchedule: TypeAlias = Sequence[tuple[int, Weights]]
"""Weights, and from which planned row of the whole run on each of them holds. The first holds from row 0 on."""

ExactSchedule: TypeAlias = tuple[tuple[int, tuple[Fraction, ...]], ...]
"""From which planned row on which shares hold, in the order of the sources. They add up to 1."""


def parse_weights(weights: object, names: Sequence[str]) -> ExactSchedule:
    """Return weights, or a schedule of them, as exact shares.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a source has no weight, a weight is no source's, negative or not finite, all are 0, or a schedule
            does not begin at row 0 and rise.
    """
    if isinstance(weights, Mapping):
        return ((0, exact_shares(weights, names)),)
    if isinstance(weights, (str, bytes)) or not isinstance(weights, Sequence):
        msg = f"weights={weights!r:.80}: expected a mapping from sources to numbers, or a list of pairs (row, mapping)"
        raise TypeError(msg)
    steps = [_parse_step(step, names) for step in weights]
    if not steps or steps[0][0] != 0:
        raise ValueError(f"weights={weights!r:.80}: a schedule begins with the weights from row 0 on")
    for (before, _), (row, _) in pairwise(steps):
        if row <= before:
            raise ValueError(f"weights: row {row} of the schedule does not come after row {before}")
    return tuple(steps)


def _parse_step(step: object, names: Sequence[str]) -> tuple[int, tuple[Fraction, ...]]:
    match step:
        case [row, Mapping() as weights]:
            return require_count(row, "a row of weights", least=0), exact_shares(weights, names)
        case _:
            msg = (
                f"weights holds {step!r:.80}: expected a mapping from sources to numbers, such as {{{names[0]!r}: 1}}, "
            )
            raise TypeError(f"{msg}or a list of pairs (row, mapping)")


def exact_shares(weights: Any, names: Sequence[str]) -> tuple[Fraction, ...]:
    """Return the share of each source, as the exact fraction of the decimals that were given."""
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights={weights!r:.80}: expected a mapping from sources to numbers")
    for name in weights:
        if name not in names:
            raise ValueError(f"weights has {name!r}, which is no source{nearest(str(name), sorted(names))}")
    missing = [name for name in names if name not in weights]
    if missing:
        raise ValueError(f"weights has none for source {missing[0]!r}: give 0 to a source that is to rest")
    exact = [_exact(name, weights[name]) for name in names]
    if not sum(exact):
        raise ValueError(f"weights={dict(weights)!r:.80}: all are 0, so that no source has rows to deliver")
    return tuple(weight / sum(exact) for weight in exact)


def _exact(name: str, weight: object) -> Fraction:
    if isinstance(weight, bool) or not isinstance(weight, (int, float, Decimal, Rational)):
        raise TypeError(f"the weight of source {name!r} is {weight!r:.80}, expected a number")
    if isinstance(weight, (float, Decimal)) and not math.isfinite(weight):
        raise ValueError(f"the weight of source {name!r} is {weight!r}, expected a finite number")
    exact = Fraction(repr(float(weight))) if isinstance(weight, float) else Fraction(weight)
    if exact < 0:
        raise ValueError(f"the weight of source {name!r} is {weight!r}, expected at least 0")
    return exact
