"""How many bytes columns take, also those of views, which pyarrow before 24 does not tell."""

from __future__ import annotations

import pyarrow as pa
import pytest

from torch_dataloader_utils.columns.arrow import nbytes

TEXTS = ["a", None, "longer than what fits into a view"] * 50


def test_plain_columns_take_what_arrow_says():
    table = pa.table({"x": range(150), "s": TEXTS})
    assert nbytes(table) == table.nbytes
    assert nbytes(table["s"].slice(10, 5)) == table["s"].slice(10, 5).nbytes


@pytest.mark.parametrize("dtype", [pa.string_view(), pa.binary_view()], ids=str)
def test_views_take_at_least_their_characters(dtype):
    column = pa.chunked_array([TEXTS], dtype)
    characters = sum(len(text or "") for text in TEXTS)
    assert characters <= nbytes(column) < 10 * characters
    structs = pa.StructArray.from_arrays([pa.array(TEXTS, dtype)], ["s"])
    whole = pa.table({"x": range(150), "s": column, "t": structs})
    assert nbytes(whole) == sum(map(nbytes, whole.columns))
    assert nbytes(whole.to_batches()[0]) >= 2 * characters
