"""Train under torchrun, which starts the ranks again when one dies, also with fewer nodes when one is lost.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # or a restart may fail: see docs/guide/torchrun.md
    torchrun --standalone --nproc-per-node=2 --max-restarts=3 examples/torchrun/train.py --run-dir /tmp/run

Kill a rank, and the training continues from its newest checkpoint. Send it SIGTERM, as a scheduler does before it takes
a machine away, and all ranks save before they end. docs/guide/torchrun.md says how to run it on several nodes. The
model predicts from a few numbers how late a flight arrives. For the count at the end, a checkpoint also holds the ids
of the rows that its model was trained on.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.dataset
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # DDP imports it; imported later, it would keep the process group alive
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torch_dataloader_utils import StructuredDataLoader, StructuredDataset
from torch_dataloader_utils.distributed import gather_states, load_gathered, require_same_plan

NUMBERS = ("dep_delay", "distance", "hour", "month")
SCALES = torch.tensor([60.0, 1000.0, 24.0, 12.0])
FLIGHTS = Path(__file__).parents[1] / "flights" / "data"


def make_loader(data: Path, batch_size: int) -> tuple[StructuredDataLoader, StructuredDataset]:
    """Open the flights. Rank and number of ranks come from the process group."""
    return StructuredDataset.create_dataloader(
        str(data),
        batch_size=batch_size,
        columns=[*NUMBERS, "arr_delay"],
        shuffle=True,
        shuffle_buffer_size=20_000,
        row_id_column="row_id",
        uneven_ranks="drop",  # all ranks make the same steps, as the exchange of gradients needs it
        num_workers=1,  # of each rank: set it, so that it does not depend on the machine
    )


class Training:
    """A model, its loader, and their checkpoint.

    Args:
        data: The flights.
        batch_size: Rows in a batch of a rank.
        checkpoint: The file of the newest checkpoint.
    """

    def __init__(self, data: Path, batch_size: int, checkpoint: Path) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(torch.nn.Linear(len(NUMBERS), 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.loader, self.dataset = make_loader(data, batch_size)
        self.data, self.checkpoint = data, checkpoint
        self.taken = torch.zeros(1)  # 1 once this rank has got SIGTERM
        signal.signal(signal.SIGTERM, lambda _number, _frame: self.taken.fill_(1))
        self.starts = 0
        self.new_rows: list[Tensor] = []  # of this rank, since the newest checkpoint
        self.rows: list[tuple[int, Tensor]] = []  # rank 0: of all ranks, up to the newest checkpoint, with their epochs

    def resume(self) -> None:
        """Load the newest checkpoint, whichever number of ranks saved it. The next `iter(loader)` continues there."""
        if self.checkpoint.exists():
            saved = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
            self.model.module.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            load_gathered(self.loader, saved["loaders"])
            self.starts, self.rows = saved["starts"], saved["rows"]
        self.starts += 1

    def save(self) -> None:
        """Save the model and the loader states of all ranks in one file. All ranks call it together."""
        states = gather_states(self.loader)
        rows: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rows, torch.cat(self.new_rows) if self.new_rows else torch.empty(0, dtype=torch.int64))
        self.new_rows.clear()
        if dist.get_rank() != 0:
            return
        self.rows += [(self.dataset.epoch, rank_rows) for rank_rows in rows]
        checkpoint = {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "loaders": states,
            "starts": self.starts,
            "rows": self.rows,
        }
        unfinished = self.checkpoint.with_suffix(".unfinished")
        with unfinished.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self.checkpoint)  # atomic: a reader finds the old checkpoint or the new one, complete

    def step(self, batch: dict[str, Tensor]) -> None:
        """Make one step of the optimizer."""
        x = torch.stack([batch[name].float() for name in NUMBERS], dim=1) / SCALES
        late = (batch["arr_delay"].float() / 60).nan_to_num()  # a cancelled flight does not arrive
        self.optimizer.zero_grad()
        loss = (self.model(x.nan_to_num()).squeeze(1) - late).square().mean()
        loss.backward()
        self.optimizer.step()
        self.new_rows.append(batch["row_id"].clone())

    def is_taken_away(self) -> bool:
        """Return whether the machine of any rank is about to be taken away. All ranks call it after the same step."""
        of_any = self.taken.clone()
        dist.all_reduce(of_any, dist.ReduceOp.MAX)
        return bool(of_any)

    def train(self, epochs: int, checkpoint_every: int) -> bool:
        """Train the rest of the epoch that a checkpoint was saved in, and all epochs after it.

        Returns:
            Whether that was done; False if it was saved and left because a machine is taken away.
        """
        for epoch in range(self.dataset.epoch, epochs):
            self.loader.set_epoch(epoch)  # keeps the state that was just loaded, which is of this epoch
            for number, batch in enumerate(self.loader, start=1):
                self.step(batch)
                is_taken_away = self.is_taken_away()
                if is_taken_away or number % checkpoint_every == 0:
                    self.save()
                if is_taken_away:
                    dist.barrier()  # torchrun ends all ranks as soon as one has left
                    return False
            self.save()
        return True

    def report(self) -> None:
        """Print how many rows of each epoch the model was not trained on, or more than once."""
        total = pyarrow.dataset.dataset(self.data).count_rows()
        for epoch in sorted({epoch for epoch, _ in self.rows}):
            counts = Counter(row for of, rows in self.rows if of == epoch for row in rows.tolist())
            lost, repeated = total - len(counts), counts.total() - len(counts)
            print(f"epoch {epoch}, start {self.starts}: {total:,} rows, {lost} lost, {repeated} repeated", flush=True)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=FLIGHTS)
    parser.add_argument("--run-dir", type=Path, required=True, help="where the checkpoint is kept; all nodes see it")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
    return parser.parse_args()


def main() -> None:
    """Join the other ranks, train from the newest checkpoint, and leave."""
    arguments = parse_arguments()
    arguments.run_dir.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    training = Training(arguments.data, arguments.batch_size, arguments.run_dir / "checkpoint.pt")
    training.resume()
    require_same_plan(training.dataset)
    is_done = training.train(arguments.epochs, arguments.checkpoint_every)
    if is_done and dist.get_rank() == 0:
        training.report()
    del training
    gc.collect()  # DDP is in a reference cycle and holds the process group, whose threads would not end
    dist.destroy_process_group()
    if not is_done:
        sys.exit(1)  # so that torchrun starts the ranks of the other nodes again


if __name__ == "__main__":
    main()
