"""Arrow values of one shape as arrays, against Arrow's own lists of them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from torch_dataloader_utils.columns.dense import dense_array


@given(st.lists(st.booleans(), max_size=40), st.integers(0, 20), st.integers(0, 40), st.sampled_from([None, 1, 3]))
def test_booleans_of_any_slice_are_those_of_arrow(flags, start, rows, size):
    values = pa.array(flags, pa.bool_())
    if size is not None:
        values = pa.FixedSizeListArray.from_arrays(values.slice(len(values) % size), size)
    part = values.slice(min(start, len(values)), rows)
    expected = part.to_pylist()
    array = dense_array(part, numpy_times=False)
    assert (array.dtype, array.tolist()) == (np.bool_, expected)
    array[...] = ~array  # what is delivered belongs to the user
    assert part.to_pylist() == expected
