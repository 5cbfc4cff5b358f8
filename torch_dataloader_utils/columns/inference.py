"""Tensors that may be trained on, also while a batch is asked for in torch's inference mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


def normal_mode() -> AbstractContextManager[None]:
    """Make tensors that may be trained on, also while a batch is asked for in torch's inference mode.

    Others that are made with it may be asked for after it.
    """
    return _normal_mode() if torch.is_inference_mode_enabled() else nullcontext()


@contextmanager
def _normal_mode() -> Iterator[None]:
    has_gradients = torch.is_grad_enabled()
    with torch.inference_mode(mode=False), torch.set_grad_enabled(has_gradients):
        yield
