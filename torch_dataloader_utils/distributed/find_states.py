"""The states of a loader in plain values: in checkpoint dictionaries of any framework, whatever they are kept under."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch_dataloader_utils.checkpoint.parse.states import PUBLISHED_KEYS
from torch_dataloader_utils.distributed.entries import ALL_RANKS, merge_shared
from torch_dataloader_utils.distributed.gather import parse_json
from torch_dataloader_utils.errors import cut, nearest, shown

OWN_RANK = re.compile(r"rank-(\d+)-of-\d+")
"""The name of a rank's own entry in a ``torch.distributed.checkpoint``."""

EXPECTED = (
    "expected a state, a list of all ranks' states, a file of one of these as JSON or by torch.save, or a checkpoint "
    "that holds them"
)

MOST_VALUES = 20_000_000
"""More values than any state has. A few bytes of a pickle can stand for more, each within the next."""

States = list[dict[str, Any]]


def find_states(value: Any, name: str, key: str | None = None) -> States:
    """Return the states in a plain value: a state, the states of all ranks, or a checkpoint that holds either.

    Args:
        value: What was read.
        name: What it was read from, for messages.
        key: Under which key to look, where there are several.

    Raises:
        ValueError: If there are none, or several and `key` does not choose one of them; the message names them.
    """
    try:
        found = dict(_found(value, "", name, set()))
        known: dict[int, int] = {}
        largest = max((_size(state, known) for states in found.values() for state in states), default=0)
    except RecursionError:
        raise ValueError(f"{name} is nested too deeply: {EXPECTED}") from None
    if largest > MOST_VALUES:
        raise ValueError(f"{name} holds a state with more than {MOST_VALUES:,} values, many of them repeated")
    if not found:
        raise ValueError(f"{name} holds no state of a loader: it is {described(value)}; {EXPECTED}")
    chosen = found if key is None else {path: states for path, states in found.items() if _is_under(path, key)}
    if len(chosen) == 1:
        return next(iter(chosen.values()))
    if key is not None and not chosen:
        if set(found) == {""}:
            raise ValueError(f"{name} is the state of one loader, and has none under {key!r}: leave out the key")
        raise ValueError(f"{name} holds no state of a loader under {key!r}{nearest(key, found)}")
    paths = ", ".join(map(repr, chosen))
    first = next(iter(chosen))
    raise ValueError(f"{name} holds the states of several loaders, under {cut(paths)}: choose one, as key={first!r}")


def _size(value: Any, known: dict[int, int]) -> int:
    """Return how many values a value has, each as often as it is reached. `known` are sizes by id."""
    if not isinstance(value, (Mapping, list, tuple)):
        return 1
    if id(value) not in known:
        known[id(value)] = MOST_VALUES + 1  # if it holds itself
        inner = value.values() if isinstance(value, Mapping) else value
        known[id(value)] = 1 + sum(_size(one, known) for one in inner)
    return known[id(value)]


def described(value: Any) -> str:
    """Return what a value is, for messages."""
    if isinstance(value, Mapping):
        return f"a dictionary with the keys {shown(list(value))}"
    return f"{type(value).__name__} {shown(value)}" if isinstance(value, (str, int, float, list)) else "no plain value"


def _is_under(path: str, key: str) -> bool:
    return path == key or path.startswith((f"{key}.", f"{key}["))


def _found(value: Any, path: str, name: str, seen: set[int]) -> Iterator[tuple[str, States]]:
    """Yield each place in a value that holds states, and the states."""
    states = _states_in(value, f"{name}, {path}" if path else name)
    if states is not None:
        yield path, states
        return
    if not isinstance(value, (Mapping, list, tuple)) or id(value) in seen:
        return
    seen.add(id(value))  # a pickle may hold a value many times, or within itself
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _found(inner, f"{path}.{key}" if path else str(key), name, seen)
    else:
        for number, inner in enumerate(value):
            yield from _found(inner, f"{path}[{number}]", name, seen)


def _states_in(value: Any, name: str) -> States | None:
    """Return the states that a value is, in any of the forms in which they are kept; None if it is something else."""
    if _is_state(value):
        return [value]
    if isinstance(value, (list, tuple)):
        return _listed(value, name)
    if not isinstance(value, Mapping):
        return None
    if value.keys() == {"shared", "ranks"}:
        return merge_shared(value, name)
    if isinstance(value.get(ALL_RANKS), str):
        return merge_shared(parse_json(value[ALL_RANKS], name), name)
    own = {key: text for key, text in value.items() if OWN_RANK.fullmatch(str(key)) and isinstance(text, str)}
    in_order = sorted(own, key=lambda key: int(str(key).split("-")[1]))
    return [parse_json(own[key], name) for key in in_order] or None


def _listed(values: Sequence[Any], name: str) -> States | None:
    """Return the states that a list is; None if it holds no state itself. One of a few must not pass for all."""
    others = [number for number, value in enumerate(values) if not _is_state(value)]
    if len(others) == len(values):
        return None
    if others:
        raise ValueError(
            f"{name} is a list of states, but its item {others[0]} is none: {described(values[others[0]])}"
        )
    return list(values)


def _is_state(value: Any) -> bool:
    return isinstance(value, Mapping) and ("plan_algorithm" in value or value.keys() == PUBLISHED_KEYS)
