"""Split strategies: a user's shards are delivered, mixed and resumed like any, and checked before they are used."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from support import DEFAULT_FILES, batches_of, open_loader, write_dataset

from torch_dataloader_utils import CheckpointMismatchError, Manifest, Shard, Split, SplitStrategy

ROWS = sum(rows for rows, _ in DEFAULT_FILES)


def splits_of(manifest: Manifest) -> list[Split]:
    """One split for each row group."""
    splits = []
    for file in manifest.files:
        first = 0
        for group in file.row_groups:
            splits.append(Split(file.path, first, group.rows))
            first += group.rows
    return splits


@dataclass(frozen=True)
class Backwards(SplitStrategy):
    """Row groups in pairs, the last ones first, turned round in every other epoch."""

    size: int = 2

    def shards(self, manifest: Manifest, epoch: int) -> Iterable[Shard]:
        splits = splits_of(manifest)[:: 1 if epoch % 2 else -1]
        return [Shard(tuple(splits[start : start + self.size])) for start in range(0, len(splits), self.size)]


@pytest.fixture
def data(tmp_path):
    assert write_dataset(tmp_path) == ROWS
    return tmp_path


def row_ids(manifest, shards):
    """The rows of shards, in order."""
    first = manifest.first_rows
    return [
        first[split.path] + row
        for shard in shards
        for split in shard.splits
        for row in range(split.row_offset, split.row_offset + split.row_length)
    ]


def test_shards_are_delivered_as_the_strategy_returns_them_epoch_by_epoch(data):
    strategy = Backwards()
    loader, dataset = open_loader(data, split_strategy=strategy)
    manifest = dataset._opened_files.manifest
    for epoch in (0, 1):
        dataset.set_epoch(epoch)
        expected = row_ids(manifest, strategy.shards(manifest, epoch))
        assert [row for batch in batches_of(loader) for row in batch] == expected
    assert len(loader) == -(-ROWS // 16)


@pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning")
def test_shards_are_dealt_to_ranks_round_robin(data):
    strategy = Backwards()
    for rank in (0, 1, 2):
        loader, dataset = open_loader(data, split_strategy=strategy, num_ranks=3, rank=rank, uneven_ranks="allow")
        manifest = dataset._opened_files.manifest
        expected = row_ids(manifest, list(strategy.shards(manifest, 0))[rank::3])
        assert [row for batch in batches_of(loader) for row in batch] == expected


@pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning")
@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("buffer", [40, 90, 1000])
def test_rows_are_shuffled_within_the_strategys_shards_and_no_further(data, size, buffer):
    strategy = Backwards(size)
    loader, dataset = open_loader(data, split_strategy=strategy, shuffle=True, shuffle_buffer_size=buffer)
    delivered = [row for batch in batches_of(loader) for row in batch]
    manifest = dataset._opened_files.manifest
    for shard in strategy.shards(manifest, 0):
        own = row_ids(manifest, [shard])
        part, delivered = delivered[: len(own)], delivered[len(own) :]
        assert sorted(part) == sorted(own)
        assert part != own or len(own) < 8
    assert delivered == []


OPTIONS = {
    "in order": {},
    "mixed": {"shuffle": True, "shuffle_buffer_size": 60},
    "filtered": {"filters": pc.field("value") > 137},
    "two workers' worth of ranks": {"num_ranks": 2, "rank": 1, "uneven_ranks": "pad"},
}


def test_a_state_of_the_same_strategy_with_other_parameters_is_refused_though_the_shards_begun_are_the_same(data):
    @dataclass(frozen=True)
    class Turned:
        step: int

        def shards(self, manifest, epoch):  # noqa: ARG002 - the same in every epoch
            first, *others = splits_of(manifest)
            return [Shard((split,)) for split in [first, *others[:: self.step]]]

    class Same(Turned):
        pass

    loader, _ = open_loader(data, split_strategy=Turned(1))
    next(iter(loader))

    for strategy in (Turned(-1), Same(1)):
        other, _ = open_loader(data, split_strategy=strategy)
        with pytest.raises(CheckpointMismatchError, match="split_strategy changed"):
            other.load_state_dict(loader.state_dict())
    again, _ = open_loader(data, split_strategy=Turned(1))
    again.load_state_dict(loader.state_dict())


@pytest.mark.parametrize("batch_size", [48, pytest.param(16, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_resume_after_any_batch_delivers_what_was_to_come(data, name, batch_size):
    options = {"split_strategy": Backwards(), "batch_size": batch_size, **OPTIONS[name]}
    loader, _ = open_loader(data, **options)
    whole = batches_of(loader)
    iterator = iter(loader)
    for stop in range(1, len(whole) + 1):
        next(iterator)
        resumed, _ = open_loader(data, **options)
        resumed.load_state_dict(loader.state_dict())
        assert batches_of(resumed) == whole[stop:]


@pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning")
def test_an_elastic_resume_goes_on_with_the_strategys_shards_less_what_was_delivered(data):
    before, states = [], []
    for rank in (0, 1):
        loader, _ = open_loader(data, split_strategy=Backwards(), num_ranks=2, rank=rank)
        iterator = iter(loader)
        before += [row for _ in range(4 + rank) for row in next(iterator)["row"].tolist()]
        states.append(loader.state_dict())
    after = []
    for rank in (0, 1, 2):
        loader, dataset = open_loader(data, split_strategy=Backwards(), num_ranks=3, rank=rank)
        dataset.load_state_dict(states, strict=False)
        after += [row for batch in batches_of(loader) for row in batch]
    assert sorted(before + after) == list(range(ROWS))


def test_a_worker_process_reads_a_strategys_shards(data):
    loader, _ = open_loader(data, split_strategy=Backwards(), num_workers=2)
    assert sorted(row for batch in batches_of(loader) for row in batch) == list(range(ROWS))


def test_a_file_without_rows_may_be_a_shard_which_is_left_out(data):
    pq.write_table(pq.read_table(data / "part-000.parquet").slice(0, 0), data / "empty.parquet")

    class OneShardPerFile:
        def shards(self, manifest, epoch):  # noqa: ARG002 - the same in every epoch
            return [Shard((Split(file.path, 0, file.rows),)) for file in manifest.files]

    loader, dataset = open_loader(data, split_strategy=OneShardPerFile())
    assert [row for batch in batches_of(loader) for row in batch] == list(range(ROWS))
    assert "empty.parquet" in {file.path for file in dataset._opened_files.manifest.files}


# What is refused ------------------------------------------------------------------------------------------------------


def a_strategy(change):
    """Return a strategy that gives row groups one by one, changed."""

    class Changed:
        def shards(self, manifest, epoch):  # noqa: ARG002 - the same in every epoch
            return change([Shard((split,)) for split in splits_of(manifest)])

    return Changed()


FIRST = "part-000.parquet"
WRONG = {
    "a row group left out": (lambda shards: shards[1:], rf"no shard holds rows 0 to 50 of {FIRST}"),
    "several left out": (lambda shards: shards[3:], r"0 to 50 of .* and 2 more row groups"),
    "one twice": (lambda shards: [*shards, shards[0]], rf"rows 0 to 50 of {FIRST}, which shard 0 holds already"),
    "one twice in a shard": (lambda shards: [Shard(shards[0].splits * 2), *shards[1:]], "which shard 0 holds already"),
    "half a row group": (lambda shards: [Shard((Split(FIRST, 0, 25),)), *shards[1:]], "rows 0 to 25 of .* not whole"),
    "rows beyond the end": (lambda shards: [Shard((Split(FIRST, 0, 999),)), *shards[3:]], "rows 0 to 999"),
    "no rows": (lambda shards: [Shard((Split(FIRST, 0, 0),)), *shards], "rows 0 to 0"),
    "negative rows": (lambda shards: [Shard((Split(FIRST, 50, -50),)), *shards], "rows 50 to 0"),
    "another file": (lambda shards: [*shards, Shard((Split("x.parquet", 0, 5),))], r"'x.parquet', which is not a file"),
    "no splits": (lambda shards: [*shards, Shard(())], "is not a plain bundle"),
    "rounds": (lambda shards: [Shard(shards[0].splits, rounds=2), *shards[1:]], "is not a plain bundle"),
    "nothing": (lambda _: [], r"no shard holds rows 0 to 50"),
}


@pytest.mark.parametrize("case", WRONG)
def test_shards_that_do_not_hold_every_row_once_are_refused_at_construction(data, case):
    change, message = WRONG[case]
    with pytest.raises(ValueError, match=rf"split_strategy .*Changed in epoch 0: .*{message}"):
        open_loader(data, split_strategy=a_strategy(change))


def test_a_later_epoch_is_checked_when_it_is_set(data):
    class OnceOnly(Backwards):
        def shards(self, manifest, epoch):
            return list(super().shards(manifest, epoch))[epoch:]

    _, dataset = open_loader(data, split_strategy=OnceOnly())
    with pytest.raises(ValueError, match="in epoch 1: no shard holds rows"):
        dataset.set_epoch(1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"split_strategy": 7}, TypeError, "split_strategy=7 has no method shards"),
        ({"split_strategy": Backwards}, TypeError, "make an object of this class"),
        ({"split_strategy": a_strategy(lambda _: None)}, TypeError, "returned None, expected shards"),
        ({"split_strategy": a_strategy(lambda _: [Shard((Split(FIRST, "0", 5),))])}, ValueError, "two integers"),
        ({"split_strategy": a_strategy(lambda _: [Shard((Split(FIRST, None, None),))])}, TypeError, "two integers"),
        ({"split_strategy": a_strategy(lambda _: [3])}, TypeError, "returned 3 as shard 0"),
        ({"split_strategy": Backwards(), "shuffle": True}, ValueError, "decides the order of shards"),
        ({"split_strategy": Backwards(), "split_rows": 5}, ValueError, "split_rows=5 has no meaning"),
    ],
    ids=["no method", "a class", "nothing", "no integers", "no numbers", "no shard", "shuffled", "split_rows"],
)
def test_what_is_no_strategy_and_what_would_contradict_it_is_refused(data, options, error, message):
    with pytest.raises(error, match=message):
        open_loader(data, **options)


def test_a_state_of_another_strategy_or_of_none_is_refused_by_name(data):
    state = open_loader(data, split_strategy=Backwards())[0].state_dict()
    plain, _ = open_loader(data)
    with pytest.raises(
        CheckpointMismatchError, match=r"split_strategy changed: checkpoint='.*Backwards [0-9a-f]{16}', current=None"
    ):
        plain.load_state_dict(state)


def test_a_state_whose_shards_the_strategy_does_not_return_any_more_is_refused(data):
    loader, _ = open_loader(data, split_strategy=Backwards(2))
    iterator = iter(loader)
    next(iterator)
    other, _ = open_loader(data, split_strategy=Backwards(3))
    with pytest.raises(CheckpointMismatchError, match="is not in this rank's plan"):
        other.load_state_dict(loader.state_dict())


def test_row_groups_that_a_filter_rules_out_are_taken_from_the_shards(data):
    loader, dataset = open_loader(data, split_strategy=Backwards(), filters=pc.field("value") >= 300)
    assert sorted(row for batch in batches_of(loader) for row in batch) == list(range(300, ROWS))
    assert dataset.get_metrics()["row_groups_pruned"] > 0
    np.testing.assert_array_less(0, dataset.get_metrics()["bytes_pruned"])
