"""The parts of a checkpoint: model, optimizer, loader and others, as torch.distributed.checkpoint takes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeAlias

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from torch_dataloader_utils.distributed.entries import CheckpointEntry
from torch_dataloader_utils.distributed.gather import Stateful
from torch_dataloader_utils.loader.data_loader import StructuredDataLoader

Optimizers: TypeAlias = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]

OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
"""Each value of an optimizer has a name of its own, under any sharding, and in the stages of a pipeline."""


class Part(Protocol):
    """A part of a checkpoint. What its state is loaded into has the names that were saved."""

    def state_dict(self) -> Any:
        """Return the state. All ranks call it together."""
        ...

    def load_state_dict(self, state: Any, /) -> Any:
        """Load a state. All ranks call it together."""
        ...


class _Model:
    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def state_dict(self) -> Any:
        return get_model_state_dict(self._model)

    def load_state_dict(self, state: Any, /) -> None:
        set_model_state_dict(self._model, state)


class _Optimizer:
    def __init__(self, model: torch.nn.Module, optimizer: Optimizers) -> None:
        self._model = model
        self._optimizer = optimizer

    def state_dict(self) -> Any:
        return get_optimizer_state_dict(self._model, self._optimizer, options=OPTIONS)

    def load_state_dict(self, state: Any, /) -> None:
        set_optimizer_state_dict(self._model, self._optimizer, state, options=OPTIONS)


def parts_of(
    model: torch.nn.Module | None, optimizer: Optimizers | None, loader: Stateful | None, others: Mapping[str, Any]
) -> dict[str, Part]:
    """Return the parts by name, in one order on all ranks.

    Raises:
        TypeError: If something has no state, or there is an optimizer without its model.
        ValueError: If there is no part.
    """
    found: dict[str, Part] = {}
    if model is not None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model is {type(model).__name__}, expected a torch.nn.Module")
        found["model"] = _Model(model)
    if optimizer is not None:
        if model is None:
            raise TypeError("an optimizer needs its model, whose names its state gets: give `model` too")
        found["optimizer"] = _Optimizer(model, optimizer)
    for name, value in {"loader": loader, **others}.items():
        if name == "loader" and value is None:
            continue
        if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
            raise TypeError(f"{name} is {type(value).__name__}, expected an object with state_dict and load_state_dict")
        is_loader = name == "loader" or isinstance(value, StructuredDataLoader)
        found[name] = CheckpointEntry(value, elastic=True) if is_loader else value
    if not found:
        raise ValueError("there is nothing to save or to load: give a model, a loader, or anything with a state")
    return dict(sorted(found.items()))
