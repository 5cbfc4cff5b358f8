"""Random mixtures, stopped and continued by other ranks, workers, grids and weights: no row is lost or repeated."""

from __future__ import annotations

import json
from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torch_dataloader_utils import MixedDataset, Source


class Walk:
    """A run of random sources and options, and how often each row was delivered."""

    def __init__(self, root, seed) -> None:
        self.random = Random(seed)
        self.root = root
        self.sizes = {
            f"source {number}": self._write(f"source {number}") for number in range(self.random.randint(1, 4))
        }
        shuffles = self.random.random() < 0.7
        self.options: dict[str, Any] = {
            "rows_per_epoch": self.random.randint(10, 300),
            "source_column": "source",
            "num_workers": 0,
            "shuffle": shuffles,
            "shuffle_buffer_size": self.random.choice([5, 30, 200]) if shuffles else None,
            "uneven_ranks": self.random.choice(["drop", "pad"]),
            "drop_last": self.random.random() < 0.2,
        }
        self.weights = self.new_weights()
        self.taken = Counter()

    def _write(self, name):
        (self.root / name).mkdir()
        rows = 0
        for part in range(self.random.randint(1, 3)):
            more = self.random.randint(1, 80)
            table = pa.table({"x": np.arange(rows, rows + more)})
            pq.write_table(table, self.root / name / f"{part}.parquet", row_group_size=self.random.randint(3, 40))
            rows += more
        return rows

    def new_weights(self):
        while True:
            weights = {name: self.random.choice([0, 1, 2, 3, 0.1, 0.7, 0.05]) for name in self.sizes}
            if sum(weights.values()):
                return weights

    def open(self, ranks, batch_size, grid=None):
        sources = {name: Source(self.root / name) for name in self.sizes}
        options = self.options | {"batch_size": batch_size}
        if grid is not None:
            each, workers = grid
            options |= {"virtual_ranks": ranks * each, "virtual_workers": workers, "batch_size": batch_size * each}
        return [
            MixedDataset.create_dataloader(sources, self.weights, num_ranks=ranks, rank=rank, **options)[0]
            for rank in range(ranks)
        ]

    def deliver(self, loaders, epoch, steps):
        """Deliver so many steps of each rank, or all that are left; return the states."""
        states, made = [], set()
        for loader in loaders:
            loader.set_epoch(epoch)
            batches = iter(loader)
            count = 0
            while steps is None or count < steps:
                batch = next(batches, None)
                if batch is None:
                    break
                count += 1
                self.taken.update(zip(batch["source"].tolist(), batch["x"].tolist(), strict=True))
            made.add(count)
            states.append(json.loads(json.dumps(loader.state_dict())))
        assert len(made) == 1  # all ranks make equal steps
        return states

    def walk(self):
        states, epoch = None, 0
        for _ in range(self.random.randint(2, 6)):
            if self.random.random() < 0.3:
                self.weights = self.new_weights()
            grid = (self.random.randint(1, 2), self.random.randint(1, 3)) if self.random.random() < 0.5 else None
            loaders = self.open(self.random.randint(1, 3), self.random.randint(1, 20), grid)
            for loader in loaders if states else ():
                loader.load_state_dict(states, strict=False)
            last = epoch + self.random.randint(0, 3)
            for whole in range(epoch, last):
                self.deliver(loaders, whole, None)
            states, epoch = self.deliver(loaders, last, self.random.choice([None, 0, 1, 3, 7])), last
        loaders = self.open(1, 7)
        loaders[0].load_state_dict(states, strict=False)
        for whole in range(epoch, epoch + 12):  # until nothing is carried
            self.deliver(loaders, whole, None)
        for number, (name, rows) in enumerate(self.sizes.items()):
            counts = [self.taken[number, row] for row in range(rows)]
            if self.weights[name]:  # a source that rests keeps what was delivered ahead
                assert max(counts) - min(counts) <= 1, name


@pytest.mark.parametrize("seed", range(6))
def test_rows_of_a_source_come_once_a_pass_however_the_run_is_continued(tmp_path, seed):
    Walk(tmp_path, seed).walk()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 250))
def test_rows_come_once_a_pass_in_many_walks(tmp_path, seed):
    Walk(tmp_path, seed).walk()
