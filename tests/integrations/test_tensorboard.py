"""TensorBoard: what its own reader finds in the files that were written."""

from __future__ import annotations

import pytest
from support import open_loader, write_dataset
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from torch_dataloader_utils import Event
from torch_dataloader_utils.integrations import tensorboard
from torch_dataloader_utils.integrations.tensorboard import TensorBoardHook


def scalars_of(directory):
    """Return the steps and values of each scalar that was written."""
    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in tags}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_rates_are_written_at_each_epochs_end(tmp_path, num_workers):
    write_dataset(tmp_path / "data")
    with SummaryWriter(str(tmp_path / "log")) as writer:
        loader, _ = open_loader(tmp_path / "data", num_workers=num_workers, hooks=[TensorBoardHook(writer)])
        batches = [sum(1 for _ in loader) for _ in range(2)]
    scalars = scalars_of(tmp_path / "log")
    assert [step for step, _ in scalars["loader/rows_per_second"]] == [batches[0], sum(batches)]
    assert all(value > 0 for _, value in scalars["loader/rows_per_second"])
    assert all(0 <= value <= 1 for _, value in scalars["loader/waiting"])
    shares = [scalars[tag] for tag in scalars if tag.startswith("loader/workers/")]
    assert len(shares) == 6
    for epoch in range(2):
        assert sum(share[epoch][1] for share in shares) == pytest.approx(1, abs=1e-5)


def test_shards_are_written_too_with_the_users_own_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorboard, "INTERVAL_SEC", 0.0)
    rows = write_dataset(tmp_path / "data")
    events: list[Event] = []
    with SummaryWriter(str(tmp_path / "log")) as writer:
        hooks = [events.append, TensorBoardHook(writer, global_step=lambda: 1000 + len(events))]
        loader, _ = open_loader(tmp_path / "data", hooks=hooks, split_rows=60)
        for _ in loader:
            pass
    written = scalars_of(tmp_path / "log")["loader/rows_per_second"]
    assert [step for step, _ in written] == [1000 + number for number in range(2, len(events) + 1)]
    assert sum(event.rows for event in events if event.kind == "shard_done") == rows


def test_a_stall_is_written_when_it_ends(tmp_path):
    with SummaryWriter(str(tmp_path / "log")) as writer:
        hook = TensorBoardHook(writer)
        hook(Event("epoch_begun", 0, 0, 10))
        hook(Event("stall", 0, 0, 13, seconds=2.5))
    assert scalars_of(tmp_path / "log") == {"loader/stall_seconds": [(3, 2.5)]}
