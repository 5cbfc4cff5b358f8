"""What streaming imports of torchvision."""

from __future__ import annotations

import importlib.machinery
import sys
import types


def stand_in_for_torchvision() -> None:
    """Let streaming import torchvision, which only its image datasets need: PyPI's build needs a torch for CUDA."""
    names = ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional")
    for name in names:
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__ = []
        sys.modules[name] = module
    sys.modules["torchvision.datasets"].VisionDataset = object  # type: ignore[attr-defined]
    sys.modules["torchvision.transforms.functional"].to_tensor = None  # type: ignore[attr-defined]
