"""How a mixture names the rows of a source's pass: ``name@pass/path``. Pure."""

from __future__ import annotations

from typing import NamedTuple

MIXTURE_KEY = 0
"""Stands for the epoch in the keys of a mixture's permutations: the paths of its shards name the pass."""


class SourcePath(NamedTuple):
    """A file of a source in one of its passes."""

    source: str
    number: int
    path: str


def source_path(source: str, number: int, path: str) -> str:
    """Return the path of a source's file in one of its passes. The source's name has no slash."""
    return f"{source}@{number}/{path}"


def parse_source_path(path: str) -> SourcePath:
    """Return what a path in a mixture names."""
    head, _, rest = path.partition("/")
    source, _, number = head.rpartition("@")
    return SourcePath(source, int(number), rest)
