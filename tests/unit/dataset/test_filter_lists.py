"""`filters` as pyarrow's lists of tuples: the rows that pyarrow itself reads, and states that both forms share."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from support import all_rows_of, open_loader

X, Y = pc.field("x"), pc.field("y")

FORMS = {
    "one condition": ([("x", ">", 30)], X > 30),
    "lists for tuples": ([["x", ">", 30]], X > 30),
    "all of several": ([("x", ">", 30), ("y", "==", "a")], (X > 30) & (Y == "a")),
    "one equals sign": ([("y", "=", "b")], Y == "b"),
    "not equal": ([("y", "!=", "b")], Y != "b"),
    "any of several": ([[("x", "<", 5)], [("x", ">=", 95), ("y", "<=", "a")]], (X < 5) | ((X >= 95) & (Y <= "a"))),
    "in a list": ([("y", "in", ["a", "c"])], Y.isin(["a", "c"])),
    "in an array": ([("x", "in", pa.array([3, 70]))], X.isin([3, 70])),
    "in a tuple": ([("x", "in", (3, 70))], X.isin([3, 70])),
    "in a set": ([("y", "in", {"c", "a", "b"})], Y.isin(["a", "b", "c"])),
    "not in a set": ([("x", "not in", {10, 9})], ~X.isin([9, 10])),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("filtered")
    for number in range(2):
        rows = range(50 * number, 50 * number + 50)
        table = pa.table({"x": list(rows), "y": [["a", "b", "c", None][row % 4] for row in rows], "row": list(rows)})
        pq.write_table(table, directory / f"{number}.parquet", row_group_size=10)
    return directory


def opened(data, filters):
    return open_loader(data, filters=filters, row_id_column=None, output_format="dict", batch_size=4)


@pytest.mark.parametrize("form", FORMS)
def test_lists_of_tuples_keep_the_rows_that_pyarrow_keeps(data, form):
    conditions, _ = FORMS[form]
    loader, _ = opened(data, conditions)
    assert all_rows_of(loader) == pq.read_table(data, filters=conditions)["row"].to_pylist()


@pytest.mark.parametrize("form", FORMS)
def test_both_forms_of_a_filter_load_each_others_states(data, form):
    for saving, loading in (FORMS[form], FORMS[form][::-1]):
        loader, _ = opened(data, saving)
        batches = iter(loader)
        before = all_rows_of([next(batches)])
        state = loader.state_dict()
        other, _ = opened(data, loading)
        other.load_state_dict(state)
        assert before + all_rows_of(other) == pq.read_table(data, filters=saving)["row"].to_pylist()


WRONG = {
    "text": ("x > 3", TypeError, "expected a pyarrow.compute.Expression"),
    "dictionary": ({"x": 3}, TypeError, "expected a pyarrow.compute.Expression"),
    "flat": (("x", ">", 3), TypeError, "expected a pyarrow.compute.Expression"),
    "numbers": ([1, 2], TypeError, "pyarrow's lists of tuples"),
    "expressions in a list": ([X > 3], TypeError, "pyarrow's lists of tuples"),
    "two parts": ([("x", ">")], TypeError, r"filters holds \('x', '>'\): expected"),
    "four parts": ([[("x", ">", 3, 4)]], TypeError, "filters holds"),
    "mixed depth": ([("x", ">", 3), [("y", "==", "a")]], TypeError, "filters holds"),
    "mixed depth, deep first": ([[("y", "==", "a")], ("x", ">", 3)], TypeError, "filters holds"),
    "column": ([(3, ">", 3)], TypeError, "filters holds"),
    "empty": ([], ValueError, "has an empty list"),
    "empty inside": ([[("x", ">", 3)], []], ValueError, "has an empty list"),
    "operator": ([("x", "~", 3)], ValueError, "expected one of the operators ==, =, !="),
    "in a string": ([("y", "in", "abc")], TypeError, "'in' needs a list of values"),
    "in a number": ([("x", "not in", 3)], TypeError, "'not in' needs a list of values"),
    "value": ([("x", ">", object())], ValueError, "filters=.*did not recognize"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_shape_is_an_error_that_says_what_is_expected(tmp_path, case):
    filters, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        open_loader(tmp_path / "nothing here", filters=filters)
