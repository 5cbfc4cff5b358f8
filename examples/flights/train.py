"""Train a small model on several ranks. Kill it at any moment and start it again: it continues where it stopped.

    torchrun --nproc-per-node 2 examples/flights/train.py --run-dir /tmp/flights

The model predicts whether a flight that has just left will arrive more than 15 minutes late. Two places make
the training resumable, each marked with "Resume": the loader's state is saved with the model, in one file, and
it is loaded before the first batch. With `uneven_ranks="drop"` all ranks make the same number of steps, so no
rank waits for the gradients of one that has already finished.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# DDP imports this module. Imported after `init_process_group`, its default arguments would keep the process group
# alive, and with it gloo's threads. A thread that frees a tensor while Python exits aborts the process.
import torch.distributed.nn.functional
from ledger import Ledger, ledger_path
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

from torch_dataloader_utils import StructuredDataLoader, StructuredDataset
from torch_dataloader_utils.distributed import gather_states, own_state, require_same_plan

NUMBERS = ("dep_delay", "distance", "hour", "minute", "month")
SCALES = (60.0, 1000.0, 24.0, 60.0, 12.0)  # divide by these to bring each column near 1
TEXTS = ("carrier", "origin", "dest")
BUCKETS = 1024
LEARNING_RATE = 0.1


class Batch(NamedTuple):
    """The input of one training step."""

    numbers: Tensor  # float32 [rows, 5]
    buckets: Tensor  # int64 [rows, 3]: indices into the embedding table
    late: Tensor  # float32 [rows]: 1 where the flight arrived more than 15 minutes late
    landed: Tensor  # float32 [rows]: 0 where it was cancelled or diverted, so it has no label
    row_id: Tensor  # int64 [rows]


@functools.cache
def bucket(column: str, value: str) -> int:
    """Hash a string to an index into the embedding table, the same in every process (Python's hash is not)."""
    return zlib.crc32(f"{column}={value}".encode()) % BUCKETS


def prepare(rows: Mapping[str, Any]) -> Batch:
    """Make the tensors of a batch. This is the loader's `collate_fn`, which runs in its workers."""
    columns = [rows[name].float() / scale for name, scale in zip(NUMBERS, SCALES, strict=True)]
    texts = [[bucket(name, value) for value in rows[name]] for name in TEXTS]
    delay = rows["arr_delay"]
    return Batch(
        numbers=torch.stack(columns, dim=1).nan_to_num(),  # a cancelled flight has no departure delay
        buckets=torch.tensor(texts).T.contiguous(),
        late=(delay > 15).float(),
        landed=(~delay.isnan()).float(),
        row_id=rows["row_id"],
    )


def make_loader(data: Path, batch_size: int) -> tuple[StructuredDataLoader, StructuredDataset]:
    """Open the flights. Rank and number of ranks come from the process group."""
    return StructuredDataset.create_dataloader(
        str(data),
        batch_size=batch_size,
        columns=[*NUMBERS, *TEXTS, "arr_delay"],
        shuffle=True,
        shuffle_seed=42,
        shuffle_buffer_size=20_000,
        row_id_column="row_id",
        uneven_ranks="drop",  # leaves out at most num_ranks - 1 rows, so that all ranks make the same steps
        num_workers=2,
        collate_fn=prepare,
    )


class LateModel(nn.Module):
    """Numbers and embedded strings in, one logit for each flight out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BUCKETS, 8)
        width = len(NUMBERS) + 8 * len(TEXTS)
        self.layers = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, numbers: Tensor, buckets: Tensor) -> Tensor:
        """Return the logit of arriving late, float32 [rows]."""
        texts: Tensor = self.embedding(buckets).flatten(start_dim=1)
        logits: Tensor = self.layers(torch.cat([numbers, texts], dim=1))
        return logits.squeeze(1)


@dataclass
class Training:
    """Everything a checkpoint holds."""

    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    loader: StructuredDataLoader
    epoch: int = 0
    step: int = 0  # of this rank, in this epoch
    losses: list[float] = field(default_factory=list)  # one for each step; a checkpoint holds those of rank 0

    def save(self, path: Path) -> None:
        """Resume, 1 of 2: save the model and all ranks' loader states in one file. All ranks call it."""
        states = gather_states(self.loader)
        if dist.get_rank() != 0:
            return
        checkpoint = {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "loaders": states,
            "losses": self.losses,
        }
        unfinished = path.with_suffix(".unfinished")
        with unfinished.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)  # atomic: a reader finds the old checkpoint or the new one, complete

    def resume(self, path: Path) -> None:
        """Resume, 2 of 2: load what `save` wrote, if it did. The next `iter(loader)` continues from there."""
        if not path.exists():
            return
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        state = own_state(checkpoint["loaders"])
        self.model.module.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.loader.load_state_dict(state)
        self.epoch, self.step, self.losses = state["epoch"], state["batches_delivered"], checkpoint["losses"]

    def learn(self, batch: Batch) -> float:
        """Make one step of the optimizer and return the loss: the mean over the flights that landed."""
        self.optimizer.zero_grad()
        logits = self.model(batch.numbers, batch.buckets)
        total = binary_cross_entropy_with_logits(logits, batch.late, weight=batch.landed, reduction="sum")
        loss = total / batch.landed.sum().clamp(min=1)
        loss.backward()  # type: ignore[no-untyped-call]  # torch declares no types for it
        self.optimizer.step()
        return loss.item()


def train_epoch(training: Training, run_dir: Path, checkpoint_every: int, started: float) -> float | None:
    """Train the rest of the epoch. Return the seconds from `started` to its first batch, if it had one."""
    waited = None
    ledger = Ledger(ledger_path(run_dir, dist.get_rank(), training.epoch), training.step)
    for batch in training.loader:
        waited = waited or time.perf_counter() - started
        training.losses.append(training.learn(batch))
        training.step += 1
        ledger.append(training.step, batch.row_id.numpy())
        if training.step % checkpoint_every == 0:
            training.save(run_dir / "checkpoint.pt")
    training.save(run_dir / "checkpoint.pt")
    ledger.close()
    return waited


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--run-dir", type=Path, required=True, help="where the checkpoint is kept")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
    return parser.parse_args()


def train(arguments: argparse.Namespace) -> None:
    """Train from the newest checkpoint, or from the beginning, to the end of the last epoch."""
    torch.manual_seed(0)
    model = DistributedDataParallel(LateModel())
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    started = time.perf_counter()
    loader, dataset = make_loader(arguments.data, arguments.batch_size)
    training = Training(model, optimizer, loader)
    training.resume(arguments.run_dir / "checkpoint.pt")
    require_same_plan(dataset)  # all ranks see the same files and have the same options
    resumed_at, waited = training.step, None

    while training.epoch < arguments.epochs:
        dataset.set_epoch(training.epoch)  # keeps the state that was just loaded, which is of this epoch
        seconds = train_epoch(training, arguments.run_dir, arguments.checkpoint_every, started)
        waited = waited or seconds
        training.epoch += 1
        training.step = 0

    report = {
        "resumed_at_step": resumed_at,
        "seconds_to_first_batch": waited,
        "losses": training.losses,
        "metrics": dataset.get_metrics(),
    }
    (arguments.run_dir / f"report-rank-{dist.get_rank()}.json").write_text(json.dumps(report))


def main() -> None:
    """Join the other ranks, train, and leave."""
    arguments = parse_arguments()
    arguments.run_dir.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    train(arguments)
    gc.collect()  # DDP is in a reference cycle and holds the process group, whose threads would not end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
