"""A value from a state, and its path in the state, so that an error can name it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch_dataloader_utils.errors import shown

_MISSING = object()


DIGITS = 100
LARGEST = 10**DIGITS
"""Python writes no number of some thousand digits: the next state could not be saved."""


class JsonValue:
    """A value from outside, and its path in what it is part of, such as ``state['plan']['rows']``.

    Each method checks that the value has the type that its name says, and returns the value or raises a ValueError.
    """

    def __init__(self, value: object, path: str) -> None:
        self.value = value
        self.path = path

    def fail(self, wanted: str) -> ValueError:
        """Return the error that names the value, its path, and what was expected."""
        found = "is missing" if self.missing else f"is {type(self.value).__name__} {shown(self.value)}"
        return ValueError(f"not a state of this package: {self.path} {found}, expected {wanted}")

    def __getitem__(self, key: str) -> JsonValue:
        return JsonValue(self.mapping().get(key, _MISSING), f"{self.path}[{key!r}]")

    def mapping(self) -> Mapping[str, Any]:
        """Return a dictionary."""
        if not isinstance(self.value, Mapping):
            raise self.fail("a dictionary")
        return self.value

    def items(self) -> list[JsonValue]:
        """Return the values of a list."""
        if not isinstance(self.value, Sequence) or isinstance(self.value, (str, bytes)):
            raise self.fail("a list")
        return [JsonValue(value, f"{self.path}[{index}]") for index, value in enumerate(self.value)]

    def optional_items(self) -> list[JsonValue]:
        """Return the values of a list; an empty list where the value is missing."""
        return [] if self.missing else self.items()

    @property
    def missing(self) -> bool:
        """Whether the dictionary has no such key."""
        return self.value is _MISSING

    @property
    def is_null(self) -> bool:
        """Whether the value is None. A missing value is an error."""
        if self.missing:
            raise self.fail("a value or None")
        return self.value is None

    def integer(self, least: int | None = 0) -> int:
        """Return an integer of at least `least`, or any integer if `least` is None."""
        if type(self.value) is not int or (least is not None and self.value < least):
            raise self.fail("an integer" if least is None else f"an integer of at least {least}")
        if abs(self.value) >= LARGEST:
            raise self.fail(f"an integer of at most {DIGITS} digits")
        return self.value

    def optional_integer(self, least: int = 0) -> int | None:
        """Return an integer of at least `least`, or None."""
        return None if self.is_null else self.integer(least)

    def boolean(self) -> bool:
        """Return True or False."""
        if not isinstance(self.value, bool):
            raise self.fail("true or false")
        return self.value

    def string(self) -> str:
        """Return a string."""
        if not isinstance(self.value, str):
            raise self.fail("a string")
        return self.value

    def optional_string(self) -> str | None:
        """Return a string, or None."""
        return None if self.is_null else self.string()

    def number(self) -> float:
        """Return a finite number."""
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)):
            raise self.fail("a number")
        try:
            number = float(self.value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.fail("a finite number")
        return number

    def choice(self, choices: Sequence[str]) -> str:
        """Return one of some strings."""
        if self.value not in choices:
            raise self.fail(" or ".join(map(repr, choices)))
        return self.string()
