"""CSV and JSON Lines: the rows that pyarrow reads, each once, and resumed at any batch, counted or not."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import pickle
from collections.abc import Iterable
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.json as pajson
import pytest
from conftest import S3Server
from hypothesis import given
from hypothesis import strategies as st
from pairwise import pairwise
from stops import each_stop
from support import edited, examples
from text_files import COMPRESSORS, ROWS, SMALL, WRITERS, csv_of, open_text, replace_file, rows_of, write_text

from torch_dataloader_utils import CheckpointMismatchError, LostRowsWarning
from torch_dataloader_utils.errors import ColumnError, UnreadableFileError
from torch_dataloader_utils.formats.text.csv import Csv
from torch_dataloader_utils.formats.text.footer import Cutting

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning"),
]

KEPT: dict[str, dict[str, Any]] = {"all": {}, "filtered": {"filters": pc.bit_wise_and(pc.field("row"), 8) == 0}}


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


def whole_table(batches: Iterable[pa.Table]) -> pa.Table:
    return pa.concat_tables(batches)


# What is read --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", COMPRESSORS)
@pytest.mark.parametrize("kind", WRITERS)
def test_plain_and_compressed_text_has_the_rows_that_pyarrow_reads(tmp_path: Path, kind: str, suffix: str):
    path = tmp_path / f"data.{kind}{suffix}"
    path.write_bytes(COMPRESSORS[suffix](WRITERS[kind](range(500))))
    read = {"csv": pacsv.read_csv, "jsonl": pajson.read_json}[kind]

    for format_name in ("csv",) if kind == "csv" else ("json", "jsonl"):
        loader, dataset = open_text(path, format=format_name, output_format="arrow", **SMALL)
        table = whole_table(loader)
        assert table == read(io.BytesIO(WRITERS[kind](range(500))))
        assert dataset.schema == table.schema


@pytest.mark.parametrize("count_rows", [False, True])
@pytest.mark.parametrize("kind", WRITERS)
def test_a_large_plain_file_is_cut_at_line_ends_and_has_every_row_once(tmp_path: Path, kind: str, count_rows: bool):
    write_text(tmp_path, kind, [400])

    loader, dataset = open_text(tmp_path, format=kind, count_rows=count_rows, **SMALL)

    (file,) = dataset._opened_files.manifest.files
    assert len(file.row_groups) > 10
    assert rows_of(loader) == list(range(400))
    assert rows_of(open_text(tmp_path, format=kind, count_rows=count_rows, shuffle=True, **SMALL)[0]) != list(
        range(400)
    )
    if count_rows:
        assert file.rows == 400
        assert len(loader) == 50


def test_quoted_line_ends_leave_a_file_whole_and_are_respected(tmp_path: Path):
    text = "row,text\n" + "".join(f'{row},"line\n{row}, ""quoted"""\n' for row in range(300))
    (tmp_path / "data.csv").write_text(text)

    loader, dataset = open_text(tmp_path, format="csv", output_format="arrow", **SMALL)

    assert len(dataset._opened_files.manifest.files[0].row_groups) == 1
    options = pacsv.ParseOptions(newlines_in_values=True)
    assert whole_table(loader) == pacsv.read_csv(io.BytesIO(text.encode()), parse_options=options)


@pairwise(suffix=["", ".gz"], encoding=["utf8", "latin1", "utf-16-le"], line_end=["\r\n", "\r"], header_bytes=range(4))
def test_line_ends_within_quoted_values_stay_whole_wherever_blocks_of_the_parser_end(
    tmp_path: Path, suffix: str, encoding: str, line_end: str, header_bytes: int
):
    """Without us pyarrow drops a line feed that begins a block: with blocks of 64 bytes that of several values."""
    values = [f"é{row}\r\nb\rc\nd" for row in range(100)]
    name = "n" * (1 + header_bytes)
    text = f"{name},text{line_end}" + "".join(f'{row},"{value}"{line_end}' for row, value in enumerate(values))
    (tmp_path / f"data.csv{suffix}").write_bytes(COMPRESSORS[suffix](text.encode(encoding)))
    options = {"block_size": 64} | ({} if encoding == "utf8" else {"encoding": encoding})
    for read_ahead in ("128MiB", "4KiB"):  # with Arrow's threads, and block by block
        loader, _ = open_text(tmp_path, format="csv", format_options=options, read_ahead_bytes=read_ahead)
        assert [value for batch in loader for value in batch["text"]] == values


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_the_beginning_of_a_file_in_wide_characters_ends_with_a_whole_row(tmp_path: Path, encoding: str, suffix: str):
    for row_bytes in range(20, 30):
        rows = [f"{row},x,{'y' * (row_bytes - 8)}" for row in range(1000, 1100)]
        content = "".join(f"{row}\n" for row in ["row,one,two", *rows]).encode(encoding)
        (tmp_path / f"data.csv{suffix}").write_bytes(COMPRESSORS[suffix](content))
        loader, _ = open_text(tmp_path, format="csv", format_options={"block_size": 256, "encoding": encoding})
        assert rows_of(loader) == list(range(1000, 1100))


def test_a_file_of_zstd_may_begin_with_a_frame_that_is_skipped(tmp_path: Path):
    frame = b"\x50\x2a\x4d\x18\x04\0\0\0size"
    (tmp_path / "data.csv.zst").write_bytes(frame + COMPRESSORS[".zst"](WRITERS["csv"](range(50))))
    assert rows_of(open_text(tmp_path, format="csv")[0]) == list(range(50))


def test_a_header_may_fill_the_first_block_alone(tmp_path: Path):
    names = [f"column_{number}" for number in range(20)]
    rows = [",".join(str(row * 100 + column) for column in range(20)) for row in range(30)]
    (tmp_path / "data.csv").write_text("".join(f"{line}\n" for line in [",".join(names), *rows]))
    loader, _ = open_text(tmp_path, format="csv", format_options={"block_size": 220})
    assert [value for batch in loader for value in batch["column_3"]] == [row * 100 + 3 for row in range(30)]


def test_options_that_are_none_stand_for_the_defaults_of_pyarrow(tmp_path: Path):
    rows = [(row, "x\ny" if row % 3 else '"') for row in range(60)]
    quoted = (f'{row},"{text.replace(chr(34), 2 * chr(34))}"\n' for row, text in rows)
    (tmp_path / "data.csv").write_text("".join(["a,b\n", *quoted]))
    options = dict.fromkeys(["quote_char", "delimiter", "escape_char", "encoding", "newlines_in_values"])
    loader, _ = open_text(tmp_path, format="csv", format_options=options, split_bytes=64)
    assert [pair for batch in loader for pair in zip(batch["a"], batch["b"], strict=True)] == rows
    (tmp_path / "data.csv").write_text('a,b\n1,"2\n')
    with pytest.raises(UnreadableFileError, match="line 2: a quoted value is not closed"):
        list(open_text(tmp_path, format="csv", format_options=options)[0])


@pytest.mark.parametrize("before", [0, 1, 1000])
def test_a_byte_that_the_encoding_does_not_have_is_named_with_the_file_and_what_to_do(tmp_path: Path, before: int):
    (tmp_path / "data.csv").write_bytes(b"a,b\n" + b"1,x\n" * before + "1,\u00e9\n".encode() + b"1,x\n" * 9)
    options = {"encoding": "ascii", "block_size": 64}
    with pytest.raises(UnreadableFileError, match=r"data\.csv: .* or a value, is not valid ascii.*'encoding'"):
        list(open_text(tmp_path, format="csv", format_options=options)[0])


CELLS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "plain": (["7", "0.5", ""], {}),
    "unquoted": (["7", "text", "2020-01-01"], {"quote_char": False}),
    "quoted": (['"x,y"', "7"], {}),
    "another quote": (["7", "0.5", '"-"'], {"quote_char": "'"}),
    "lines in quotes": (['"x\ny"', "7"], {}),
    "lines in the default's quotes": (['"x\ny"', "7"], {"quote_char": None}),
    "rows of lines": (['"x\ny"', "7"], {"newlines_in_values": True}),
    "escaped lines": (["x\\\ny", "7"], {"newlines_in_values": True, "escape_char": "\\"}),
}
"""The second values of rows, and how they are parsed."""


@pairwise(
    case=CELLS,
    marks=[("", "\n"), ("", "\r"), ("\ufeff", "\n"), ("\ufeff", "\r\n")],
    names=["first,second", '"first","second"', '"first,\nfirst",second'],
)
def test_csv_has_the_columns_that_pyarrow_infers_from_the_first_block_wherever_it_ends(case, marks, names):
    cells, options = CELLS[case]
    begin, ending = marks
    rows = [f"{row},{cells[row % len(cells)]}" for row in range(9)]
    content = (begin + ending.join([names, *rows, "0.5,-", ""])).encode()
    for block_size in range(len(begin.encode()) + len(f"{names}{ending}"), len(content) + 2):
        reading = pacsv.ReadOptions(block_size=block_size, use_threads=False)
        described = Csv({"block_size": block_size, **options}, Cutting(1 << 20), counts=False)
        head = content[: described.head_bytes]
        is_all = len(head) == len(content)
        looked_at = head if is_all else head[: max(head.rfind(b"\n"), head.rfind(b"\r")) + 1]
        try:
            reader = pacsv.open_csv(io.BytesIO(looked_at), reading, pacsv.ParseOptions(**options))
            expected = reader.schema, next((batch.num_rows for batch in reader), 0)
        except pa.ArrowInvalid:
            with pytest.raises(UnreadableFileError):
                described.sample("data.csv", head, is_all=is_all)
            continue
        sample = described.sample("data.csv", head, is_all=is_all)
        assert (sample.schema, sample.rows) == expected, block_size


@pytest.mark.parametrize("skipped", ['"not closed', "5\" by 3', x"])
def test_lines_that_are_skipped_at_the_beginning_may_hold_anything(tmp_path: Path, skipped: str):
    path = tmp_path / "data.csv"
    path.write_text(f"{skipped}\na,b\n1,2\n")
    loader, _ = open_text(path, format="csv", format_options={"skip_rows": 1})
    assert list(loader) == [{"a": [1], "b": [2]}]
    path.write_text(f'{skipped}\na,b\n1,"2\n')
    with pytest.raises(UnreadableFileError, match="line 3: a quoted value is not closed"):
        list(open_text(path, format="csv", format_options={"skip_rows": 1})[0])


@pytest.mark.parametrize("skipped", [1, 2, 3])
def test_rows_that_are_skipped_after_the_names_may_hold_line_ends(tmp_path: Path, skipped: int):
    path = tmp_path / "data.csv"
    path.write_text('a,b\n1,"x\ny"\n2,"x\n,\n"\n3,"x"\n4,5\n')
    loader, _ = open_text(path, format="csv", format_options={"skip_rows_after_names": skipped})
    rows = [(1, "x\ny"), (2, "x\n,\n"), (3, "x"), (4, "5")][skipped:]
    types = int if skipped == 3 else str
    assert [pair for batch in loader for pair in zip(batch["a"], batch["b"], strict=True)] == [
        (number, types(text)) for number, text in rows
    ]


@pytest.mark.parametrize("ending", ["csv", "csv.gz"])
@pytest.mark.parametrize("skipped", [100, 5000, 20_000])
def test_the_types_are_those_of_the_first_rows_that_are_left_however_many_are_skipped(tmp_path, skipped, ending):
    text = "a,b\n" + "none,x\n" * skipped + "1,2.5\n" * 2000
    content = gzip.compress(text.encode()) if ending == "csv.gz" else text.encode()
    (tmp_path / f"data.{ending}").write_bytes(content)
    options = {"skip_rows_after_names": skipped, "block_size": 4096}
    loader, dataset = open_text(tmp_path, format="csv", format_options=options)
    assert dataset.schema.types == [pa.int64(), pa.float64()]
    assert [row for batch in loader for row in batch["a"]] == [1] * 2000


def test_skipped_rows_without_end_are_not_all_kept_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("torch_dataloader_utils.formats.text.format.MOST_HEAD_BYTES", 1 << 15)
    (tmp_path / "data.csv").write_text("a,b\n" + "none,x\n" * 20_000)
    options = {"skip_rows_after_names": 19_999, "block_size": 4096}
    with pytest.raises(UnreadableFileError, match=r"skip all rows.*'column_types'"):
        open_text(tmp_path, format="csv", format_options=options)
    types = {"a": pa.string(), "b": pa.large_string()}
    loader, dataset = open_text(tmp_path, format="csv", format_options=options | {"column_types": types})
    assert dataset.schema.types == list(types.values())
    assert list(loader) == [{"a": ["none"], "b": ["x"]}]


def test_lines_that_are_skipped_before_the_names_beyond_a_block_are_an_error_that_says_what_helps(tmp_path):
    (tmp_path / "data.csv").write_text("a comment\n" * 1000 + "a,b\n1,2\n")
    options = {"skip_rows": 1000, "block_size": 4096}
    with pytest.raises(UnreadableFileError, match=r"'block_size'.*more than they take"):
        open_text(tmp_path, format="csv", format_options=options)
    loader, _ = open_text(tmp_path, format="csv", format_options=options | {"block_size": 1 << 14})
    assert list(loader) == [{"a": [1], "b": [2]}]


def test_quotes_that_are_switched_off_let_a_file_be_cut(tmp_path: Path):
    (tmp_path / "data.csv").write_text("row,text\n" + "".join(f'{row},5" disk\n' for row in range(300)))

    loader, dataset = open_text(tmp_path, format="csv", format_options={"quote_char": False}, **SMALL)

    assert len(dataset._opened_files.manifest.files[0].row_groups) > 10
    assert rows_of(loader) == list(range(300))


@pytest.mark.parametrize(
    "text",
    [
        b"\xef\xbb\xbfrow,name\r\n1,a\r\n2,b\r\n\r\n",
        b"row,name\n1,a\n2,b",
        b"row,name\n1,a\n\n2,b\n\n\n",
        b'\xef\xbb\xbf{"row": 1, "name": "a"}\r\n{"row": 2, "name": "b"}\r\n\r\n',
        b'{"row": 1, "name": "a"}\n \n{"row": 2, "name": "b"}',
    ],
    ids=["marked csv", "csv without an end", "blank lines in csv", "marked jsonl", "blank lines in jsonl"],
)
@pytest.mark.parametrize("count_rows", [False, True])
def test_byte_order_marks_line_ends_of_windows_and_blank_lines_are_no_rows(
    tmp_path: Path, text: bytes, count_rows: bool
):
    kind = "csv" if b"{" not in text else "jsonl"
    (tmp_path / f"data.{kind}").write_bytes(text)

    loader, dataset = open_text(tmp_path, format=kind, count_rows=count_rows)

    assert list(loader) == [{"row": [1, 2], "name": ["a", "b"]}]
    assert dataset.schema.names == ["row", "name"]


@pytest.mark.parametrize("header", [b"row,name\n", b"row,name"], ids=["ended", "not ended"])
@pytest.mark.parametrize("count_rows", [False, True])
def test_a_file_with_a_header_and_no_rows_is_fine(tmp_path: Path, header: bytes, count_rows: bool):
    (tmp_path / "a.csv").write_bytes(header)
    assert list(open_text(tmp_path, format="csv", count_rows=count_rows)[0]) == []

    (tmp_path / "b.csv").write_bytes(b"row,name\n7,x\n")
    assert list(open_text(tmp_path, format="csv", count_rows=count_rows)[0]) == [{"row": [7], "name": ["x"]}]


def test_a_dataset_has_one_dtype_a_column_over_files_whose_beginnings_differ(tmp_path: Path):
    (tmp_path / "a.csv").write_bytes(b"row,x,empty\n1,1,\n")
    (tmp_path / "b.csv").write_bytes(b"row,x,extra\n2,2.5,e\n")

    loader, dataset = open_text(tmp_path, format="csv")

    types = {column.name: column.type for column in dataset.schema}
    assert types == {"row": pa.int64(), "x": pa.float64(), "empty": pa.string(), "extra": pa.string()}
    assert list(loader) == [{"row": [1, 2], "x": [1.0, 2.5], "empty": ["", None], "extra": [None, "e"]}]


def test_fields_of_objects_may_be_missing_anywhere_and_turn_up_in_any_file(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b'{"row": 1}\n' + b'{"row": 2}\n' * 9 + b'{"x": 2.5, "row": 3}\n')
    (tmp_path / "b.jsonl").write_bytes(b'{"row": 4, "x": 1}\n')

    table = whole_table(open_text(tmp_path, format="jsonl", output_format="arrow")[0])

    assert table["x"].to_pylist() == [None] * 10 + [2.5, 1.0]
    assert table["row"].to_pylist() == [1, *[2] * 9, 3, 4]


def test_types_and_delimiters_are_given_by_format_options(tmp_path: Path):
    (tmp_path / "a.csv").write_bytes(b"row;when;price\n1;01/02/2024;1,50\n")
    told = {
        "delimiter": ";",
        "decimal_point": ",",
        "timestamp_parsers": ["%d/%m/%Y", pacsv.ISO8601],
        "column_types": {"price": pa.decimal128(8, 2), "row": "int32"},
    }

    table = whole_table(open_text(tmp_path, format="csv", format_options=told, output_format="arrow")[0])

    assert table.schema.types == [pa.int32(), pa.timestamp("s"), pa.decimal128(8, 2)]
    assert table.to_pylist()[0]["when"] == datetime(2024, 2, 1)  # noqa: DTZ001 - as the file has it
    (tmp_path / "a.jsonl").write_bytes(b'{"row": 1, "price": "1.50", "other": 2}\n')
    told = {"explicit_schema": pa.schema({"price": pa.decimal128(8, 2)})}
    table = whole_table(open_text(tmp_path, format="jsonl", format_options=told, output_format="arrow")[0])
    assert table.schema.field("price").type == pa.decimal128(8, 2)
    told["unexpected_field_behavior"] = "ignore"
    assert open_text(tmp_path, format="jsonl", format_options=told)[1].schema.names == ["price"]


@pytest.mark.parametrize(
    ("kind", "told", "words"),
    [
        ("csv", {"delimeter": ";"}, "did you mean 'delimiter'"),
        ("csv", {"use_threads": False}, "'use_threads'] cannot be set"),
        ("csv", {"include_columns": ["a"]}, "name them by `columns`"),
        ("csv", {"delimiter": "too long"}, "format_options:"),
        ("csv", {"encoding": "no such"}, "no such"),
        ("csv", {"column_types": {"rwo": "int32"}}, "did you mean 'row'"),
        ("jsonl", {"delimiter": ";"}, "format_options has no 'delimiter'"),
        ("jsonl", {"newlines_in_values": True}, "a row is a line"),
        ("parquet", {"delimiter": ";"}, "has no 'delimiter' for format='parquet'"),
    ],
)
def test_options_that_do_not_exist_or_are_not_the_users_are_refused(
    tmp_path: Path, kind: str, told: dict[str, Any], words: str
):
    if kind != "parquet":
        write_text(tmp_path, kind, [3])
    with pytest.raises(ValueError, match=words.replace("[", r"\[").replace("]", r"\]")):
        open_text(tmp_path, format=kind, format_options=told)


def test_a_format_can_be_sent_to_a_process_with_all_its_options():
    told = {"timestamp_parsers": [pacsv.ISO8601, "%Y"], "column_types": pa.schema({"a": pa.int8()}), "quote_char": "'"}
    made = Csv(told, Cutting(1 << 20), counts=True)

    sent = pickle.loads(pickle.dumps(made))

    assert sent == made
    assert sent.options_digest == made.options_digest != Csv({}, Cutting(1 << 20), counts=True).options_digest


# Rows that were not counted ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wanted",
    [
        {"row_id_column": "id"},
        {"uneven_ranks": "drop"},
        {"uneven_ranks": "pad"},
        {"virtual_ranks": 2, "virtual_workers": 1, "uneven_ranks": "drop"},
    ],
)
@pytest.mark.parametrize("kind", WRITERS)
def test_what_needs_to_know_the_rows_is_refused_by_name_unless_they_are_counted(
    tmp_path: Path, kind: str, wanted: dict[str, Any]
):
    write_text(tmp_path, kind)

    with pytest.raises(ValueError, match=rf"{next(iter(wanted))}|uneven_ranks.*count_rows=True"):
        open_text(tmp_path, format=kind, **wanted)
    with pytest.raises(TypeError, match="count_rows=True"):
        len(open_text(tmp_path, format=kind)[0])

    loader, _ = open_text(tmp_path, format=kind, count_rows=True, **wanted)
    assert len(loader) == -(-ROWS // 8)
    batches = list(loader)
    assert len(batches) == len(loader)
    assert sorted(rows_of(batches)) == list(range(ROWS))
    if "row_id_column" in wanted:
        assert [row for batch in batches for row in batch["id"]] == rows_of(batches)


@pytest.mark.parametrize("kind", WRITERS)
def test_rows_that_were_counted_are_shuffled_in_rounds(tmp_path: Path, kind: str):
    write_text(tmp_path, kind, suffixes=("", ".gz", ".zst", ""))

    loader, _ = open_text(
        tmp_path,
        format=kind,
        count_rows=True,
        shuffle=True,
        shuffle_buffer_size=15,
        split_bytes=2000,
        read_ahead_bytes=1000,
    )

    batches = list(loader)
    assert sorted(rows_of(batches)) == list(range(ROWS))
    for number in (1, 7, 12):
        iterator = iter(loader)
        for _ in range(number):
            next(iterator)
        loader.load_state_dict(through_json(loader.state_dict()))
        assert list(loader) == batches[number:]


@each_stop
@pairwise(kind=WRITERS, order=["in order", "shards shuffled", "rows shuffled"], kept=KEPT)
def test_resume_at_every_batch_delivers_the_batches_that_were_to_come(
    tmp_path: Path, kind: str, order: str, kept: str, stops: Any
):
    write_text(tmp_path, kind, suffixes=("", ".gz", "", ".zst"))
    mixing = {"in order": {}, "shards shuffled": {"shuffle": True}}.get(
        order, {"shuffle": True, "shuffle_buffer_size": 50, "split_bytes": 4000}
    )
    options = {"format": kind, **SMALL, **mixing, **KEPT[kept]}
    loader, dataset = open_text(tmp_path, **options)
    iterator, whole, states = iter(loader), [], [through_json(loader.state_dict())]
    for batch in iterator:
        whole.append(batch)
        states.append(through_json(loader.state_dict()))
    assert sorted(rows_of(whole)) == [row for row in range(ROWS) if kept == "all" or not row & 8]

    for place, number in enumerate(stops(states)):
        if place % 5 == 1:
            loader, dataset = open_text(tmp_path, **options, manifest=dataset.dump_manifest())
        loader.load_state_dict(states[number])
        assert list(loader) == whole[number:], number


@pytest.mark.parametrize("kind", WRITERS)
def test_workers_resume_at_every_batch(tmp_path: Path, kind: str):
    write_text(tmp_path, kind, suffixes=("", ".gz", "", ".zst"))
    workers = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "fork"}
    options = {"format": kind, "batch_size": 11, **SMALL, **KEPT["filtered"], **workers}
    loader, _ = open_text(tmp_path, **options)
    iterator, whole, states = iter(loader), [], [through_json(loader.state_dict())]
    for batch in iterator:
        whole.append(batch)
        states.append(through_json(loader.state_dict()))
    assert sorted(rows_of(whole)) == [row for row in range(ROWS) if not row & 8]

    for number, state in enumerate(states):
        loader.load_state_dict(state)
        assert list(loader) == whole[number:], number


def test_states_write_ranges_of_bytes_and_whole_files(tmp_path: Path):
    write_text(tmp_path, "csv", [100, 20], suffixes=("", ".gz"))
    loader, dataset = open_text(tmp_path, format="csv", **SMALL)

    states = [dataset.state_dict() for _ in loader]

    splits = [split for state in states for shard in state["in_progress"] for split in shard["splits"]]
    assert all(split["row_offset"] is split["row_length"] is None for split in splits)
    ranges = [split for split in splits if split["path"].endswith("0.csv")]
    assert {split["byte_offset"] for split in ranges} > {0}
    whole = [split for split in splits if split["path"].endswith(".gz")]
    assert whole
    assert all("byte_offset" not in split for split in whole)
    counted = open_text(tmp_path, format="csv", count_rows=True, **SMALL)[0]
    with pytest.raises(CheckpointMismatchError, match="count_rows"):
        counted.load_state_dict(states[3])
    for damage in ({"row_length": 3}, {"byte_offset": "0"}, {"byte_length": None}, {"row_offset": 0}):
        state = edited(through_json(states[3]))
        state["in_progress"][0]["splits"][0] |= damage
        with pytest.raises(ValueError, match="not a state of this package"):
            loader.load_state_dict(state)


def test_a_file_of_one_row_that_is_larger_than_a_split_is_shuffled(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"x": 1, "text": "y" * 10_000}))
    loader, _ = open_text(tmp_path, format="jsonl", shuffle=True, shuffle_buffer_size=10, split_bytes=1000)
    assert [batch["x"] for batch in loader] == [[1]]


def test_states_of_other_options_are_refused(tmp_path: Path):
    write_text(tmp_path, "csv")
    loader, dataset = open_text(tmp_path, format="csv")
    next(iter(loader))
    other, _ = open_text(tmp_path, format="csv", format_options={"null_values": ["1"]})

    with pytest.raises(CheckpointMismatchError, match="format_options changed"):
        other.load_state_dict(dataset.state_dict())
    with pytest.raises(ValueError, match="open the dataset with those"):
        open_text(tmp_path, format="csv", manifest=dataset.dump_manifest(), count_rows=True)


@pytest.mark.parametrize("kind", WRITERS)
def test_elastic_resume_over_rows_that_were_not_counted_delivers_each_once(tmp_path: Path, kind: str):
    write_text(tmp_path, kind, suffixes=("", ".gz", "", ".zst"))
    options = {"format": kind, "shuffle": True, **SMALL}
    delivered: list[int] = []
    states: Any = None
    for num_ranks, steps in ((3, 2), (2, 3), (1, 1000)):
        saved = []
        for rank in range(num_ranks):
            loader, dataset = open_text(tmp_path, **options, num_ranks=num_ranks, rank=rank, batch_size=4 + rank)
            if states is not None:
                loader.load_state_dict(states, strict=False)
            for _, batch in zip(range(steps + rank), loader, strict=False):
                delivered += batch["row"]
            saved.append(through_json(dataset.state_dict()))
        states = saved

    assert sorted(delivered) == list(range(ROWS))


def test_files_written_again_are_left_out_and_refused_where_rows_of_them_were_under_way(tmp_path: Path):
    write_text(tmp_path, "csv", [40, 40])
    options = {"format": "csv", "split_bytes": "1MiB", "batch_size": 30}
    loader, dataset = open_text(tmp_path, **options)
    iterator = iter(loader)
    delivered = rows_of([next(iterator)])
    under_way = through_json(dataset.state_dict())
    replace_file(tmp_path / "part-0.csv", csv_of(range(1000, 1050)))

    again, _ = open_text(tmp_path, **options)
    with pytest.raises(CheckpointMismatchError, match="changed while rows of them"):
        again.load_state_dict([under_way], strict=False, on_changed_files="continue")

    write_text(tmp_path, "csv", [40, 40])
    state = open_text(tmp_path, **options)[1].state_dict()
    replace_file(tmp_path / "part-1.csv", csv_of(range(1000, 1050)))
    again, _ = open_text(tmp_path, **options)
    with pytest.warns(LostRowsWarning, match="an unknown number of rows"):
        again.load_state_dict([state], strict=False, on_changed_files="continue")
    assert rows_of(again) == list(range(40))
    assert delivered == list(range(30))


def test_a_new_modification_time_alone_refuses_a_state_for_text_has_no_footer(tmp_path: Path):
    write_text(tmp_path, "csv")
    loader, dataset = open_text(tmp_path, format="csv")
    next(iter(loader))
    state = dataset.state_dict()
    os.utime(tmp_path / "part-1.csv", (1, 1))

    with pytest.raises(CheckpointMismatchError, match=r"changed since the checkpoint: part-1\.csv"):
        open_text(tmp_path, format="csv")[0].load_state_dict(state)


@pytest.mark.parametrize("kind", WRITERS)
def test_rows_that_were_not_counted_are_shuffled_among_finer_ranges(tmp_path: Path, kind: str):
    write_text(tmp_path, kind, [2000])

    loader, dataset = open_text(tmp_path, format=kind, shuffle=True, shuffle_buffer_size=400)

    shards = [shard_slice.shard for shard_slice in dataset._epoch_state.plan.slices]
    assert len(shards) > 4
    assert any(len(shard.splits) > 1 for shard in shards)
    assert {shard.rounds for shard in shards} == {1}
    rows = rows_of(loader)
    assert sorted(rows) == list(range(2000))
    assert sum(abs(one - other) > 20 for one, other in itertools.pairwise(rows)) > 1500


def test_a_compressed_file_larger_than_the_buffer_has_to_be_counted_to_be_shuffled(tmp_path: Path):
    write_text(tmp_path, "csv", [2000], suffixes=[".gz"])

    with pytest.raises(ValueError, match=r"part-0\.csv\.gz has about .*count_rows=True"):
        open_text(tmp_path, format="csv", shuffle=True, shuffle_buffer_size=400)


def test_a_compressed_file_is_read_in_pieces_that_fit_the_room(tmp_path: Path):
    write_text(tmp_path, "csv", [60_000], suffixes=[".gz"])

    loader, _ = open_text(
        tmp_path, format="csv", columns=["row"], batch_size=1000, read_ahead_bytes="256KiB", output_format="torch"
    )

    assert [int(row) for batch in loader for row in batch["row"]] == list(range(60_000))


def test_partition_columns_stand_beside_those_of_text(tmp_path: Path):
    for day in ("2024-01-01", "2024-01-02"):
        write_text(tmp_path / f"day={day}", "csv", [5])

    loader, _ = open_text(
        tmp_path, format="csv", partitioning="hive", columns=["day", "row"], filters=pc.field("day") > date(2024, 1, 1)
    )

    assert list(loader) == [{"day": [date(2024, 1, 2)] * 5, "row": [0, 1, 2, 3, 4]}]


@pytest.mark.parametrize("kind", WRITERS)
def test_text_out_of_object_storage_resumes(tmp_path: Path, s3: S3Server, kind: str):
    write_text(tmp_path, kind, suffixes=("", ".gz", "", ".zst"))
    bucket = s3.new_bucket(tmp_path)
    told = {"quote_char": False} if kind == "csv" else {}
    options = {"format": kind, "storage_options": s3.storage_options(), "format_options": told, **SMALL}
    loader, dataset = open_text(f"s3://{bucket}", **options)
    assert any(len(file.row_groups) > 1 for file in dataset._opened_files.manifest.files)
    batches = list(loader)
    assert rows_of(batches) == list(range(ROWS))

    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    again, _ = open_text(f"s3://{bucket}", **options, manifest=dataset.dump_manifest())
    again.load_state_dict(through_json(dataset.state_dict()))

    assert list(again) == batches[5:]
    assert rows_of(open_text(f"s3://{bucket}", count_rows=True, row_id_column="id", **options)[0]) == list(range(ROWS))


# Equality with pyarrow -----------------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")) | st.sampled_from('",\n;'), max_size=8)
COLUMNS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "int": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "float": (pa.float64(), st.floats(allow_nan=False, allow_infinity=False)),
    "bool": (pa.bool_(), st.booleans()),
    "text": (pa.string(), TEXTS),
    "when": (pa.timestamp("s"), st.integers(0, 2**31).map(lambda s: datetime(1990, 1, 1) + timedelta(seconds=s))),  # noqa: DTZ001
}
NESTED = {
    "list": (pa.list_(pa.int64()), st.lists(st.integers(0, 9) | st.none(), max_size=3)),
    "struct": (pa.struct({"x": pa.int64()}), st.fixed_dictionaries({"x": st.integers(0, 9) | st.none()})),
}


@st.composite
def tables(draw: st.DrawFn, kinds: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]]) -> pa.Table:
    names = draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=4))
    rows = draw(st.integers(0, 30))
    columns = {}
    for number, name in enumerate(names):
        kind, values = kinds[name]
        nullable = values | st.none()
        columns[f"{name} {number}"] = pa.array(draw(st.lists(nullable, min_size=rows, max_size=rows)), kind)
    return pa.table(columns)


QUICK = examples(40)


@QUICK
@given(table=tables(COLUMNS), suffix=st.sampled_from(sorted(COMPRESSORS)), batch_size=st.integers(1, 12))
def test_csv_is_what_pyarrow_reads_of_it_as_a_whole(tmp_path: Path, table: pa.Table, suffix: str, batch_size: int):
    sink = io.BytesIO()
    pacsv.write_csv(table, sink)
    path = tmp_path / f"data.csv{suffix}"
    replace_file(path, COMPRESSORS[suffix](sink.getvalue()))
    options = pacsv.ParseOptions(newlines_in_values=True)
    expected = pacsv.read_csv(io.BytesIO(sink.getvalue()), parse_options=options)
    types = [pa.string() if pa.types.is_null(column.type) else column.type for column in expected.schema]
    texts = pacsv.ConvertOptions(column_types=dict(zip(expected.schema.names, types, strict=True)))
    expected = pacsv.read_csv(io.BytesIO(sink.getvalue()), parse_options=options, convert_options=texts)

    loader, dataset = open_text(
        path, format="csv", output_format="arrow", batch_size=batch_size, split_bytes=64, count_rows=True
    )

    assert dataset.schema == expected.schema
    assert len(loader) == -(-expected.num_rows // batch_size)
    assert pa.concat_tables([dataset.schema.empty_table(), *loader]) == expected


@QUICK
@given(table=tables(COLUMNS | NESTED), suffix=st.sampled_from(sorted(COMPRESSORS)), split_bytes=st.integers(20, 500))
def test_json_lines_are_what_pyarrow_reads_of_them_as_a_whole(
    tmp_path: Path, table: pa.Table, suffix: str, split_bytes: int
):
    text = "".join(f"{json.dumps(row, default=str)}\n" for row in table.to_pylist()).encode()
    names = [name for name in table.schema.names if name.startswith("list")]
    lists = [[item for one in table[name].to_pylist() for item in one or ()] for name in names]
    if not text or any(items and items == [None] * len(items) for items in lists):
        return  # no line at all, or lists of nothing but null, whose type is not known
    path = tmp_path / f"data.jsonl{suffix}"
    replace_file(path, COMPRESSORS[suffix](text))
    told = pajson.ParseOptions(explicit_schema=pajson.read_json(io.BytesIO(text)).schema)
    expected = pajson.read_json(io.BytesIO(text), parse_options=told)  # what it infers of [null, 1] is a broken list

    loader, dataset = open_text(path, format="jsonl", output_format="arrow", batch_size=7, split_bytes=split_bytes)

    assert dataset.schema == expected.schema
    assert whole_table(loader) == expected
    if suffix == "" and len(text) > 2 * split_bytes:
        counted = open_text(path, format="json", count_rows=True, split_bytes=split_bytes)[1]
        assert counted._opened_files.manifest.rows == table.num_rows


def test_columns_without_a_common_type_are_named_with_both_files(tmp_path: Path):
    (tmp_path / "a.csv").write_bytes(b"row,x\n1,1\n")
    (tmp_path / "b.csv").write_bytes(b"row,x\n1,one\n")

    advice = r"give its type by format_options=\{'column_types': \.\.\.\}"
    with pytest.raises(ColumnError, match=rf"column 'x' is string in .*b\.csv but int64 in .*a\.csv, .*{advice}"):
        open_text(tmp_path, format="csv")
    told = {"column_types": {"x": "string"}}
    assert next(iter(open_text(tmp_path, format="csv", format_options=told)[0]))["x"] == ["1", "one"]


def test_fields_without_a_common_type_are_named_with_both_files(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"x": "2020-01-01"}\n')
    (tmp_path / "b.jsonl").write_text('{"x": "one"}\n')

    with pytest.raises(ColumnError, match=r"column 'x' is string in .*: give its type by .*'explicit_schema': \.\.\."):
        open_text(tmp_path, format="jsonl")
    told = {"explicit_schema": pa.schema([("x", pa.string())])}
    loader, _ = open_text(tmp_path, format="jsonl", format_options=told)
    assert [value for batch in loader for value in batch["x"]] == ["2020-01-01", "one"]


# What no column of a file is read of, what lies within a column, and numbers that no float holds ----------------------


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("mixing", [{}, {"shuffle": True, "shuffle_buffer_size": 20}], ids=["in order", "mixed"])
def test_partition_columns_alone_have_every_row(tmp_path, kind, counted, mixing):
    for year in (2020, 2021):
        write_text(tmp_path / f"year={year}", kind, files=(40, 20))
    loader, _ = open_text(tmp_path, format=kind, partitioning="hive", columns=["year"], count_rows=counted, **mixing)
    assert sorted(year for batch in loader for year in batch["year"]) == [2020] * 60 + [2021] * 60


NESTED = {
    "a field of a struct": ({"s": {"x": 1}}, {"s": {"x": 1, "y": 2}}, r"\['s\.y'\]"),
    "a field in a list": ({"s": [{"x": 1}]}, {"s": [{"x": 5, "label": 7}]}, r"\['s\.label'\]"),
    "the first field": ({"s": {}}, {"s": {"x": 5}}, r"\['s\.x'\]"),
}


@pytest.mark.parametrize("case", NESTED)
@pytest.mark.parametrize("columns", [None, ["s"], ["s", "t"], ["t"]])
def test_a_field_within_a_column_is_never_passed_over(tmp_path, case, columns):
    early, late, named = NESTED[case]
    lines = [json.dumps({**early, "t": 1, "other": 2})] * 200 + [json.dumps({**late, "t": 1, "other": 2})]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines) + "\n")
    loader, _ = open_text(path, format="jsonl", columns=columns, format_options={"block_size": 256})
    if columns == ["t"]:
        assert sum(len(batch["t"]) for batch in loader) == 201
        return
    with pytest.raises(UnreadableFileError, match=rf"a\.jsonl, line 201: the fields {named} were not in the beginning"):
        list(loader)


@pairwise(unexpected=["infer", "ignore", "error"], typed=["", "a", "ab"], columns=[None, ["a"]], counted=[False, True])
def test_unexpected_fields_are_read_as_pyarrow_reads_them(tmp_path, unexpected, typed, columns, counted):
    given: dict[str, Any] = {"unexpected_field_behavior": unexpected}
    if typed:
        given["explicit_schema"] = pa.schema([(name, pa.int64()) for name in typed])
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"a": row, "b": -row}) + "\n" for row in range(100)))

    def read() -> tuple[Any, Any]:
        options = {**given, "block_size": 256}
        return open_text(path, format="jsonl", format_options=options, columns=columns, count_rows=counted)

    if unexpected == "error" and typed == "a":
        with pytest.raises(pa.ArrowInvalid, match="unexpected field"):
            pajson.read_json(path, parse_options=pajson.ParseOptions(**given))
        with pytest.raises(UnreadableFileError, match=r"line 1: the fields \['b'\] are unexpected, .* is 'error'"):
            read()
        return
    loader, _ = read()
    expected = pajson.read_json(path, parse_options=pajson.ParseOptions(**given))
    expected = expected if columns is None else expected.select(columns)
    batches = list(loader)
    assert {name: [value for batch in batches for value in batch[name]] for name in batches[0]} == expected.to_pydict()


@pytest.mark.parametrize("columns", [None, ["a"], ["b"]])
def test_a_field_that_the_user_calls_an_error_is_one_also_where_it_is_not_requested(tmp_path, columns):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1, "b": 2}\n' * 100 + '{"a": 1, "c": 2}\n')
    options = {"unexpected_field_behavior": "error", "block_size": 256}
    loader, _ = open_text(path, format="jsonl", format_options=options, columns=columns)
    with pytest.raises(UnreadableFileError, match=r"a\.jsonl, line 101: the fields \['c'\] are unexpected"):
        list(loader)


def test_fields_that_the_user_wants_ignored_are_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1, "b": 2}\n' * 100 + '{"a": 1, "c": 2}\n')
    options = {"unexpected_field_behavior": "ignore", "block_size": 256}
    loader, _ = open_text(tmp_path, format="jsonl", format_options=options)
    batches = list(loader)
    assert [value for batch in batches for value in batch["b"]] == [2] * 100 + [None]
    assert {name for batch in batches for name in batch} == {"a", "b"}


def test_a_column_that_the_user_says_is_null_is(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n" + "NA,1\n" * 3)
    loader, dataset = open_text(tmp_path, format="csv", format_options={"column_types": {"a": pa.null()}})
    assert dataset.schema == pa.schema([("a", pa.null()), ("b", pa.int64())])
    assert list(loader) == [{"a": [None] * 3, "b": [1] * 3}]


@pytest.mark.parametrize("columns", [None, ["b"]])
def test_a_type_that_no_csv_is_parsed_to_names_the_option(tmp_path, columns):
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    options = {"column_types": {"a": pa.list_(pa.int32())}}
    with pytest.raises(UnreadableFileError, match=r"a\.csv: format_options\['column_types'\] has a type .*list<"):
        open_text(tmp_path, format="csv", format_options=options, columns=columns)


@pytest.mark.parametrize("line", [2, 5, 33, 50])
def test_a_type_that_changes_in_the_first_block_is_named_with_its_line(tmp_path, line):
    lines = [json.dumps({"a": "x" if number == line else 1}) for number in range(1, 51)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(UnreadableFileError, match=rf"a\.jsonl, line {line}: .* changed from number to string"):
        open_text(tmp_path / "a.jsonl", format="jsonl")


DATES = {
    "date32": (pa.date32(), "2024-02-29", r"date32\[day\] from numbers; .* the type timestamp\[s\] or string"),
    "date64": (pa.date64(), "2024-02-29", r"date64\[ms\] from numbers; .* the type timestamp\[s\] or string"),
    "time32": (pa.time32("s"), "10:00:00", r"time32\[s\] from numbers; .* the type string"),
    "time64": (pa.time64("us"), "10:00:00", r"time64\[us\] from numbers; .* the type string"),
}


@pytest.mark.parametrize("case", DATES)
def test_a_date_that_is_text_names_the_types_that_json_lines_have_for_it(tmp_path, case):
    dtype, value, expected = DATES[case]
    (tmp_path / "a.jsonl").write_text(json.dumps({"a": value}) + "\n")
    with pytest.raises(UnreadableFileError, match=rf"a\.jsonl, line 1: .*{expected} by format_options"):
        open_text(tmp_path, format="jsonl", format_options={"explicit_schema": pa.schema([("a", dtype)])})
    _, dataset = open_text(
        tmp_path, format="jsonl", format_options={"explicit_schema": pa.schema([("a", pa.string())])}
    )
    assert dataset.schema.field("a").type == pa.string()


@pytest.mark.parametrize("kind", WRITERS)
def test_an_integer_that_no_float_holds_is_an_error_where_other_files_make_its_column_one_of_floats(tmp_path, kind):
    texts = {"csv": "a\n{}\n", "jsonl": '{{"a": {}}}\n'}
    for number, value in enumerate((2**53 + 1, 1.5)):
        (tmp_path / f"{number}.{kind}").write_text(texts[kind].format(value))
    with pytest.raises(UnreadableFileError, match=rf"0\.{kind}: column 'a' begins with integers here"):
        list(open_text(tmp_path, format=kind)[0])
    (tmp_path / f"0.{kind}").unlink()
    (tmp_path / f"0.{kind}").write_text(texts[kind].format(2**52))
    assert [value for batch in open_text(tmp_path, format=kind)[0] for value in batch["a"]] == [2.0**52, 1.5]


ROUNDED = {
    "beyond int64": [17, 2**63 + 1],
    "among floats": [1.5, 2**53 + 1],
    "below zero": [-1.5, -(2**53) - 1],
    "beyond all floats": [1.5, 10**400],
    "after nulls": [None, 1.5, None, 2**53 + 1],
    "after many": [1.5] * 400 + [2**53 + 1],
}


def of_values(kind: str, values: list[float | None]) -> str:
    """Return a text with a column of numbers and one of texts."""
    if kind == "csv":
        return "a,b\n" + "".join(f"{'' if value is None else value},x\n" for value in values)
    return "".join(json.dumps({"a": value, "b": "x"}) + "\n" for value in values)


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("case", ROUNDED)
@pytest.mark.parametrize("split_bytes", [1000, 1 << 20])
def test_an_integer_that_no_float_holds_is_an_error_among_the_floats_of_its_file(tmp_path, kind, case, split_bytes):
    values = ROUNDED[case]
    (tmp_path / f"a.{kind}").write_text(of_values(kind, values))
    loader, _ = open_text(tmp_path, format=kind, format_options={"block_size": 900}, split_bytes=split_bytes)
    message = rf"a\.{kind}.*: column 'a' is read as floats, and none of them is the integer {str(values[-1])[:20]}"
    with pytest.raises(UnreadableFileError, match=message):
        list(loader)


LAYOUTS = {
    "a header": ({}, "a,b\n", 1),
    "lines before it": ({"skip_rows": 2}, "# about\n# this file\na,b\n", 3),
    "rows after it": ({"skip_rows_after_names": 2}, "a,b\n0,x\n0,x\n", 3),
    "names given": ({"column_names": ["a", "b"]}, "", 0),
    "names made": ({"autogenerate_column_names": True}, "", 0),
    "line ends in values": ({"newlines_in_values": True}, 'a,b\n0,"x\ny"\n', 3),
    "empty lines": ({}, "a,b\n\n0,x\n\n", 4),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("split_bytes", [300, 1 << 20], ids=["divided", "whole"])
def test_an_integer_that_no_float_holds_is_an_error_of_csv_with_its_line(tmp_path, layout, split_bytes):
    options, beginning, lines = LAYOUTS[layout]
    rows = [*["1.5,x"] * 50, f"{2**53 + 1},x", *["1.5,x"] * 50]
    (tmp_path / "a.csv").write_text(beginning + "\n".join(rows))
    with pytest.raises(UnreadableFileError, match=rf"a\.csv, line {lines + 51}: column '\w+' is read as floats"):
        list(open_text(tmp_path, format="csv", format_options=options, split_bytes=split_bytes)[0])


@pytest.mark.parametrize("kind", WRITERS)
def test_an_integer_that_no_float_holds_is_an_error_in_a_file_that_begins_with_nulls_alone(tmp_path, kind):
    (tmp_path / f"a.{kind}").write_text(of_values(kind, [1.5]))
    (tmp_path / f"b.{kind}").write_text(of_values(kind, [None] * 400 + [2**53 + 1]))
    loader, _ = open_text(tmp_path, format=kind, format_options={"block_size": 900})
    with pytest.raises(UnreadableFileError, match=rf"b\.{kind}.*: column 'a' is read as floats"):
        list(loader)


def test_an_integer_within_a_column_of_floats_that_none_holds_is_an_error_with_its_line(tmp_path):
    lines = ['{"a": [{"b": [0.5]}], "c": 1}', '{"a": [{"b": [null, 9007199254740993]}], "c": 9007199254740993}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(UnreadableFileError, match=r"a\.jsonl, line 2: column 'a' is read as floats"):
        list(open_text(tmp_path, format="jsonl")[0])
    (tmp_path / "a.jsonl").write_text("\n".join(lines).replace("993]", "992]"))
    assert [value for batch in open_text(tmp_path, format="jsonl")[0] for value in batch["c"]] == [1, 2**53 + 1]


@pytest.mark.parametrize("kind", WRITERS)
def test_large_floats_and_integers_that_floats_hold_are_delivered_and_others_where_the_user_gives_the_type(
    tmp_path, kind
):
    file = tmp_path / f"a.{kind}"
    exact = [1.5, None, 1e300, -(10**17), 2**60]
    file.write_text(of_values(kind, exact))
    [batch] = open_text(file, format=kind, output_format="dict", batch_size=100)[0]
    assert batch["a"] == exact
    file.write_text(of_values(kind, [1, 2**63 + 1]))
    for dtype in (pa.uint64(), pa.float64()):
        options = {"column_types": {"a": dtype}} if kind == "csv" else {"explicit_schema": pa.schema([("a", dtype)])}
        [batch] = open_text(file, format=kind, output_format="dict", format_options=options)[0]
        assert batch["a"] == pa.array([1, 2**63 + 1], pa.uint64()).cast(dtype, safe=False).to_pylist()


@pytest.mark.parametrize("outer", ['{{"a": [{}]}}', '{{"a": {{"b": {}}}}}', '{{"a": [{{"b": [null, {}]}}, null]}}'])
def test_an_integer_within_a_column_that_no_float_holds_is_an_error_too(tmp_path, outer):
    for number, value in enumerate((2**53 + 1, 1.5)):
        (tmp_path / f"{number}.jsonl").write_text(outer.format(value) + "\n")
    with pytest.raises(UnreadableFileError, match=r"0\.jsonl: column 'a' begins with integers here"):
        list(open_text(tmp_path, format="jsonl")[0])
    (tmp_path / "0.jsonl").unlink()
    (tmp_path / "0.jsonl").write_text(outer.format(2**52) + "\n")
    [batch] = open_text(tmp_path, format="jsonl")[0]
    assert batch["a"] == [json.loads(outer.format(value))["a"] for value in (2.0**52, 1.5)]
