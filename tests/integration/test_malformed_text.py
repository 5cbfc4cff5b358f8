"""Malformed CSV and JSON Lines: an error that names file and line, or every row; never fewer in silence."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from jobs.forked import run_forked
from text_files import COMPRESSORS, WRITERS, csv_of, jsonl_of, open_text, replace_file, rows_of, write_text

from torch_dataloader_utils.errors import UnreadableFileError
from torch_dataloader_utils.formats.text.lines import Text

FLIPS = (0x01, 0x80, 0xFF)

every = pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.soak)], ids=["some", "all"])
"""Of so many damages to a file one is tried."""


def read_all(path: Path, kind: str, **options: Any) -> list[int]:
    return rows_of(open_text(path, format=kind, **options)[0])


def middle(text: bytes, line: int, new: bytes) -> bytes:
    """Return a text with another line in place of one, counted from 1."""
    lines = text.split(b"\n")
    lines[line - 1] = new
    return b"\n".join(lines)


CSV_FAULTS: dict[str, tuple[int, bytes, str]] = {
    "ragged": (31, b"1,2", "Expected 3 columns, got 2"),
    "too many": (31, b"1,2,3,4", "Expected 3 columns, got 4"),
    "bad number": (31, b"x1,2,a", "column 'row': CSV conversion error to int64: invalid value 'x1'.*column_types"),
    "no text": (31, b"1,2,\xff", "column 'name': .*invalid UTF8"),
    "zero byte": (31, b"1,2,a\0", "zero byte"),
    "quote that is not closed": (31, b'1,2,"a', "a quoted value is not closed"),
}
JSON_FAULTS: dict[str, tuple[int, bytes, str]] = {
    "cut": (31, b'{"row": 1, "sco', "Invalid encoding in string|Missing"),
    "bad number": (31, b'{"row": "x"}', "changed from number to string.*explicit_schema"),
    "a float": (31, b'{"row": 1.5}', "couldn't parse:1.5.*explicit_schema"),
    "unknown field": (31, b'{"row": 1, "new": 2}', r"\['new'\] were not in the beginning.*explicit_schema.*`columns`"),
    "null": (31, b"null", "no JSON object"),
    "an array": (31, b"[1]", "no JSON object"),
    "two objects": (31, b'{"row": 1}{"row": 2}', "not one JSON object"),
    "an object and null": (31, b'{"row": 1}null', "not one JSON object"),
    "over two lines": (31, b'{"row":\n1}', "no JSON object|Missing|Invalid"),
    "no text": (31, b'{"row": 1, "name": "\xff"}', "UTF8"),
    "zero bytes": (31, b"\0" * 20, "no JSON object"),
    "twice the field": (31, b'{"row": 1, "row": 2}', "specified twice"),
}


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("suffix", COMPRESSORS)
@pytest.mark.parametrize(
    ("kind", "fault"), [*(("csv", fault) for fault in CSV_FAULTS), *(("jsonl", fault) for fault in JSON_FAULTS)]
)
def test_what_is_wrong_with_a_line_is_an_error_that_names_file_and_line(
    tmp_path: Path, kind: str, fault: str, suffix: str, cut: bool
):
    line, new, words = (CSV_FAULTS if kind == "csv" else JSON_FAULTS)[fault]
    path = tmp_path / f"data.{kind}{suffix}"
    text = WRITERS[kind](range(60))
    blank = b"\n" * 7
    path.write_bytes(COMPRESSORS[suffix](blank + middle(text, line - 7, new)))
    # What the beginning shows is given as an option, so that the beginning itself is not an error.
    schema = {"row": pa.int64(), "score": pa.float64(), "name": pa.string()}
    told: dict[str, Any] = {"column_types": schema}
    if kind == "jsonl":
        told = {"explicit_schema": pa.schema(schema), "block_size": 500}
    options = {"format_options": told, "split_bytes": 300 if cut else 10**6}

    with pytest.raises(UnreadableFileError, match=rf"(?s)data\.{kind}{suffix}, line {line}: .*({words})"):
        read_all(path, kind, **options)


@pytest.mark.timeout(120)
def test_a_line_deep_in_a_large_file_is_named_within_seconds(tmp_path: Path):
    rows = range(200_000)
    (tmp_path / "a.csv").write_bytes(csv_of(rows) + b"1,2\n")
    (tmp_path / "b.jsonl").write_bytes(jsonl_of(rows) + b'{"row": "x"}\n')

    with pytest.raises(UnreadableFileError, match=r"a\.csv, line 200002: Expected 3 columns"):
        read_all(tmp_path, "csv", batch_size=10_000)
    with pytest.raises(UnreadableFileError, match=r"b\.jsonl, line 200001: "):
        read_all(tmp_path, "jsonl", batch_size=10_000)


@every
@pytest.mark.parametrize("suffix", COMPRESSORS)
@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_cut_short_anywhere_is_an_error_or_has_every_whole_line(
    tmp_path: Path, kind: str, suffix: str, every: int
):
    text = WRITERS[kind](range(40))
    stored = COMPRESSORS[suffix](text)
    path = tmp_path / f"data.{kind}{suffix}"
    step = every if suffix else 7 * every
    for length in sorted({*range(0, len(stored), step), 1, len(stored) - 1}):
        replace_file(path, stored[:length])
        try:
            rows = read_all(path, kind)
        except UnreadableFileError as error:
            assert path.name in str(error)  # noqa: PT017 - either is right
            continue
        # Only plain text can be cut so that the rest is sound: its last line, without an end, may be part of one.
        assert suffix == ""
        assert rows[:-1] == list(range(len(rows)))[:-1]
        assert len(rows) in (
            stored[:length].count(b"\n") - (kind == "csv"),
            stored[:length].count(b"\n") + (kind != "csv"),
        )


@every
@pytest.mark.parametrize("suffix", COMPRESSORS)
@pytest.mark.parametrize("kind", WRITERS)
def test_flipped_bytes_are_an_error_or_leave_as_many_rows(tmp_path: Path, kind: str, suffix: str, every: int):
    rows = 40
    stored = COMPRESSORS[suffix](WRITERS[kind](range(rows)))
    path = tmp_path / f"data.{kind}{suffix}"
    for place in range(0, len(stored), max(1, len(stored) // 60)):
        for flip in FLIPS if every == 1 else FLIPS[place % 3 :][:1]:
            damaged = bytearray(stored)
            damaged[place] ^= flip
            replace_file(path, bytes(damaged))
            try:
                found = next(iter(open_text(path, format=kind, batch_size=1000)[0]), {})
            except UnreadableFileError as error:
                assert path.name in str(error)  # noqa: PT017 - either is right
                continue
            # A digit or a letter became another, or a line end one more or one less; zstd without a checksum may
            # come to any text.
            if suffix != ".zst":
                counts = {len(column) for column in found.values()}
                assert max(counts) in range(rows - 1, rows + 2)


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        pytest.param("data.{}", b"", "is empty", id="no bytes"),
        pytest.param("data.{}", b"\n\r\n", "is empty", id="line ends"),
        pytest.param("data.{}.gz", gzip.compress(b""), "is empty", id="gzip of no bytes"),
        pytest.param("data.{}.gz", b"PAR1 or whatever", "is no gzip file", id="no gzip"),
        pytest.param("data.{}.zst", gzip.compress(b"a\n1\n"), "is no zstd file", id="gzip named zst"),
        pytest.param("data.{}.gz", b"\x1f\x8b", "cut short", id="start of gzip"),
        pytest.param("data.{}", b"\0" * 1000, "zero byte|no JSON object|longer than", id="zeros"),
        pytest.param("data.{}", b"PAR1\x15\x04\x15\x00", "zero byte|no JSON object|UTF-8", id="start of Parquet"),
        pytest.param("data.{}", b"\xff\xfe\x00\x01" * 100, "zero byte|UTF-8|no JSON object", id="UTF-16"),
    ],
)
def test_what_is_no_such_text_is_named_when_the_dataset_is_opened(
    tmp_path: Path, kind: str, name: str, content: bytes, words: str
):
    path = tmp_path / name.format(kind)
    path.write_bytes(content)

    with pytest.raises(UnreadableFileError, match=rf"(?s){path.name}.*({words})"):
        open_text(path, format=kind)


def test_a_json_array_is_an_error_that_says_so(tmp_path: Path):
    path = tmp_path / "data.json"
    path.write_text(json.dumps([{"row": 1}, {"row": 2}], indent=1))

    with pytest.raises(UnreadableFileError, match=r"data\.json, line 1: this is a JSON array: write one object a line"):
        open_text(path, format="json")


def test_a_field_that_was_null_in_the_beginning_says_so_when_it_has_a_value(tmp_path: Path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"row": 1, "x": null}\n' * 200 + b'{"row": 1, "x": 3}\n')
    told: dict[str, Any] = {"block_size": 400}

    with pytest.raises(UnreadableFileError, match=r"line 201: .*/x.*no value in the beginning.*explicit_schema"):
        read_all(path, "jsonl", format_options=told, columns=["row", "x"])
    assert len(read_all(path, "jsonl", format_options=told, columns=["row"])) == 201
    told["explicit_schema"] = pa.schema({"x": pa.int64()})
    assert len(read_all(path, "jsonl", format_options=told)) == 201


def test_columns_that_are_named_leave_out_fields_that_turn_up_later(tmp_path: Path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"row": 1, "x": 1}\n' * 200 + b'{"row": 2, "new": 3}\n')
    told = {"block_size": 400}

    assert read_all(path, "jsonl", format_options=told, columns=["row", "x"])[-1] == 2
    with pytest.raises(UnreadableFileError, match=r"line 201: .*'new'"):
        read_all(path, "jsonl", format_options=told)


@pytest.mark.parametrize("kind", WRITERS)
def test_a_line_longer_than_a_block_says_how_to_read_it(tmp_path: Path, kind: str):
    path = tmp_path / f"data.{kind}"
    text = "x" * 5000
    path.write_text(f"row,text\n1,{text}\n" if kind == "csv" else f'{{"row": 1, "text": "{text}"}}\n')

    with pytest.raises(UnreadableFileError, match=rf"data\.{kind}.*block_size"):
        read_all(path, kind, format_options={"block_size": 1000})
    assert read_all(path, kind, format_options={"block_size": 10_000}) == [1]


@pytest.mark.parametrize("change", ["gone", "a directory", "shorter", "rewritten"])
@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_that_changes_between_planning_and_reading_is_an_error(tmp_path: Path, kind: str, change: str):
    write_text(tmp_path, kind, [50, 50])
    path = tmp_path / f"part-1.{kind}"
    loader, _ = open_text(tmp_path, format=kind)
    content = path.read_bytes()
    path.unlink()
    if change == "a directory":
        path.mkdir()
    elif change != "gone":
        path.write_bytes(content if change == "rewritten" else content[:-9])
        os.utime(path, (1, 1))  # a clock may stand still for so short a time

    with pytest.raises(OSError, match=f"part-1.{kind}"):
        list(loader)


@pytest.mark.parametrize("kind", WRITERS)
def test_a_directory_named_like_a_file_is_searched(tmp_path: Path, kind: str):
    write_text(tmp_path / f"data.{kind}", kind, [7])

    assert read_all(tmp_path, kind) == list(range(7))


@pytest.mark.parametrize("kind", WRITERS)
def test_a_wrong_line_is_found_while_rows_are_counted(tmp_path: Path, kind: str):
    ragged: dict[str, Callable[[bytes], bytes]] = {
        "csv": lambda text: middle(text, 20, b"1"),
        "jsonl": lambda text: middle(text, 20, b'{"row": '),
    }
    (tmp_path / f"data.{kind}").write_bytes(ragged[kind](WRITERS[kind](range(40))) + WRITERS[kind](range(0)))
    told = {"block_size": 300}

    with pytest.raises(UnreadableFileError, match=rf"data\.{kind}, line 20: "):
        open_text(tmp_path, format=kind, count_rows=True, format_options=told, split_bytes=250)


@pytest.mark.parametrize("line", ["null", '{"a": ' + "[" * 200_000 + "]" * 200_000 + "}"])
def test_lines_that_end_the_process_that_gives_them_to_pyarrow_are_errors(tmp_path: Path, line: str):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "data.jsonl").write_text(f"{line}\n")
    program = (
        "import sys; from torch_dataloader_utils import StructuredDataset\n"
        "try: StructuredDataset.create_dataloader(sys.argv[1], format='jsonl', num_workers=0)\n"
        "except OSError as error: print(error)\n"
    )

    assert "data.jsonl, line 1: " in run_forked(program, tmp_path, str(tmp_path / "data"))


@pytest.mark.parametrize("suffix", COMPRESSORS)
@pytest.mark.parametrize("read_ahead_bytes", [1000, "128MiB"])
def test_which_lines_are_too_long_does_not_depend_on_how_they_are_read(
    tmp_path: Path, suffix: str, read_ahead_bytes: Any
):
    path = tmp_path / f"data.jsonl{suffix}"
    options = {"format_options": {"block_size": 1000}, "read_ahead_bytes": read_ahead_bytes}

    def written(length: int) -> bytes:
        line = f'{{"row": 60, "name": "{"x" * length}"}}'
        return COMPRESSORS[suffix](jsonl_of(range(60)) + f"{line}\n".encode() + jsonl_of(range(61, 200)))

    path.write_bytes(written(1900))
    assert read_all(path, "jsonl", **options) == list(range(200))
    replace_file(path, written(2100))
    with pytest.raises(UnreadableFileError, match=r"line 61: is longer than 2000 bytes"):
        read_all(path, "jsonl", **options)


ENDLESS = {
    "a quote that is left open": (b'1,"' + b"x,y\n" * 600_000, "line 102: a quoted value is not closed"),
    "a long row": (b"1," + b"x" * 2_400_000 + b"\n", "line 102: a row is longer than what is parsed at a time"),
}


@pytest.mark.parametrize("case", ENDLESS)
def test_a_row_that_is_longer_than_a_block_is_named_with_its_line(tmp_path, case):
    row, message = ENDLESS[case]
    (tmp_path / "a.csv").write_bytes(b"a,b\n" + b"1,x\n" * 100 + row)
    with pytest.raises(UnreadableFileError, match=rf"a\.csv, {message}"):
        list(open_text(tmp_path / "a.csv", format="csv")[0])


@pytest.mark.parametrize(
    "content", [b"\xef\xbb\xbf", b" \n\t\n", b"\n\n"], ids=["byte order mark", "blanks", "line ends"]
)
def test_json_lines_without_a_line_are_an_error_that_names_the_file(tmp_path, content):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(UnreadableFileError, match=r"a\.jsonl is empty: it has not even a line of jsonl"):
        open_text(tmp_path / "a.jsonl", format="jsonl")


def test_a_beginning_of_blank_lines_alone_is_said_to_be_that(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\n" * 3_000_000 + b'{"a": 1}\n')
    with pytest.raises(UnreadableFileError, match=r"a\.jsonl begins with 2097152 bytes without a line of jsonl"):
        open_text(tmp_path / "a.jsonl", format="jsonl")


class Counting(io.RawIOBase):
    """A stream that counts the bytes that are read of it, of all streams together."""

    count = 0

    def __init__(self, stream: pa.NativeFile) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        content: bytes = self._stream.read(size)
        Counting.count += len(content)
        return content


@pytest.mark.parametrize("suffix", COMPRESSORS)
@pytest.mark.parametrize("quoted", [False, True])
def test_of_a_line_much_longer_than_a_block_only_some_blocks_are_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, quoted: bool
):
    opened = Text.open
    monkeypatch.setattr(Text, "open", lambda text: pa.PythonFile(Counting(opened(text)), mode="r"))
    monkeypatch.setattr(Counting, "count", 0)
    quote = b'"' if quoted else b""
    text = csv_of(range(100)) + b"100," + b"1," + quote + b"x" * (64 << 20) + quote + b"\n"
    path = tmp_path / f"data.csv{suffix}"
    path.write_bytes(COMPRESSORS[suffix](text))

    with pytest.raises(UnreadableFileError, match=rf"data\.csv{suffix}, line 102: a row is longer than .*block_size"):
        read_all(path, "csv")
    once = 0 if suffix else len(text)  # one that is not compressed is looked through for quotes before it is parsed
    assert Counting.count < once + (48 << 20)  # Arrow's thread may be 32 blocks of 1 MiB ahead when the error is met


def test_the_lines_of_a_text_are_the_same_wherever_its_pieces_end(monkeypatch: pytest.MonkeyPatch):
    content = b"a\n\nbcdefg\nhi\n" * 3 + b"end"
    for size in range(1, 12):
        monkeypatch.setattr("torch_dataloader_utils.formats.text.lines.CHUNK", size)
        text = Text("a.csv", pa.py_buffer(content))
        assert list(text.lines()) == content.splitlines(keepends=True)
        first, second, third = itertools.islice(text.lines(longest=4), 3)
        assert (first, second) == (b"a\n", b"\n")
        assert b"bcdefg\n".startswith(third)
        assert len(third) > 4
