"""How texts are cut into blocks: each line once, and a quoted line end is never taken for the end of a row."""

from __future__ import annotations

from itertools import islice, repeat

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import csv, json
from support import examples

from torch_dataloader_utils.errors import UnreadableFileError
from torch_dataloader_utils.formats.text import csv as text_csv
from torch_dataloader_utils.formats.text import lines, shared_parsing
from torch_dataloader_utils.formats.text.csv import CsvParser
from torch_dataloader_utils.formats.text.jsonl import BOM, JsonParser
from torch_dataloader_utils.formats.text.lines import Text, last_line_end, line_ends
from torch_dataloader_utils.formats.text.shared_parsing import SharedParsing

NUMBERS = pa.schema([("n", pa.int64())])


def table_of(parser, text):
    return pa.concat_tables(parser.tables(text, SharedParsing()))


@given(st.binary(max_size=40).map(lambda content: content.replace(b"x", b"\n")), st.data())
@examples(200)
def test_the_last_line_end_of_a_part_is_found_in_any_steps(content, data):
    start = data.draw(st.integers(0, len(content)))
    stop = data.draw(st.integers(start, len(content)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "LINE_BYTES", data.draw(st.integers(1, 9)))
        found = last_line_end(pa.py_buffer(content), start, stop)
    assert found == max(start, content.rfind(b"\n", start, stop) + 1)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=60), st.integers(16, 200), st.booleans(), st.booleans())
@examples(100)
def test_json_lines_are_cut_into_blocks_without_losing_a_byte(numbers, size, begins_with_bom, ends_with_line_end):
    content = b"\n".join(b'{"n": %d}' % number for number in numbers) + b"\n" * ends_with_line_end
    text = Text("a.jsonl", pa.py_buffer(BOM * begins_with_bom + content))
    parser = JsonParser(json.ParseOptions(explicit_schema=NUMBERS), 64, ["n"])
    blocks = [(bytes(block), before()) for block, before in parser._blocks(text, repeat(size))]
    assert b"".join(block for block, _ in blocks) == content
    assert all(block.endswith(b"\n") for block, _ in blocks[:-1])
    assert [before for _, before in blocks] == [
        line_ends(pa.py_buffer(b"".join(block for block, _ in blocks[:number]))) for number in range(len(blocks))
    ]
    assert table_of(parser, text)["n"].to_pylist() == numbers


def test_a_line_of_json_that_is_much_longer_than_a_block_is_named_before_all_of_it_is_parsed():
    text = Text("a.jsonl", pa.py_buffer(b'{"n": 1}\n{"n": ' + b" " * 10_000 + b"2}\n"))
    parser = JsonParser(json.ParseOptions(explicit_schema=NUMBERS), 64, ["n"])
    with pytest.raises(UnreadableFileError, match="line 2: is longer than 128 bytes"):
        table_of(parser, text)


def rows_of(content: bytes) -> pa.Table:
    return csv.read_csv(pa.BufferReader(content), parse_options=csv.ParseOptions(newlines_in_values=True))


VALUES = st.text("ab \n\r,\"'", max_size=4)
QUOTED = VALUES.map(lambda value: '"' + value.replace('"', '""') + '"')
PLAIN = st.text("ab '", min_size=1, max_size=3)


@given(
    header=st.tuples(PLAIN | QUOTED, PLAIN | QUOTED),
    rows=st.lists(st.tuples(PLAIN, PLAIN) | st.tuples(QUOTED | PLAIN, QUOTED | PLAIN), min_size=1, max_size=30),
    block=st.integers(60, 100),
)
@examples(200)
def test_csv_has_the_same_rows_with_quotes_in_its_header_as_pyarrow_reads_of_it_with_line_ends_in_values(
    header, rows, block
):
    content = "\n".join(",".join(row) for row in [header, *rows]).encode() + b"\n"
    expected = rows_of(content)
    types = pa.schema([(name, pa.string()) for name in expected.column_names])
    if len(set(types.names)) < len(types.names):
        return
    convert = csv.ConvertOptions(column_types=dict(zip(types.names, types.types, strict=True)))
    parse = csv.ParseOptions(newlines_in_values=True)
    expected = csv.read_csv(pa.BufferReader(content), parse_options=parse, convert_options=convert)
    parser = CsvParser({"block_size": block}, types.names, types)
    text = Text("a.csv", pa.py_buffer(content))
    assert table_of(parser, text).to_pylist() == expected.to_pylist()
    assert pa.Table.from_batches(parser.batches(text, use_threads=False)).to_pylist() == expected.to_pylist()


@pytest.mark.parametrize(
    ("content", "holds"),
    [
        (b'"a","b"\n1,2\n', False),
        (b'"a\n","b"\n1,2\n', True),
        (b'"a","b"\n1,"2"\n', True),
        (b'a",b\n1,2\n', False),
        (b'"a"\r1\r', True),
        (b'"a","b"\r\n1,2\r\n', False),
        (b'"' + b"a" * (1 << 17) + b'","b"\n1,2\n', True),
    ],
    ids=[
        "quoted names",
        "a line end in a name",
        "a quoted value",
        "a quote within a name",
        "rows that end in returns",
        "rows that end in both",
        "a long header",
    ],
)
def test_whether_a_text_may_hold_quoted_line_ends(content, holds):
    parser = CsvParser({}, ["a", "b"], pa.schema([("b", pa.string())]))
    text = Text("a.csv", pa.py_buffer(content))
    assert parser._settings(text, parser._watched(text))[1].newlines_in_values is holds


SPELLED = ["1", "-2.5", "", "NA", "nan", "NULL", "inf", "-inf", "1.#IND"]


@given(
    rows=st.lists(st.tuples(st.sampled_from(SPELLED), st.sampled_from(SPELLED)), min_size=1, max_size=60),
    block=st.integers(40, 90),
    blocks=st.integers(1, 4),
    texts=st.integers(1, 2),
)
@examples(200)
def test_csv_that_is_parsed_piece_by_piece_has_the_rows_and_the_nulls_that_pyarrow_reads_at_once(
    rows, block, blocks, texts
):
    content = "\n".join(",".join(row) for row in [("a", "b"), *rows]).encode()
    types = {"a": pa.float64(), "b": pa.string()}
    expected = csv.read_csv(pa.BufferReader(content), convert_options=csv.ConvertOptions(column_types=types))
    parser = CsvParser({"block_size": block}, ["a", "b"], pa.schema(list(types.items())))
    pieces = SharedParsing()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_parsing, "BLOCKS", blocks)
        patch.setattr(text_csv, "LEAST_ASSUMED", 0)
        for _ in range(texts):  # of the second one, it is known whether nulls are spelled out
            found = list(pieces.tables(parser.tables(Text("a.csv", pa.py_buffer(content)), pieces)))
            assert repr(pa.concat_tables([table for table, _ in found]).to_pylist()) == repr(expected.to_pylist())
            assert [is_last for _, is_last in found] == [False] * (len(found) - 1) + [True]
            assert all(table.num_rows for table, _ in found[:-1])


def test_a_quoted_line_end_after_some_pieces_is_no_end_of_a_row():
    rows = [["plain"]] * 40 + [["quoted\nline end"]] + [["plain"]] * 40
    content = "a\n" + "".join(f'"{value}"\n' if "\n" in value else f"{value}\n" for (value,) in rows)
    parser = CsvParser({"block_size": 64}, ["a"], pa.schema([("a", pa.string())]))
    for _ in range(2):
        assert table_of(parser, Text("a.csv", pa.py_buffer(content.encode())))["a"].to_pylist() == [*map(min, rows)]


@pytest.mark.parametrize(
    ("wrong", "what"),
    [(b"x\n", "invalid value 'x'"), (b"1,2\n", "Expected 1 columns, got 2"), (b"1\0\n", "invalid value '1")],
    ids=["a value", "a row", "a zero byte"],
)
def test_what_is_wrong_after_some_pieces_is_named_with_the_line_of_the_whole_text(wrong, what):
    parser = CsvParser({"block_size": 64}, ["a"], pa.schema([("a", pa.int64())]))
    found = []
    with pytest.raises(UnreadableFileError, match=rf"a\.csv, line 102: .*{what}"):
        found.extend(parser.tables(Text("a.csv", pa.py_buffer(b"a\n" + b"1\n" * 100 + wrong)), SharedParsing()))
    assert not found or sum(table.num_rows for table in found) <= 100


def test_a_row_of_csv_that_may_be_longer_than_a_block_is_taken_or_refused_as_pyarrow_does():
    parser = CsvParser({"block_size": 64}, ["a"], pa.schema([("a", pa.string())]))
    for before in range(1, 130):
        content = b"a\n" + b"b\n" * before + b"c" * 100 + b"\n" + b"d\n" * 10
        try:
            expected = csv.read_csv(
                pa.BufferReader(content), csv.ReadOptions(block_size=64, use_threads=False)
            ).num_rows
        except pa.ArrowInvalid:
            with pytest.raises(UnreadableFileError, match=f"line {before + 2}: a row is longer"):
                table_of(parser, Text("a.csv", pa.py_buffer(content)))
        else:
            assert table_of(parser, Text("a.csv", pa.py_buffer(content))).num_rows == expected


def test_the_first_rows_of_each_text_are_there_before_the_others_are_parsed():
    shared = SharedParsing()
    for _ in range(2):  # also of a text that another thread began before
        parsed = []
        tables = shared.tables(parsed.append(number) or pa.table({"a": [number]}) for number in range(100))
        assert next(tables)[0]["a"].to_pylist() == [0]
        assert parsed == [0, 1]
        assert [table.num_rows for table, _ in tables] == [shared_parsing.PIECES] * 24 + [3]


@pytest.mark.parametrize(
    ("blocks", "compression", "pieces"),
    [(8, None, [4, 4, 4]), (9, None, [1, 2, 4, 4, 4]), (2, "gzip", [1, 2, 4, 4, 4])],
    ids=["short", "long", "compressed"],
)
def test_the_first_pieces_of_a_long_text_are_small(blocks, compression, pieces):
    sizes = shared_parsing.piece_sizes(Text("a", pa.py_buffer(b"1" * 64 * blocks), compression), 64)
    assert list(islice(sizes, len(pieces))) == [64 * piece for piece in pieces]


def test_rows_without_columns_are_counted_once_where_a_quote_comes_after_the_first_pieces(monkeypatch):
    monkeypatch.setattr(shared_parsing, "BLOCKS", 1)
    lines_of = [*["1,2"] * 200, '3,"4"', *["5,6"] * 100]
    text = Text("a.csv", pa.py_buffer("\n".join(["a,b", *lines_of]).encode()))
    parser = CsvParser({"block_size": 100}, ["a", "b"], pa.schema([]))
    tables = list(parser.tables(text, SharedParsing()))
    assert len(tables) > 1
    assert sum(map(len, tables)) == len(lines_of)
