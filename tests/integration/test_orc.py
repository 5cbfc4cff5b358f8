"""ORC: what pyarrow reads of the same files, stripe by stripe, resumed anywhere, damage named."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.orc as pa_orc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranged import ranged
from stops import at_few_stops
from support import all_rows_of, batches_of, edited, examples, open_loader

from torch_dataloader_utils import (
    CheckpointMismatchError,
    ColumnError,
    DatasetError,
    StructuredDataset,
    UnreadableFileError,
)

OTHERS = sorted((Path(pa.__file__).parent / "tests" / "data" / "orc").glob("*.orc"))

STRIPES = (40, 7, 90)
"""Rows of the stripes of each file."""


def write_stripes(path: Path, tables: list[pa.Table], **options: Any) -> None:
    """Write a file of these stripes: ORC's writer closes one where its size is reached, so each comes from a write."""
    with pa_orc.ORCWriter(path, stripe_size=1, batch_size=1, **options) as writer:
        for table in tables:
            writer.write(table)


def rows_table(first: int, rows: int) -> pa.Table:
    values = np.arange(first, first + rows)
    words = pa.array([f"row {value}" for value in values], pa.string())
    return pa.table({"value": values, "score": values / 7, "name": words, "with.dot": values * 2})


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Files that tests read."""
    directory = tmp_path_factory.mktemp("stripes")
    first = 0
    for name in ("a", "b"):
        tables = []
        for rows in STRIPES:
            tables.append(rows_table(first, rows))
            first += rows
        write_stripes(directory / f"{name}.orc", tables)
    return directory


@pytest.fixture(scope="module")
def whole(data):
    """What pyarrow reads of them."""
    return pa.concat_tables([pa_orc.read_table(path) for path in sorted(data.glob("*.orc"))])


@pytest.fixture
def own(data, tmp_path):
    """Files that a test may change."""
    return Path(shutil.copytree(data, tmp_path / "own"))


def stripes_of(directory: Path) -> list[int]:
    files = [pa_orc.ORCFile(path) for path in sorted(directory.glob("*.orc"))]
    return [file.read_stripe(number).num_rows for file in files for number in range(file.nstripes)]


def test_stripes_are_the_unit_of_splitting_with_their_true_row_counts(data):
    _, dataset = open_loader(data, format="orc", split_bytes=1)
    groups = [group.rows for file in dataset._opened_files.manifest.files for group in file.row_groups]
    assert groups == stripes_of(data)
    assert len(groups) > 2
    assert len(dataset._epoch_state.plan.slices) == len(groups)


@pytest.mark.parametrize("columns", [None, ["value"], ["name", "value"], ["with.dot"], ["with.dot", "name"], []])
@pytest.mark.parametrize("storage", [str, ranged])
def test_columns_are_those_that_were_asked_for_in_their_order(data, whole, columns, storage):
    loader, _ = open_loader(storage(data), format="orc", columns=columns, output_format="arrow", batch_size=1000)
    [batch] = loader
    wanted = whole.column_names if columns is None else columns
    assert batch.column_names == [*wanted, "row"]
    assert batch.select(wanted).to_pydict() == whole.select(wanted).to_pydict()
    assert batch["row"].to_pylist() == list(range(len(whole)))


SETTINGS = {
    "in order": {},
    "mixed": {"shuffle": True, "shuffle_buffer_size": 100},
    "in rounds": {"shuffle": True, "shuffle_buffer_size": 20, "read_ahead_bytes": 500},
    "filtered": {"filters": pc.field("score") > 5},
    "in slices": {"read_ahead_bytes": 500},
}


@pytest.mark.parametrize("every", [12, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_resume_after_any_batch_delivers_the_batches_that_were_to_come(data, name, every):
    options = {"format": "orc", "batch_size": 11, **SETTINGS[name]}
    loader, _ = open_loader(data, **options)
    whole = batches_of(loader)
    rows = sorted(row for batch in whole for row in batch)
    if "filters" not in options:
        assert rows == list(range(2 * sum(STRIPES)))
        assert len(loader) == len(whole)
    iterator = iter(loader)
    for stop in range(1, len(whole) + 1):
        next(iterator)
        if stop % every and stop < len(whole) - 1:
            continue
        resumed, _ = open_loader(data, **options)
        resumed.load_state_dict(loader.state_dict())
        assert batches_of(resumed) == whole[stop:]


@at_few_stops
def test_a_resume_with_workers_after_any_batch_delivers_the_batches_that_were_to_come(data, stops):
    options = {"format": "orc", "num_workers": 2, "filters": pc.field("score") > 3, "batch_size": 60}
    loader, _ = open_loader(data, **options)
    whole = batches_of(loader)
    assert sorted(row for batch in whole for row in batch) == list(range(22, 2 * sum(STRIPES)))
    resumed, _ = open_loader(data, **options, persistent_workers=True)
    states = [loader.state_dict() for _ in loader]
    for stop in stops(states):
        resumed.load_state_dict(states[stop])
        assert batches_of(resumed) == whole[stop + 1 :]


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.name)
@pytest.mark.parametrize("options", [{}, {"read_ahead_bytes": 10_000}], ids=["whole", "in slices"])
def test_files_that_others_wrote_hold_what_pyarrow_reads(path, options):
    expected = pa_orc.read_table(path)
    if not len(expected):
        loader, _ = open_loader(path, format="orc", output_format="arrow")
        assert list(loader) == []
        return
    loader, _ = open_loader(path, format="orc", output_format="arrow", batch_size=1000, row_id_column=None, **options)
    found = pa.concat_tables(list(loader))
    assert found.equals(expected.replace_schema_metadata(None).cast(found.schema))
    assert found.schema.types == expected.schema.types


VALUES = {
    pa.int8(): st.integers(-128, 127),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.float32(): st.floats(width=32, allow_nan=False),
    pa.float64(): st.floats(allow_nan=False),
    pa.bool_(): st.booleans(),
    pa.string(): st.text(st.characters(codec="utf-8"), max_size=8),
    pa.binary(): st.binary(max_size=8),
    pa.date32(): st.dates(),
    pa.decimal128(20, 3): st.decimals(-(10**15), 10**15, places=3),
    pa.list_(pa.int32()): st.lists(st.integers(-5, 5), max_size=3),
    pa.struct([("a", pa.int64()), ("b", pa.string())]): st.fixed_dictionaries(
        {"a": st.integers(0, 9), "b": st.text("xyz", max_size=3)}
    ),
    pa.map_(pa.string(), pa.int64()): st.dictionaries(st.text("ab", max_size=2), st.integers(0, 9), max_size=2),
}


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    kinds = draw(st.lists(st.sampled_from(list(VALUES)), min_size=1, max_size=4))
    rows = draw(st.integers(1, 30))
    columns = [pa.array(draw(st.lists(st.none() | VALUES[kind], min_size=rows, max_size=rows)), kind) for kind in kinds]
    return pa.table(columns, names=[f"c{number}" for number in range(len(kinds))])


@examples(40)
@given(
    table=tables(), stripes=st.integers(1, 3), compression=st.sampled_from(["uncompressed", "zstd", "snappy", "zlib"])
)
def test_any_schema_holds_what_pyarrow_reads(tmp_path_factory, table, stripes, compression):
    path = tmp_path_factory.mktemp("any") / "a.orc"
    write_stripes(path, [table] * stripes, compression=compression)
    expected = pa_orc.read_table(path)
    loader, _ = open_loader(path, format="orc", output_format="arrow", batch_size=7, row_id_column=None)
    found = pa.concat_tables(list(loader))
    assert found.equals(expected.replace_schema_metadata(None).cast(found.schema))


# What is wrong --------------------------------------------------------------------------------------------------------


def read_all(path: Path) -> list[int]:
    loader, _ = StructuredDataset.create_dataloader(path, "orc", num_workers=0, output_format="dict")
    return [value for batch in loader for value in batch["value"]]


def test_a_file_cut_off_anywhere_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "a.orc"
    write_stripes(path, [rows_table(0, 30), rows_table(30, 30)], compression="zlib")
    content = path.read_bytes()
    assert read_all(path) == list(range(60))
    for size in [*range(40), *range(40, len(content), 37), *range(len(content) - 30, len(content))]:
        path.write_bytes(content[:size])
        with pytest.raises(DatasetError, match=r"a\.orc"):
            read_all(path)


@pytest.mark.skipif(int(pa.__version__.split(".")[0]) < 18, reason="this pyarrow's own reader aborts on such files")
def test_flipped_bytes_are_errors_that_name_the_file_or_change_no_number_of_rows(tmp_path):
    path = tmp_path / "a.orc"
    write_stripes(path, [rows_table(0, 30), rows_table(30, 30)], compression="zlib")
    content = path.read_bytes()
    chance = np.random.default_rng(1)
    refused = 0
    for place in chance.choice(len(content), 60, replace=False):
        damaged = bytearray(content)
        damaged[place] ^= int(chance.integers(1, 256))
        path.write_bytes(damaged)
        try:
            assert len(read_all(path)) == 60
        except (UnreadableFileError, ColumnError) as error:
            refused += 1
            assert "a.orc" in str(error)  # noqa: PT017 - both ends are right
        except KeyError:  # the name of a column was changed
            assert b"value" not in bytes(damaged)
    assert refused > 20


BROKEN = {
    "empty": (b"", "only 0 bytes"),
    "parquet": (b"PAR1" * 20, "no complete ORC file"),
    "a text": (b"value\n1\n2\n" * 40, "no complete ORC file"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_no_orc_file_is_an_error_that_names_it(tmp_path, case):
    content, message = BROKEN[case]
    (tmp_path / "a.orc").write_bytes(content)
    with pytest.raises(UnreadableFileError, match=rf"a\.orc.*{message}"):
        read_all(tmp_path / "a.orc")


def test_files_without_rows_and_without_stripes_are_part_of_the_dataset(own):
    write_stripes(own / "0.orc", [rows_table(0, 0)])
    loader, _ = open_loader(own, format="orc")
    assert all_rows_of(loader) == list(range(2 * sum(STRIPES)))


def test_a_file_that_is_gone_or_written_again_when_it_is_read_is_an_error_that_names_it(own):
    loader, _ = open_loader(own, format="orc")
    write_stripes(own / "b.orc", [rows_table(0, 9)])
    with pytest.raises(UnreadableFileError, match=r"b\.orc"):
        list(loader)
    (own / "b.orc").unlink()
    with pytest.raises(FileNotFoundError, match=r"b\.orc"):
        list(loader)


def test_a_manifest_of_orc_files_keeps_their_tails_from_being_read_again(data):
    loader, dataset = open_loader(data, format="orc")
    again, _ = open_loader(data, format="orc", manifest=dataset.dump_manifest())
    assert batches_of(again) == batches_of(loader)


def test_a_state_of_another_format_is_refused_by_name(data):
    loader, _ = open_loader(data, format="orc")
    state = edited(loader.state_dict())
    state["plan"]["format"] = "parquet"
    with pytest.raises(CheckpointMismatchError, match="format changed: checkpoint='parquet', current='orc'"):
        loader.load_state_dict(state)
