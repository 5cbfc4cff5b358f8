"""Train a small language model on packed documents. Kill it at any moment, and start it on other ranks.

    python examples/pretrain/make_data.py /tmp/pretrain
    torchrun --nproc-per-node 2 examples/pretrain/train.py --data /tmp/pretrain --run-dir /tmp/run

Documents are packed into sequences of one length, and no token attends across documents. The training continues from
its newest checkpoint, whichever number of ranks saved it. So that tokens can be counted, a checkpoint also holds the
numbers of those that its model was trained on.
"""

from __future__ import annotations

import argparse
import gc
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # DDP imports it; imported later, it would keep the process group alive
from make_data import VOCABULARY
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from torch_dataloader_utils import Packing, StructuredDataLoader, StructuredDataset
from torch_dataloader_utils.distributed import gather_states, load_gathered, require_same_plan

LENGTH = 256
STEP_SEQUENCES = 12  # of all ranks together, whatever their number
LEARNING_RATE = 3e-3
HEADS = 4
NO_TOKEN = -1  # the number of padding, and of the tokens that end documents


def make_loader(arguments: argparse.Namespace) -> tuple[StructuredDataLoader, StructuredDataset]:
    """Open the documents. Rank and number of ranks come from the process group."""
    return StructuredDataset.create_dataloader(
        str(arguments.data / "documents"),
        packing=Packing(
            "tokens",
            length=LENGTH,
            strategy="best_fit",
            separator={"tokens": 0, "ids": NO_TOKEN},
            pad_value={"tokens": 0, "ids": NO_TOKEN},
            outputs=["document_ids", "position_ids"],
        ),
        count_tokens=True,  # so that all ranks make the same number of steps
        uneven_ranks="drop",
        global_batch_size=STEP_SEQUENCES,
        shuffle=True,
        shuffle_buffer_size=50,
        num_workers=arguments.workers,
    )


class Layer(nn.Module):
    """A layer of a transformer.

    Args:
        width: The size of a token's vector.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.parts = nn.Linear(width, 3 * width)
        self.joined = nn.Linear(width, width)
        self.hidden = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, vectors: Tensor, mask: Tensor) -> Tensor:
        """Return vectors of shape (sequences, length, width), given which tokens attend to which."""
        parts = self.parts(self.before(vectors)).unflatten(-1, (3, HEADS, -1)).movedim((2, 3), (0, 2))
        heads = scaled_dot_product_attention(*parts, attn_mask=mask[:, None])
        vectors = vectors + self.joined(heads.transpose(1, 2).flatten(2))
        return vectors + self.hidden(self.between(vectors))


class Model(nn.Module):
    """A transformer that predicts the next token of a document.

    Args:
        width: The size of a token's vector.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.logits = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))

    def forward(self, tokens: Tensor, documents: Tensor, positions: Tensor) -> Tensor:
        """Return the mean loss over all tokens that have one before them in their document, in nats.

        Args:
            tokens: int64 of shape (sequences, length).
            documents: For each token which piece of the sequence it is of, -1 for padding.
            positions: For each token its place in its piece.
        """
        mask = (documents[:, :, None] == documents[:, None, :]).tril()
        vectors = self.tokens(tokens) + self.places(positions)
        for layer in self.layers:
            vectors = layer(vectors, mask)
        follows = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)
        return cross_entropy(self.logits(vectors[:, :-1][follows]), tokens[:, 1:][follows])


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
        self.losses: list[float] = []  # of each step, as rank 0 finds it
        self.trained: list[Tensor] = []  # the numbers of the tokens of all ranks, up to the checkpoint
        self.new: list[Tensor] = []  # the same of this rank, since the newest checkpoint

    def resume(self) -> None:
        """Load the newest checkpoint, whichever number of ranks saved it. The next `iter(loader)` continues there."""
        if self.checkpoint.exists():
            saved = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
            self.model.module.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            load_gathered(self.loader, saved["loaders"])
            self.step, self.starts, self.losses = saved["step"], saved["starts"], saved["losses"]
            self.trained = [saved["trained"]]
        topology = {"ranks": dist.get_world_size(), "workers": self.dataset.num_workers}
        self.starts.append({"step": self.step, **topology})

    def save(self) -> None:
        """Save the model and the loader states of all ranks in one file. All ranks call it together."""
        states = gather_states(self.loader)
        trained: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(trained, torch.cat(self.new) if self.new else torch.empty(0, dtype=torch.int32))
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
            "losses": self.losses,
            "trained": self.trained[0],
        }
        unfinished = self.checkpoint.with_suffix(".unfinished")
        with unfinished.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self.checkpoint)  # atomic: a reader finds the old checkpoint or the new one, complete

    def learn(self, batch: dict[str, Tensor]) -> None:
        """Make one step of the optimizer."""
        self.optimizer.zero_grad()
        loss = self.model(batch["tokens"].long(), batch["document_ids"], batch["position_ids"])
        loss.backward()
        self.optimizer.step()
        self.step += 1
        self.losses.append(loss.item())
        self.new.append(batch["ids"][batch["ids"] != NO_TOKEN])

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
                print(f"epoch {epoch}, this rank: fill rate {self.dataset.get_metrics()['fill_rate']:.4f}", flush=True)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True, help="the folder that make_data.py wrote")
    parser.add_argument("--run-dir", type=Path, required=True, help="where the checkpoint is kept")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2, help="of each rank")
    parser.add_argument("--width", type=int, default=64, help="of the model")
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
