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


def test_single_images_whose_channels_are_innermost_are_copied_into_one_buffer():
    images = [torch.rand(4, 5, 3).permute(2, 0, 1).unsqueeze(0) for _ in range(2)]
    assert images[0].stride() == (3, 1, 15, 3), "the stride of the one row is no longer any"
    buffer = BatchBuffer([1, 1])
    for image in images:
        copied = buffer.append({"image": image})
        assert copied is not None
        assert torch.equal(copied["image"], image)
    assert buffer.is_complete
    assert buffer.columns["image"].is_contiguous(memory_format=torch.channels_last)


def test_the_memory_is_on_the_cpu_whatever_torchs_default_device_is():
    """Batches were copied to that device, and what arrived had other values."""
    batches = [torch.tensor([1, 2]), torch.tensor([3])]
    buffer = BatchBuffer([2, 1])
    with torch.device("meta"):
        assert all(buffer.append({"x": batch}) is not None for batch in batches)
    assert buffer.columns["x"].tolist() == [1, 2, 3]
