"""Ids of parametrized tests: plain words, the same in every process, at any time, under any hash seed and locale."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import is_dataclass
from types import FunctionType
from typing import Any

LONGEST = 60


def plain_id(value: Any, name: str) -> str | None:
    """Return the id of a parameter's value, or None where pytest is to number it: ``options0``, ``options1``.

    Args:
        value: The value.
        name: The parameter.

    Raises:
        ValueError: If the id has to be written by hand.
    """
    if isinstance(value, bytes) or getattr(value, "__name__", None) == "<lambda>":
        raise ValueError(f"{name}={value!r:.80} has no id in plain words: write one, with pytest.param(..., id=...)")
    words = _words(value)
    if words is None:
        return None
    return re.sub(r"[^\w .,:;=+*?/%&#@()'-]+", " ", words).strip()[:LONGEST].strip() or "empty"


def _words(value: Any) -> str | None:
    """Return the words for values that have some."""
    speaks = is_dataclass(value) and type(value).__str__ is not object.__str__
    if speaks or value is None or isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value)):
        return str(value)
    if isinstance(value, (type, FunctionType)):
        return value.__name__
    if isinstance(value, Mapping):
        items = [(str(key), _words(item)) for key, item in value.items()]
        return ", ".join(f"{key}={item}" if item else key for key, item in items) or "none"
    if isinstance(value, (list, tuple)):
        words = [_words(item) for item in value]
        return None if None in words else ", ".join(map(str, words)) or "none"
    return None
