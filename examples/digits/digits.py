"""What the three training scripts share: the images, the model, and the loss."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from torch_dataloader_utils import StructuredDataLoader, StructuredDataset, UnevenRanksWarning

LEARNING_RATE = 0.05
MOMENTUM = 0.9


class Batch(NamedTuple):
    """The input of one step."""

    images: Tensor  # float32 [rows, 1, 8, 8], from 0 to 1
    labels: Tensor  # int64 [rows]
    ids: Tensor  # int64 [rows]


def decode(rows: Mapping[str, Any]) -> Batch:
    """Decode the PNG files of a batch. This is the loader's `collate_fn`, which runs in its workers."""
    pixels = [np.asarray(Image.open(io.BytesIO(file))) for file in rows["image"]]
    images = torch.from_numpy(np.stack(pixels)).unsqueeze(1).float() / 255
    return Batch(images, rows["label"], rows["id"])


def training_loader(data: Path, batch_size: int) -> tuple[StructuredDataLoader, StructuredDataset]:
    """Open the images to train on. Rank and number of ranks come from the process group, or from the launcher."""
    return StructuredDataset.create_dataloader(
        str(data / "training"),
        batch_size=batch_size,  # of this rank
        shuffle=True,
        shuffle_seed=42,
        shuffle_buffer_size=200,  # rows of two row groups are shuffled together, drawn from all files
        uneven_ranks="drop",  # all ranks make the same steps; leaves out at most num_ranks - 1 rows
        num_workers=2,
        collate_fn=decode,
    )


def validation_loader(data: Path, batch_size: int) -> StructuredDataLoader:
    """Open the images to validate with. Each is on one rank: their counts are summed afterwards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnevenRanksWarning)  # while it validates, no rank waits for another
        loader, _ = StructuredDataset.create_dataloader(
            str(data / "validation"), batch_size=batch_size, split_rows=100, num_workers=0, collate_fn=decode
        )
    return loader


class Model(nn.Sequential):
    """A small convolutional network: images in, logits of the ten digits out."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def loss_and_counts(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the mean loss of a batch, and what is summed over batches and ranks.

    The sums are float64 [3]: the loss of all rows, the number of rows that are classified right, and that of all rows.
    """
    logits = model(batch.images)
    loss = cross_entropy(logits, batch.labels)
    rows = len(batch.labels)
    correct = (logits.argmax(dim=1) == batch.labels).sum().item()
    return loss, torch.tensor([loss.item() * rows, correct, rows], dtype=torch.float64)


def means(sums: Tensor) -> dict[str, float]:
    """Return the loss and the accuracy."""
    loss, correct, rows = sums.tolist()
    return {"loss": loss / rows, "accuracy": correct / rows}
