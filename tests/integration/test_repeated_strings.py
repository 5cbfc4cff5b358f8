"""Strings of few values, which Parquet keeps in dictionaries: read so, and delivered as without."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pairwise import pairwise
from support import open_loader

from torch_dataloader_utils import Codes
from torch_dataloader_utils.columns import convert
from torch_dataloader_utils.columns.shared import Shared, shared
from torch_dataloader_utils.errors import UnreadableFileError
from torch_dataloader_utils.formats.parquet.codec import ParquetLayout

ROWS, GROUP = 120, 30
COLORS = ["red", "green", "blue"]
KINDS = {"few": 3, "many": 4 * ROWS}
"""How many values there are in the color columns of a file; with many, no two rows have the same."""


DICTIONARIES = "torch_dataloader_utils.formats.parquet.dictionaries"


@pytest.fixture(autouse=True)
def small_row_groups_have_dictionaries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the small files of these tests as large ones are read. Workers are forked, so they do, too."""
    monkeypatch.setattr(f"{DICTIONARIES}.LEAST_ROWS", 1)


def color(row: int, values: int) -> str | None:
    if row % 11 == 5:
        return None
    return COLORS[row % 3] if values == len(COLORS) else f"color {row % values}"


def write_files(directory: Path, *kinds: str) -> list[dict[str, Any]]:
    """Write a file of each kind, and return the rows."""
    rows: list[dict[str, Any]] = []
    for number, kind in enumerate(kinds):
        own = [color(row, KINDS[kind]) for row in range(ROWS)]
        columns = {
            "color": pa.array(own, pa.string()),
            "bytes": pa.array([None if value is None else value.encode() for value in own], pa.binary()),
            "category": pa.array(own, pa.string()).dictionary_encode(),
            "number": np.arange(number * ROWS, (number + 1) * ROWS),
        }
        table = pa.table(columns)
        pq.write_table(table, directory / f"{number}.parquet", row_group_size=GROUP)
        rows += table.to_pylist()
    return rows


def delivered(loader: Any) -> Iterator[dict[str, Any]]:
    for batch in loader:
        columns = {name: values if isinstance(values, list) else values.tolist() for name, values in batch.items()}
        for values in zip(*columns.values(), strict=True):
            yield dict(zip(columns, values, strict=True))


@pairwise(
    most=12,
    kinds=[("few",), ("many",), ("few", "many"), ("many", "few", "few")],
    workers=[0, 2],
    buffer=[None, 1, 45, 10_000],
    output=["torch", "numpy", "dict"],
    batch_size=[7, 300],
)
def test_every_row_has_its_own_values(tmp_path, *, kinds, workers, buffer, output, batch_size):
    expected = write_files(tmp_path, *kinds)
    shuffle = {} if buffer is None else {"shuffle": True, "shuffle_buffer_size": buffer}
    options = {"output_format": output, "batch_size": batch_size, "read_ahead_bytes": 900 if buffer else 30_000}
    loader, _ = open_loader(tmp_path, row_id_column=None, num_workers=workers, **shuffle, **options)
    rows = list(delivered(loader))
    if not (shuffle or workers):
        assert rows == expected
    assert sorted(rows, key=lambda row: row["number"]) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_rows_share_the_objects_of_their_values(tmp_path, num_workers):
    write_files(tmp_path, "few")
    loader, _ = open_loader(tmp_path, num_workers=num_workers, batch_size=GROUP)
    for batch in loader:
        for name in ("color", "bytes", "category"):
            assert len(set(map(id, batch[name]))) == len(set(batch[name])) == len(COLORS) + 1


def test_values_that_rows_do_not_repeat_are_not_read_as_dictionaries(tmp_path, monkeypatch):
    write_files(tmp_path, "many")
    monkeypatch.setattr(convert, "shared", lambda name, _: pytest.fail(name))
    loader, _ = open_loader(tmp_path, columns=["color", "bytes"])
    assert sum(len(batch["color"]) for batch in loader) == ROWS


@pytest.mark.parametrize("kinds", [("few",), ("few", "many"), ("many", "few")], ids=",".join)
@pytest.mark.parametrize("shuffle", [{}, {"shuffle": True, "shuffle_buffer_size": 1_000}], ids=["in order", "shuffled"])
def test_codes_of_values_and_what_fills_them(tmp_path, kinds, shuffle):
    rows = write_files(tmp_path, *kinds)
    vocabulary = ["none", *sorted({row["color"] for row in rows} - {None})]
    loader, _ = open_loader(
        tmp_path,
        columns=["color", "number", "bytes"],
        column_formats={"color": Codes(vocabulary)},
        fill_nulls={"color": 0, "bytes": b"none"},
        row_id_column=None,
        **shuffle,
    )
    expected = [
        {
            "color": vocabulary.index(row["color"] or "none"),
            "number": row["number"],
            "bytes": row["bytes"] or b"none",
        }
        for row in rows
    ]
    assert sorted(delivered(loader), key=lambda row: row["number"]) == expected


FILTERS = {
    "equal": pc.field("color") == "red",
    "one of some": pc.field("color").isin(["red", "blue"]),
    "null": pc.field("color").is_null(),
    "part of": pc.match_substring(pc.field("color"), "ee"),
}


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_filters_see_the_values(tmp_path, filters):
    write_files(tmp_path, "few", "many")
    loader, dataset = open_loader(tmp_path, filters=filters)
    expected = pq.read_table(tmp_path, filters=filters)
    assert list(itertools.chain.from_iterable(batch["color"] for batch in loader)) == expected["color"].to_pylist()
    loader, dataset = open_loader(tmp_path)
    dataset.exclude(filters)
    left = [number for batch in loader for number in batch["number"].tolist()]
    assert left == sorted(set(range(2 * ROWS)) - set(expected["number"].to_pylist()))


def test_what_needs_the_values_gets_them(tmp_path):
    write_files(tmp_path, "few")
    types = []

    def noted(table: pa.Table) -> pa.Table:
        types.append(table.schema.field("color").type)
        return table

    loader, _ = open_loader(tmp_path, columns=["color"], transform=noted)
    list(loader)
    assert set(types) == {pa.string()}
    loader, _ = open_loader(tmp_path, columns=["color"], output_format="arrow")
    assert {batch.schema.field("color").type for batch in loader} == {pa.string()}
    loader, _ = open_loader(tmp_path, columns=["color"], column_formats={"color": "packed"}, fill_nulls={"color": ""})
    packed = next(iter(loader))["color"]
    assert packed.values[: packed.offsets[3]].numpy().tobytes() == b"redgreenblue"


ENCODED: dict[str, dict[str, Any]] = {
    "dictionary": {},
    "pages of format 2": {"data_page_version": "2.0"},
    "small dictionary pages": {"dictionary_pagesize_limit": 10},
    "plain": {"use_dictionary": False},
    "by differences": {"use_dictionary": False, "column_encoding": "DELTA_BYTE_ARRAY"},
    "lengths by differences": {"use_dictionary": False, "column_encoding": "DELTA_LENGTH_BYTE_ARRAY"},
    "another column in a dictionary": {"use_dictionary": ["b"], "column_encoding": {"a": "DELTA_BYTE_ARRAY"}},
}


@pytest.mark.parametrize("written", ENCODED.values(), ids=ENCODED)
def test_any_encoding_is_read(tmp_path, written):
    texts = [f"{'long' * 5}{row // 12}" for row in range(ROWS)]
    table = pa.table({"a": texts, "b": texts[::-1]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=GROUP, **written)
    loader, _ = open_loader(tmp_path, row_id_column=None)
    assert list(delivered(loader)) == table.to_pylist()


def test_types_of_columns_may_differ_from_file_to_file(tmp_path):
    own = [COLORS[row % 3] for row in range(ROWS)]
    kinds = [pa.string(), pa.large_string(), pa.string()]
    for number, kind in enumerate(kinds):
        pq.write_table(pa.table({"a": pa.array(own).cast(kind)}), tmp_path / f"{number}.parquet", row_group_size=GROUP)
    loader, _ = open_loader(tmp_path, row_id_column=None)
    assert [row["a"] for row in delivered(loader)] == own * len(kinds)


def test_categories_of_many_files_may_be_more_than_their_indices_have_numbers_for(tmp_path):
    own = [[f"value {row % 100} of {file}" for row in range(ROWS)] for file in range(3)]
    for number, texts in enumerate(own):
        values = sorted(set(texts))
        indices = pa.array(map(values.index, texts), pa.int8())
        table = pa.table({"a": pa.DictionaryArray.from_arrays(indices, values), "row": range(ROWS)})
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=ROWS)
    expected = Counter(itertools.chain.from_iterable(own))
    topology = {"uneven_ranks": "drop", "virtual_ranks": 2, "virtual_workers": 1}
    for options in ({"shuffle": True, "shuffle_buffer_size": 3 * ROWS}, topology, {"batch_size": 3 * ROWS}):
        loader, _ = open_loader(tmp_path, **{"columns": ["a"], "row_id_column": None, **options})
        found = Counter(row["a"] for row in delivered(loader))
        assert found <= expected
        assert found == expected or options is topology


def write_values_in_dictionary(path: Path, dtype: pa.DataType) -> list[str]:
    """Write four row groups of strings whose bytes are in the file as they are, and return the strings."""
    own = [["aaaa", "bbbb", "cccc"][row % 3] for row in range(ROWS)]
    table = pa.table({"a": pa.array(own).cast(dtype), "number": range(ROWS)})
    pq.write_table(table, path, row_group_size=GROUP, compression="none", write_statistics=False)
    return own


HOW_READ: dict[str, dict[str, Any]] = {
    "in order": {},
    "shuffled": {"shuffle": True, "shuffle_buffer_size": ROWS},
    "a part at a time": {"read_ahead_bytes": 300, "batch_size": 10},
    "codes": {"column_formats": {"a": Codes(["aaaa", "bbbb", "cccc"])}},
}


@pytest.mark.parametrize("options", HOW_READ.values(), ids=HOW_READ)
def test_a_value_may_be_in_a_dictionary_twice(tmp_path, options):
    own = write_values_in_dictionary(tmp_path / "a.parquet", pa.string())
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(content.replace(b"bbbb", b"aaaa"))
    own = [value.replace("b", "a") for value in own]
    loader, _ = open_loader(tmp_path, row_id_column=None, **options)
    rows = sorted(delivered(loader), key=lambda row: row["number"])
    is_coded = "column_formats" in options
    assert [row["a"] for row in rows] == [{"aaaa": 0, "cccc": 2}[value] if is_coded else value for value in own]


@pytest.mark.parametrize("options", HOW_READ.values(), ids=HOW_READ)
def test_the_first_rows_may_not_have_the_last_values_of_a_dictionary_that_has_one_twice(tmp_path, options):
    own = ["aaaa", "bbbb"] * (ROWS // 2 - 1) + ["cccc", "dddd"]
    table = pa.table({"a": own, "number": range(ROWS)})
    pq.write_table(table, tmp_path / "a.parquet", compression="none", write_statistics=False)
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(content.replace(b"bbbb", b"aaaa").replace(b"dddd", b"cccc"))
    own = [value.replace("b", "a").replace("d", "c") for value in own]
    loader, _ = open_loader(tmp_path, row_id_column=None, **options)
    rows = sorted(delivered(loader), key=lambda row: row["number"])
    is_coded = "column_formats" in options
    assert [row["a"] for row in rows] == [{"aaaa": 0, "cccc": 2}[value] if is_coded else value for value in own]


@pytest.mark.parametrize("options", HOW_READ.values(), ids=HOW_READ)
@pytest.mark.parametrize("dtype", [pa.string(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_an_index_without_a_value_is_an_error(tmp_path, options, dtype):
    write_values_in_dictionary(tmp_path / "a.parquet", dtype)
    chunk = pq.read_metadata(tmp_path / "a.parquet").row_group(1).column(0)
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[chunk.dictionary_page_offset + chunk.total_compressed_size - 6] = 0xFF  # four indices of 3
    (tmp_path / "a.parquet").write_bytes(content)
    loader, _ = open_loader(tmp_path, **options)
    with pytest.raises(UnreadableFileError, match=r"row group 1 of .*not in dictionary bounds"):
        list(loader)


def test_values_that_few_rows_have_are_not_copied_for_the_others(tmp_path, monkeypatch):
    # A dictionary comes whole with each part of its row group, however few rows that has.
    texts = [""] * 500_000
    for number in range(15):
        texts[number * 30_000] = f"{number}" * 80_000
    pq.write_table(
        pa.table({"a": texts}), tmp_path / "a.parquet", compression="zstd", dictionary_pagesize_limit=1 << 24
    )
    made = []

    def noted(name: str, column: pa.ChunkedArray) -> Any:
        found = shared(name, column)
        made.append(found.objects_bytes if isinstance(found, Shared) else 0)
        return found

    monkeypatch.setattr(convert, "shared", noted)
    for options in ({}, {"shuffle": True, "shuffle_buffer_size": 20_000}):
        loader, _ = open_loader(tmp_path, row_id_column=None, batch_size=500, **options)
        assert sum(len(value) for batch in loader for value in batch["a"]) == sum(map(len, texts))
    assert sum(made) <= 4 * len(texts)


def test_a_file_of_many_values_behind_one_of_few_is_not_read_as_dictionaries(tmp_path):
    random = np.random.default_rng(0)
    for number, texts in enumerate([["a", "b"] * 20_000, [random.bytes(20).hex() for _ in range(40_000)]]):
        pq.write_table(pa.table({"a": texts}), tmp_path / f"{number}.parquet")
    loader, dataset = open_loader(tmp_path, row_id_column=None)
    assert sum(len(batch["a"]) for batch in loader) == 80_000
    footers = dataset._stream.read_cache.footers
    layouts = [ParquetLayout(pq.read_metadata(tmp_path / f"{number}.parquet"), ["a"]) for number in range(2)]
    assert footers.encoded == {"a": True}
    assert [bool(layout.dictionaries.encoded({"a": "a"}, footers.encoded)) for layout in layouts] == [True, False]


@pytest.mark.parametrize(("group", "is_encoded"), [(4_000, False), (4_500, True)])
def test_small_row_groups_are_not_read_as_dictionaries(tmp_path, monkeypatch, group, is_encoded):
    monkeypatch.undo()
    pq.write_table(pa.table({"a": COLORS * 3 * 4_000}), tmp_path / "a.parquet", row_group_size=group)
    layout = ParquetLayout(pq.read_metadata(tmp_path / "a.parquet"), ["a"])
    assert bool(layout.dictionaries.encoded({"a": "a"}, {})) is is_encoded
