"""A collate_fn that draws random numbers: a resumed run draws what the uninterrupted one would have drawn."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
import torch
from pairwise import pairwise
from stops import each_stop
from support import open_loader, write_dataset
from torch.utils.data import DataLoader

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning"),
]

MIXED = {"shuffle": True, "shuffle_buffer_size": 60}
FILTER = pc.bit_wise_and(pc.field("value"), 5) != 0


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("data")
    write_dataset(directory)
    return directory


def draw(batch: Any) -> tuple[Any, ...]:
    """Draw from all three global generators, and more numbers for some batches than for others."""
    count = len(batch["row"]) % 5 + int(batch["row"][0]) % 3 + 1
    numbers = [random.random() for _ in range(count)]
    numbers += np.random.rand(count).tolist()  # noqa: NPY002 - what is under test
    return (*batch["row"].tolist(), *numbers, *torch.rand(count).tolist())


def opened(path: Path, **options: Any) -> Any:
    return open_loader(path, collate_fn=draw, **options)[0]


ORDERS: dict[str, dict[str, Any]] = {"in order": {}, "mixed": MIXED, "filtered": {**MIXED, "filters": FILTER}}


@each_stop
@pairwise(most=5, order=ORDERS, num_workers=[0, 1, 2])
def test_a_resume_at_any_batch_draws_what_was_to_be_drawn(path, num_workers, order, stops):
    options = {**ORDERS[order], "num_workers": num_workers}
    loader = opened(path, **options)
    loader.dataset.set_epoch(2)
    whole, states = [], [loader.state_dict()]
    for batch in loader:
        whole.append(batch)
        states.append(loader.state_dict())
    for number in stops(states)[:: 1 if num_workers == 0 else 6]:
        random.seed(number)
        torch.manual_seed(number)
        again = opened(path, **options)
        again.load_state_dict(states[number])
        assert list(again) == whole[number:], number


def test_no_two_batches_ranks_epochs_or_seeds_draw_alike(path):
    draws = []
    for seed, epoch, rank in itertools.product((1, 2), (1, 2), (0, 1)):
        loader = opened(path, shuffle_seed=seed, num_ranks=2, rank=rank, num_workers=0, batch_size=5)
        loader.dataset.set_epoch(epoch)
        draws += [batch[-1] for batch in loader]
    assert len(set(draws)) == len(draws)


def test_the_workers_of_a_rank_draw_differently(path):
    draws = [batch[-1] for batch in opened(path, num_workers=3, batch_size=5)]
    assert len(set(draws)) == len(draws)


def test_in_the_training_process_the_generators_go_on_as_if_nothing_had_been_drawn(path):
    def numbers() -> tuple[float, float, float]:
        return random.random(), np.random.rand(), torch.rand(()).item()  # noqa: NPY002 - what is under test

    def run(collate: Any) -> list[Any]:
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002 - what is under test
        torch.manual_seed(3)
        return [numbers() for _ in open_loader(path, collate_fn=collate, num_workers=0)[0]]

    assert run(draw) == run(None)


def test_after_an_elastic_resume_nothing_is_drawn_again(path):
    loaders = [opened(path, num_ranks=2, rank=rank, num_workers=0, batch_size=5) for rank in range(2)]
    draws = [batch[-1] for loader in loaders for batch in itertools.islice(loader, 7)]
    loader = opened(path, num_workers=0, batch_size=5)
    loader.load_state_dict([each.state_dict() for each in loaders], strict=False)
    draws += [batch[-1] for batch in loader]
    assert len(set(draws)) == len(draws)


def test_workers_of_a_plain_loader_draw_by_batch_too(path):
    def drawn() -> list[Any]:
        _, dataset = open_loader(path, collate_fn=draw)
        return list(DataLoader(dataset, batch_size=None, num_workers=2))

    torch.manual_seed(1)
    first = drawn()
    torch.manual_seed(2)
    assert drawn() == first


@pytest.mark.parametrize(("num_workers", "every"), [(0, 1), (1, 3), pytest.param(1, 1, marks=pytest.mark.soak)])
def test_where_a_shard_ends_for_the_filter_is_no_matter(tmp_path, num_workers, every):
    """Whether a row group is read whole or in slices depends on what earlier ones came to.

    The first slice of each file has 1024 rows, which tell how large the others are: here they are of a few rows.
    """
    write_dataset(tmp_path, ((1300, 1300), (1300, 1300)))
    options = {"filters": (pc.field("value") < 100) | (pc.field("value") > 2400), "batch_size": 50}
    options |= {"num_workers": num_workers}
    loader = opened(tmp_path, **options)
    whole, states = [], [loader.state_dict()]
    for batch in loader:
        whole.append(batch)
        states.append(loader.state_dict())
    for number in range(0, len(states), every):
        again = opened(tmp_path, **options, read_ahead_bytes=1000 if number % 2 else 1 << 27)
        again.load_state_dict(states[number])
        assert list(again) == whole[number:], number


def test_no_two_batches_draw_alike_also_where_pieces_of_a_shard_were_cut(path):
    options = {"shuffle": True, "uneven_ranks": "drop", "batch_size": 1}
    loaders = [opened(path, num_ranks=3, rank=rank, num_workers=0, **options) for rank in range(3)]
    draws = [batch[-1] for number, loader in enumerate(loaders) for batch in itertools.islice(loader, 20 + number)]
    loader = opened(path, num_workers=0, **options)
    loader.load_state_dict([each.state_dict() for each in loaders], strict=False)
    draws += [batch[-1] for batch in loader]
    assert len(set(draws)) == len(draws)
