"""Train a small language model on a mixture of two texts. Kill it at any moment, and start it on other ranks.

    python examples/mixture/make_data.py /tmp/corpora
    torchrun --nproc-per-node 2 examples/mixture/train.py --data /tmp/corpora --run-dir /tmp/mixture

The shares of the two texts change by a schedule while it trains. It continues from its newest checkpoint, whichever
number of ranks and workers saved it. So that the rows can be counted, a checkpoint also holds what its model was
trained on.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # DDP imports it; imported later, it would keep the process group alive
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from torch_dataloader_utils import MixedDataset, Source, StructuredDataLoader
from torch_dataloader_utils.distributed import gather_states, load_gathered, require_same_plan

SOURCES = ("prose", "code")
STEP_ROWS = 60  # of all ranks together, whatever their number
LEARNING_RATE = 3e-3


class Batch(NamedTuple):
    """The input of one step."""

    passages: Tensor  # int64 [rows, bytes]
    source: Tensor  # int64 [rows]: the place of the row's source in SOURCES
    row: Tensor  # int64 [rows]: the number of the row in its source


def prepare(rows: Mapping[str, Any]) -> Batch:
    """Make the tensors of a batch. This is the loader's `collate_fn`, which runs in its workers."""
    return Batch(rows["passage"].long(), rows["source"], rows["row"])


def schedule(rows: int) -> list[tuple[int, dict[str, float]]]:
    """Return from which row of the run on which shares hold: more and more code."""
    return [
        (0, {"prose": 0.8, "code": 0.2}),
        (rows // 3, {"prose": 0.5, "code": 0.5}),
        (rows * 2 // 3, {"prose": 0.2, "code": 0.8}),
    ]


def make_loader(arguments: argparse.Namespace) -> tuple[StructuredDataLoader, MixedDataset]:
    """Open the texts. Rank and number of ranks come from the process group."""
    return MixedDataset.create_dataloader(
        {name: Source(str(arguments.data / name)) for name in SOURCES},
        weights=schedule(arguments.epochs * arguments.rows_per_epoch),
        rows_per_epoch=arguments.rows_per_epoch,  # a source that comes to its end in an epoch begins its next pass
        source_column="source",
        row_id_column="row",
        global_batch_size=STEP_ROWS,
        shuffle=True,
        shuffle_buffer_size=2_000,
        num_workers=arguments.workers,
        collate_fn=prepare,
    )


class Model(nn.Module):
    """A transformer that predicts the next byte.

    Args:
        width: The size of a byte's vector.
        length: The number of bytes of a passage.
    """

    def __init__(self, width: int, length: int = 128) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Parameter(torch.randn(length, width) / 50)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        self.logits = nn.Linear(width, 256)

    def forward(self, passages: Tensor) -> Tensor:
        """Return the mean loss of each passage, in nats for each byte: float32 [rows]."""
        given, wanted = passages[:, :-1], passages[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(given.shape[1])
        vectors = self.layers(self.bytes(given) + self.places[: given.shape[1]], mask, is_causal=True)
        return cross_entropy(self.logits(vectors).transpose(1, 2), wanted, reduction="none").mean(dim=1)


class Training:
    """A model, its loader, and their checkpoint.

    Args:
        arguments: The command line.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(Model(arguments.width))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.loader, self.dataset = make_loader(arguments)
        self.checkpoint = arguments.run_dir / "checkpoint.pt"
        self.step = 0  # of the whole run
        self.starts: list[dict[str, int]] = []  # at which step the run was started, on how many ranks and workers
        self.trained: list[Tensor] = []  # of all ranks: (step, source, row, loss) of each row, up to the checkpoint
        self.new: list[Tensor] = []  # the same of this rank, since the newest checkpoint

    def resume(self) -> None:
        """Load the newest checkpoint, whichever number of ranks saved it. The next `iter(loader)` continues there."""
        if self.checkpoint.exists():
            saved = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
            self.model.module.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            load_gathered(self.loader, saved["loaders"])
            self.step, self.starts, self.trained = saved["step"], saved["starts"], [saved["trained"]]
        topology = {"ranks": dist.get_world_size(), "workers": self.dataset.num_workers}
        self.starts.append({"step": self.step, **topology})

    def save(self) -> None:
        """Save the model and the loader states of all ranks in one file. All ranks call it together."""
        states = gather_states(self.loader)
        trained: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(trained, torch.cat(self.new) if self.new else torch.empty(0, 4, dtype=torch.float64))
        self.new.clear()
        if dist.get_rank() != 0:
            return
        self.trained = [torch.cat([*self.trained, *trained])]
        checkpoint = {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "loaders": states,
            "step": self.step,
            "starts": self.starts,
            "trained": self.trained[0],
        }
        unfinished = self.checkpoint.with_suffix(".unfinished")
        with unfinished.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self.checkpoint)  # atomic: a reader finds the old checkpoint or the new one, complete

    def learn(self, batch: Batch) -> None:
        """Make one step of the optimizer."""
        self.optimizer.zero_grad()
        losses = self.model(batch.passages)
        losses.mean().backward()
        self.optimizer.step()
        self.step += 1
        steps = torch.full_like(batch.row, self.step)
        self.new.append(torch.stack([steps, batch.source, batch.row, losses.detach()], dim=1).double())

    def train(self, epochs: int, checkpoint_every: int) -> None:
        """Train the rest of the epoch that a checkpoint was saved in, and all epochs after it."""
        for epoch in range(self.dataset.epoch, epochs):
            self.loader.set_epoch(epoch)  # keeps the state that was just loaded, which is of this epoch
            for batch in self.loader:
                self.learn(batch)
                if self.step % checkpoint_every == 0:
                    self.save()
            self.save()
            if dist.get_rank() == 0:
                print(f"epoch {epoch}, this rank: {self.dataset.get_metrics()['sources']}", flush=True)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True, help="the folder that make_data.py wrote")
    parser.add_argument("--run-dir", type=Path, required=True, help="where the checkpoint is kept")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rows-per-epoch", type=int, default=7_800)
    parser.add_argument("--workers", type=int, default=2, help="of each rank")
    parser.add_argument("--width", type=int, default=96, help="of the model")
    parser.add_argument("--checkpoint-every", type=int, default=20, metavar="STEPS")
    return parser.parse_args()


def main() -> None:
    """Join the other ranks, train from the newest checkpoint, and leave."""
    arguments = parse_arguments()
    arguments.run_dir.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    training = Training(arguments)
    training.resume()
    require_same_plan(training.dataset)
    training.train(arguments.epochs, arguments.checkpoint_every)
    del training
    gc.collect()  # DDP is in a reference cycle and holds the process group, whose threads would not end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
