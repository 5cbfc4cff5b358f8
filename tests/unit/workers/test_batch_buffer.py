"""The memory into which collated batches are copied."""

from __future__ import annotations

import torch

from torch_dataloader_utils.workers.collate import BatchBuffer


def test_no_memory_is_taken_for_tensors_without_an_entry_for_each_row():
    rows = 1 << 30
    buffer = BatchBuffer([rows, rows])
    assert buffer.append({"histogram": torch.zeros(1, 1 << 20)}) is None  # 8 PiB for all of these rows
    assert buffer.append({"sum": torch.tensor(1.0)}) is None
    assert not buffer.is_complete
