"""A value from outside and where it stands in what it is part of, so that an error can say so. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

__all__ = ["Place"]


_MISSING = object()


class Place:
    """A value in a state and where it stands, so that an error can say so."""

    def __init__(self, value: object, name: str) -> None:
        self.value = value
        self.name = name

    def fail(self, wanted: str) -> ValueError:
        """Return the error that says what was expected in this place."""
        shown = "is missing" if self.value is _MISSING else f"is {type(self.value).__name__} {self.value!r:.80}"
        return ValueError(f"not a state of this package: {self.name} {shown}, expected {wanted}")

    def __getitem__(self, key: str) -> Place:
        if not isinstance(self.value, Mapping):
            raise self.fail("a dictionary")
        return Place(self.value.get(key, _MISSING), f"{self.name}[{key!r}]")

    def items(self) -> list[Place]:
        """Return the values of a list."""
        if not isinstance(self.value, Sequence) or isinstance(self.value, (str, bytes)):
            raise self.fail("a list")
        return [Place(value, f"{self.name}[{number}]") for number, value in enumerate(self.value)]

    def optional_items(self) -> list[Place]:
        """Return the values of a list; none where there is no such value."""
        return [] if self.missing else self.items()

    @property
    def missing(self) -> bool:
        """Whether there is no such value at all."""
        return self.value is _MISSING

    def integer(self, least: int | None = 0) -> int:
        """Return an integer of at least `least`, or any if that is None."""
        if type(self.value) is not int or (least is not None and self.value < least):
            raise self.fail("an integer" if least is None else f"an integer of at least {least}")
        return self.value

    def boolean(self) -> bool:
        """Return True or False."""
        if not isinstance(self.value, bool):
            raise self.fail("true or false")
        return self.value

    def text(self) -> str:
        """Return a string."""
        if not isinstance(self.value, str):
            raise self.fail("a string")
        return self.value

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
        return self.text()

    @property
    def is_null(self) -> bool:
        """Whether the value is None; a missing one is an error of its own."""
        if self.value is _MISSING:
            raise self.fail("a value or None")
        return self.value is None
