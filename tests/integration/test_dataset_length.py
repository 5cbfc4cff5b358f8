"""`len` of a plain DataLoader over a dataset: torch warns where more batches come than it says."""

from __future__ import annotations

import warnings

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pairwise import pairwise
from support import all_rows_of, open_loader
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from torch_dataloader_utils import ProgressUnknownError


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Row groups that leave every number of workers short batches of its own."""
    directory = tmp_path_factory.mktemp("data")
    for number in range(4):
        pq.write_table(pa.table({"x": list(range(101))}), directory / f"{number}.parquet", row_group_size=17)
    return directory


@pairwise(
    most=6,
    loader_class=[DataLoader, StatefulDataLoader],
    num_workers=[0, 2, 3],
    options=[{}, {"num_ranks": 2, "rank": 1}, {"drop_last": True}],
)
def test_a_plain_loader_has_the_length_that_it_delivers(data, loader_class, num_workers, options):
    _, dataset = open_loader(data, batch_size=10, split_rows=20, **options)
    loader = loader_class(dataset, batch_size=None, num_workers=num_workers)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Length of IterableDataset")
        length = len(loader)
        delivered = len(list(loader))
    assert length == delivered
    assert len(dataset) == dataset.num_batches  # its own number of workers


def test_the_number_of_workers_matters_for_the_length(data):
    _, dataset = open_loader(data, batch_size=10, split_rows=20)
    lengths = {len(DataLoader(dataset, batch_size=None, num_workers=workers)) for workers in (0, 3, 7)}
    assert len(lengths) > 1


def test_asking_for_the_length_changes_no_progress(data):
    loader, dataset = open_loader(data, batch_size=10)
    batches = iter(loader)
    rows = all_rows_of([next(batches)])
    state = dataset.state_dict()
    assert len(DataLoader(dataset, batch_size=None, num_workers=2)) >= len(dataset)
    assert dataset.state_dict() == state
    assert sorted(rows + all_rows_of(batches)) == list(range(404))


def test_a_loaded_state_keeps_the_length_of_the_whole_epoch(data):
    loader, dataset = open_loader(data, batch_size=10, num_workers=2)
    batches = iter(loader)
    rows = all_rows_of([next(batches)])
    dataset.load_state_dict(dataset.state_dict())
    plain = DataLoader(dataset, batch_size=None, num_workers=2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Length of IterableDataset")
        assert len(plain) == len(loader)
        assert sorted(rows + all_rows_of(plain)) == list(range(404))
    dataset.load_state_dict(loader.dataset._epoch_state.state_dict())
    with pytest.raises(ProgressUnknownError, match="give it num_workers=2"):
        len(DataLoader(dataset, batch_size=None, num_workers=3))
