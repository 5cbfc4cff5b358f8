"""Columns that are unified by themselves become what they are among all columns."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dataloader_utils.formats.schema import AllColumns, FileSchema

TYPES = [pa.int8(), pa.int32(), pa.float32(), pa.string(), pa.large_string(), pa.list_(pa.int16()), pa.bool_()]
NAMES = "abcd"

COLUMNS = st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(TYPES)), max_size=5)
"""A file may lack a name, and have one twice."""


def columns_of(schemas: Sequence[pa.Schema], constants: Sequence[str], table: pa.Schema | None = None) -> AllColumns:
    files = tuple(FileSchema(f"part-{number}", schema) for number, schema in enumerate(schemas))
    return AllColumns(files, {}, pa.schema([(name, pa.string()) for name in constants]), table)


@given(st.lists(COLUMNS, min_size=1, max_size=4), st.sets(st.sampled_from("de")), st.sets(st.sampled_from("abcde")))
def test_columns_by_themselves_are_unified_as_among_all(
    files: list[list[tuple[str, pa.DataType]]], constants: set[str], wanted: set[str]
):
    columns = columns_of([pa.schema(file) for file in files], sorted(constants))
    whole, found = columns.unified, columns.of(wanted)
    if wanted.issubset(whole.schema.names):
        assert {name: found.problems.get(name) for name in wanted} == {
            name: whole.problems.get(name) for name in wanted
        }
        assert [found.schema.field(name) for name in sorted(wanted)] == [
            whole.schema.field(name) for name in sorted(wanted)
        ]
    else:
        assert found is whole


def test_a_column_that_no_file_has_is_looked_for_among_all():
    columns = columns_of([pa.schema([("a", pa.int8()), ("b", pa.int8())])], ["d"])
    assert columns.of(["a"]).schema.names == ["a", "d"]
    assert columns.of(["a", "c"]).schema.names == ["a", "b", "d"]


@pytest.mark.parametrize("wanted", [["a"], ["c"], []])
def test_the_columns_of_a_table_are_those_that_it_defines(wanted: list[str]):
    table = pa.schema([("a", pa.int64()), ("b", pa.string())])
    columns = columns_of([pa.schema([("old", pa.int8())])], [], table)
    assert columns.of(wanted).schema.equals(table)
    assert columns.unified.schema.equals(table)
