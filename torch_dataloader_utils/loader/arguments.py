"""Checks of arguments. A wrong argument raises an error that names its parameter."""

from __future__ import annotations

import contextlib
import inspect
import operator
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeAlias

from torch.utils.data import DataLoader

from torch_dataloader_utils.errors import nearest
from torch_dataloader_utils.workers.cpus import environment_count

__all__ = [
    "TORCH_OPTIONS",
    "PathLike",
    "optional_count",
    "parse_bytes",
    "parse_columns",
    "parse_paths",
    "refuse_path_options",
    "refuse_torch_options",
    "require_callable",
    "require_choice",
    "require_count",
    "require_flag",
    "require_known_names",
    "require_options",
    "require_seconds",
    "resolve_rank",
]

PathLike: TypeAlias = str | os.PathLike[str]
TORCH_OPTIONS = frozenset(inspect.signature(DataLoader).parameters) - {"dataset"} | {"in_order"}
"""The parameters of torch's DataLoader; releases before 2.6 have no `in_order`, and deliver in order."""

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)}
_UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)}


def parse_bytes(value: int | str, name: str) -> int:
    """Read a number of bytes such as 1048576, ``"128MiB"`` or ``"1.5 GB"``."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
        if match is None or match[2].lower() not in _UNITS:
            msg = (
                f"{name}={value!r} is not a number of bytes: write an integer, or a number with a unit, as in '128MiB'"
            )
            raise ValueError(msg)
        size = int(Decimal(match[1]) * _UNITS[match[2].lower()])
    else:
        size = require_count(value, name)
    if size < 1:
        msg = f"{name}={value!r}: at least one byte is needed"
        raise ValueError(msg)
    return size


def require_count(value: object, name: str, least: int | None = 1) -> int:
    """Return an integer of at least `least`, or any integer if that is None."""
    count = None
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            count = operator.index(value)  # type: ignore[arg-type]
    if count is None:
        msg = f"{name}={value!r} is {type(value).__name__}, expected an integer"
        raise TypeError(msg)
    if least is not None and count < least:
        msg = f"{name}={value!r}: at least {least} is needed"
        raise ValueError(msg)
    return count


def optional_count(value: object, name: str) -> int | None:
    """Return an integer of at least 1, or None."""
    return None if value is None else require_count(value, name)


def require_flag(value: object, name: str) -> bool:
    """Return True or False."""
    if not isinstance(value, bool):
        msg = f"{name}={value!r} is {type(value).__name__}, expected True or False"
        raise TypeError(msg)
    return value


def require_seconds(value: object, name: str) -> float:
    """Return a number of seconds that is not negative."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        msg = f"{name}={value!r}: expected a number of seconds"
        raise ValueError(msg)
    return float(value)


def require_callable(value: object, name: str) -> None:
    """Raise unless the value can be called or is None."""
    if value is not None and not callable(value):
        msg = f"{name}={value!r} cannot be called"
        raise TypeError(msg)


def require_options(value: object, name: str) -> None:
    """Raise unless the value is a dictionary of options or None. The message does not show it: it may hold a secret."""
    if value is not None and not isinstance(value, Mapping):
        msg = f"{name} is {type(value).__name__}, expected a dictionary of options for the storage"
        raise TypeError(msg)


def refuse_path_options(options: Iterable[str], table: str) -> None:
    """Raise if a table is opened with options that only files given by path have."""
    wrong = [name for name in ("path", "format", "partitioning", "manifest") if name in options]
    if wrong:
        msg = f"{' and '.join(wrong)}: the files, their format and their partitions are determined by {table}"
        raise TypeError(msg)


def require_known_names(names: Iterable[str], known: Iterable[str]) -> None:
    """Raise a TypeError, with the nearest known name, unless all keywords of `create_dataloader` are known."""
    for name in names:
        if name not in known:
            msg = f"create_dataloader() has no parameter {name!r}{nearest(name, sorted(known))}"
            raise TypeError(msg)


def refuse_torch_options(options: Mapping[str, Any], num_workers: int) -> None:
    """Raise if an option of torch's DataLoader contradicts what the loader guarantees.

    Args:
        options: The options.
        num_workers: Number of worker processes.
    """
    for name in ("sampler", "batch_sampler"):
        if options.get(name) is not None:
            msg = f"{name} is refused: the dataset itself decides which rows come in which order"
            raise ValueError(msg)
    if not options.get("in_order", True):
        msg = "in_order=False is refused: a resumed run delivers the same batches in the same order"
        raise ValueError(msg)
    if num_workers == 0 and options.get("timeout"):
        msg = "timeout needs worker processes: num_workers is 0"
        raise ValueError(msg)


def require_choice(value: object, name: str, choices: Sequence[str]) -> str:
    """Return a value that is one of the choices."""
    if not isinstance(value, str) or value not in choices:
        msg = f"{name}={value!r} is not one of {', '.join(map(repr, choices))}"
        raise ValueError(msg)
    return value


def parse_paths(path: object) -> list[str]:
    """Return one path, or each of a list of them, as strings."""
    if not isinstance(path, (str, os.PathLike, Sequence)):
        msg = f"path={path!r} is {type(path).__name__}, expected a string, a path, or a list of them"
        raise TypeError(msg)
    paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
    if not paths:
        msg = "path is an empty list: name at least one file, directory or glob"
        raise ValueError(msg)
    for item in paths:
        if not isinstance(item, (str, os.PathLike)):
            msg = f"path holds {item!r}, which is {type(item).__name__}: expected a string or a path"
            raise TypeError(msg)
    return [os.fspath(item) for item in paths]


def parse_columns(columns: object, row_id_column: object) -> list[str] | None:
    """Return the columns to deliver, each once; None for all."""
    if row_id_column is not None and (not isinstance(row_id_column, str) or not row_id_column):
        msg = f"row_id_column={row_id_column!r}: expected the name of the column to add"
        raise TypeError(msg)
    if columns is None:
        return None
    names = None if isinstance(columns, str) or not isinstance(columns, Iterable) else list(columns)
    if names is None or not all(isinstance(name, str) for name in names):
        msg = f"columns={columns!r}: expected a list of column names"
        raise TypeError(msg)
    if len(set(names)) != len(names):
        msg = f"columns={names!r} names a column twice"
        raise ValueError(msg)
    if not names and row_id_column is None:
        msg = "columns is empty: a batch would have no column"
        raise ValueError(msg)
    return names


def resolve_rank(num_ranks: int | None, rank: int | None, process_group: tuple[int, int] | None) -> tuple[int, int]:
    """Return the number of ranks and this rank.

    Args:
        num_ranks: The number that the caller specified, or None.
        rank: The rank that the caller specified, or None.
        process_group: World size and rank of the initialised process group, or None.
    """
    if (num_ranks is None) != (rank is None):
        msg = f"num_ranks={num_ranks!r} and rank={rank!r}: give both or neither"
        raise ValueError(msg)
    if num_ranks is None or rank is None:
        if process_group is not None:
            return process_group
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return 1, 0
        num_ranks, rank = environment_count("WORLD_SIZE"), environment_count("RANK", least=0)
    num_ranks, rank = require_count(num_ranks, "num_ranks"), require_count(rank, "rank", least=0)
    if rank >= num_ranks:
        msg = f"rank={rank} is out of range: with num_ranks={num_ranks} ranks go from 0 to {num_ranks - 1}"
        raise ValueError(msg)
    return num_ranks, rank
