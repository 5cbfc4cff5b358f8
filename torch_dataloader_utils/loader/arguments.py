"""Checks of arguments. A wrong argument raises an error that names its parameter."""

from __future__ import annotations

import contextlib
import inspect
import math
import operator
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeAlias

from torch.utils.data import DataLoader

from torch_dataloader_utils.errors import nearest
from torch_dataloader_utils.formats.cpus import environment_count

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
            msg = f"{name}={value!r} is not a number of bytes: write an integer, or a number with a unit, as in "
            raise ValueError(msg + "'128MiB'")
        size = int(Decimal(match[1]) * _UNITS[match[2].lower()])
    else:
        size = require_count(value, name)
    if size < 1:
        raise ValueError(f"{name}={value!r}: at least one byte is needed")
    return size


def require_count(value: object, name: str, least: int | None = 1) -> int:
    """Return an integer of at least `least`, or any integer if that is None."""
    count = None
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            count = operator.index(value)  # type: ignore[arg-type]
    if count is None:
        raise TypeError(f"{name}={value!r} is {type(value).__name__}, expected an integer")
    if least is not None and count < least:
        raise ValueError(f"{name}={value!r}: at least {least} is needed")
    return count


def optional_count(value: object, name: str) -> int | None:
    """Return an integer of at least 1, or None."""
    return None if value is None else require_count(value, name)


def require_flag(value: object, name: str) -> bool:
    """Return True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is {type(value).__name__}, expected True or False")
    return value


def optional_flag(value: object, name: str) -> bool | None:
    """Return True, False or None."""
    return None if value is None else require_flag(value, name)


def require_seconds(value: object, name: str) -> float:
    """Return a number of seconds that is not negative."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ValueError(f"{name}={value!r}: expected a number of seconds")
    return float(value)


def require_timeout(value: object, name: str) -> float:
    """Return a number of seconds that is more than 0 and not infinite."""
    seconds = require_seconds(value, name)
    if not 0 < seconds < math.inf:
        raise ValueError(f"{name}={value!r}: expected a number of seconds, more than 0 and not infinite")
    return seconds


def require_callable(value: object, name: str) -> None:
    """Raise unless the value can be called or is None."""
    if value is not None and not callable(value):
        raise TypeError(f"{name}={value!r} cannot be called")


def require_options(value: object, name: str) -> None:
    """Raise unless the value is a dictionary of options or None. The message does not show it: it may hold a secret."""
    if value is not None and not isinstance(value, Mapping):
        raise TypeError(f"{name} is {type(value).__name__}, expected a dictionary of options for the storage")


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
            raise TypeError(f"create_dataloader() has no parameter {name!r}{nearest(name, sorted(known))}")


def refuse_torch_options(options: Mapping[str, Any], num_workers: int) -> None:
    """Raise if an option of torch's DataLoader contradicts what the loader guarantees."""
    for name in ("sampler", "batch_sampler"):
        if options.get(name) is not None:
            raise ValueError(f"{name} is refused: the dataset itself decides which rows come in which order")
    if not options.get("in_order", True):
        raise ValueError("in_order=False is refused: a resumed run delivers the same batches in the same order")
    if options.get("prefetch_factor") is not None:
        require_count(options["prefetch_factor"], "prefetch_factor")
    if num_workers == 0 and options.get("timeout"):
        raise ValueError("timeout needs worker processes: num_workers is 0")


def require_choice(value: object, name: str, choices: Sequence[str]) -> str:
    """Return a value that is one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}")
    return value


def parse_paths(path: object) -> list[str]:
    """Return one path, or each of a list of them, as strings."""
    if isinstance(path, Mapping):
        raise TypeError("path is a mapping, expected a string, a path, or a list of them; MixedDataset mixes sources")
    if not isinstance(path, (str, os.PathLike, Sequence)) or isinstance(path, (bytes, bytearray)):
        raise TypeError(f"path={path!r} is {type(path).__name__}, expected a string, a path, or a list of them")
    paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
    if not paths:
        raise ValueError("path is an empty list: name at least one file, directory or glob")
    for item in paths:
        if not isinstance(item, (str, os.PathLike)):
            raise TypeError(f"path holds {item!r}, which is {type(item).__name__}: expected a string or a path")
    found = [os.fspath(item) for item in paths]
    if "" in found:  # which file systems take for the working directory
        raise ValueError("path is empty: name a file, directory or glob, such as '.' for the working directory")
    return found


def parse_columns(columns: object, row_id_column: object) -> list[str] | None:
    """Return the columns to deliver, each once; None for all."""
    if row_id_column is not None and (not isinstance(row_id_column, str) or not row_id_column):
        raise TypeError(f"row_id_column={row_id_column!r}: expected the name of the column to add")
    if columns is None:
        return None
    names = None if isinstance(columns, str) or not isinstance(columns, Iterable) else list(columns)
    if names is None or not all(isinstance(name, str) for name in names):
        raise TypeError(f"columns={columns!r}: expected a list of column names")
    if len(set(names)) != len(names):
        raise ValueError(f"columns={names!r} names a column twice")
    if not names and row_id_column is None:
        raise ValueError("columns is empty: a batch would have no column")
    return names


def resolve_rank(
    num_ranks: int | None, rank: int | None, process_group: tuple[int, int] | None
) -> tuple[int, int] | None:
    """Return the number of ranks and this rank: as specified, else of the process group, else of the environment.

    `process_group` is the world size and the rank of the initialised process group, or None. None is returned where
    none of them tells.
    """
    if (num_ranks is None) != (rank is None):
        raise ValueError(f"num_ranks={num_ranks!r} and rank={rank!r}: give both or neither")
    if num_ranks is None or rank is None:
        if process_group is not None:
            return process_group
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return None
        num_ranks, rank = environment_count("WORLD_SIZE"), environment_count("RANK", least=0)
    num_ranks, rank = require_count(num_ranks, "num_ranks"), require_count(rank, "rank", least=0)
    if rank >= num_ranks:
        raise ValueError(f"rank={rank} is out of range: with num_ranks={num_ranks} ranks go from 0 to {num_ranks - 1}")
    return num_ranks, rank
