"""Arrays in Arrow's memory, several in one buffer."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from torch_dataloader_utils.columns import arrow_memory
from torch_dataloader_utils.columns.arrow_memory import ALIGNMENT, new_arrays


def test_arrays_of_one_buffer_share_no_byte_and_keep_it_until_the_last_one_is_gone(monkeypatch):
    pool = pa.proxy_memory_pool(pa.default_memory_pool())
    monkeypatch.setattr(arrow_memory, "memory_pool", lambda: pool)
    types = [np.dtype(name) for name in ("int8", "float64", "int64", "datetime64[us]")]
    wanted = list(zip([(3, 5), (4,), (0, 2), (7,)], types, strict=True))
    arrays = new_arrays(wanted)
    assert [(array.shape, array.dtype) for array in arrays] == wanted
    assert all(array.ctypes.data % ALIGNMENT == 0 for array in arrays if array.size)
    for number, array in enumerate(arrays):
        array.view(np.uint8)[...] = number
    assert [set(array.view(np.uint8).ravel().tolist()) for array in arrays] == [{0}, {1}, set(), {3}]
    last = arrays[1]
    del arrays, array
    assert pool.bytes_allocated() >= sum(np.dtype(dtype).itemsize for _, dtype in wanted)
    del last
    assert pool.bytes_allocated() == 0


def test_arrays_without_values_have_their_shapes_and_types():
    wanted = [((0,), np.dtype(np.float32)), ((2, 0), np.dtype(np.int64))]
    assert [(array.shape, array.dtype) for array in new_arrays(wanted)] == wanted
    assert new_arrays([]) == []
