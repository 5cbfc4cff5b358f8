"""Columns that are permuted together take few bytes, however wide each of them is."""

from __future__ import annotations

from itertools import chain, pairwise

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from torch_dataloader_utils.reading.permuting import starts_of_groups


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(0, 100))
def test_each_group_of_columns_takes_as_many_bytes_as_are_allowed_or_has_one_column(widths, most):
    columns = [
        pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), 1, [None, pa.py_buffer(bytes(width))])
        for width in widths
    ]
    table = pa.table(columns, names=[str(number) for number in range(len(widths))])
    groups = [widths[start:stop] for start, stop in pairwise([*starts_of_groups(table, most), len(widths)])]
    assert list(chain.from_iterable(groups)) == widths
    assert all(sum(group) <= most or len(group) == 1 for group in groups)
    assert all(sum(group) + following[0] > most for group, following in pairwise(groups))
