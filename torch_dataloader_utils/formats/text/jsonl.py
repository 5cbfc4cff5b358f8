"""JSON Lines by pyarrow.json: an object in each line, parsed in blocks of whole lines.

pyarrow accepts what is not JSON Lines: several values in a line, and values that span lines. When it infers columns, a
``null`` in place of an object crashes the process. So lines are checked before they are parsed, and counted afterwards.
"""

from __future__ import annotations

import contextlib
import json as standard_json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from pyarrow import json

from torch_dataloader_utils.columns.arrow_memory import memory_pool
from torch_dataloader_utils.errors import UnreadableFileError
from torch_dataloader_utils.formats.recognition import ENDINGS
from torch_dataloader_utils.formats.schema import FileSchema, unified
from torch_dataloader_utils.formats.text.exact_integers import (
    DIGITS,
    floats_of,
    integer_of,
    is_rounded,
    may_be_rounded,
    rounded,
)
from torch_dataloader_utils.formats.text.format import BOM, Sample, TextFormat, require_known_options
from torch_dataloader_utils.formats.text.lines import CHUNK, Text, last_line_end, line_ends
from torch_dataloader_utils.formats.text.shared_parsing import SharedParsing, piece_sizes
from torch_dataloader_utils.storage.filesystem import Storage
from torch_dataloader_utils.storage.stored_file import StoredFile

OPTIONS = ("block_size", "explicit_schema", "unexpected_field_behavior")
OURS = {"use_threads": "it is set by how the dataset is read", "newlines_in_values": "a row is a line"}

NOT_AN_OBJECT = re.compile(rb"^[ \t\r]*[^{ \t\r\n]", re.MULTILINE)
LONG_INTEGER = re.compile(rb"(?<![0-9.])[0-9]{%d,}(?![0-9.eE])" % DIGITS)
NULL_AFTER = re.compile(rb"\}[ \t\r]*null")
STRING = re.compile(rb'"(?:[^"\\]|\\.)*"?', re.DOTALL)
FROM_NUMBER = re.compile(r"Column\(/([^/]+)\) changed from number to string")
IN_ROW = re.compile(r" in row \d+$")

UNEXPECTED = "unexpected field"
"""pyarrow's message for a field that is not in its schema."""

UNEXPECTED_WITHIN = "unexpected field within a column"
SEVERAL = "this is not one JSON object in a line of its own"

LONGEST = 2
"""How many blocks a line may fill. Whether pyarrow accepts a longer line depends on where its blocks begin."""

DEEPEST = 200

NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


@dataclass(frozen=True)
class JsonLines(TextFormat):
    """An object in each line: https://jsonlines.org.

    Attributes:
        takes_unknown: Whether fields that no file's beginning has are ignored, because the user named the columns.
    """

    name: ClassVar[str] = "jsonl"
    suffixes: ClassVar[tuple[str, ...]] = ENDINGS["jsonl"]
    types_option: ClassVar[str | None] = "explicit_schema"
    blank: ClassVar[bytes] = b" \t\r\n"

    takes_unknown: bool

    def __post_init__(self) -> None:
        require_known_options(self.options, OPTIONS, OURS, "JSON Lines")
        try:
            json.ReadOptions(block_size=self.options.get("block_size"))
            json.ParseOptions(explicit_schema=self._explicit, unexpected_field_behavior=self._unexpected)
        except (TypeError, ValueError, pa.ArrowException) as error:
            raise ValueError(f"format_options: {error}") from None

    @property
    def _explicit(self) -> pa.Schema:
        schema = self.options.get("explicit_schema")
        return pa.schema([]) if schema is None else pa.schema(schema)

    @property
    def _unexpected(self) -> Any:
        """What the user wants to be done with unexpected fields. By default that is decided where lines are parsed."""
        return self.options.get("unexpected_field_behavior", "infer")

    def sample(self, file: str, content: bytes, *, is_all: bool) -> Sample:
        """Return the columns that pyarrow infers from the first block."""
        text, content = Text(file, pa.py_buffer(content)), content.removeprefix(BOM)
        if content.lstrip()[:1] == b"[":
            raise text.error(
                1, "this is a JSON array: write one object a line, without brackets and commas around them"
            )
        block = content if is_all and len(content) <= self.block_bytes else _first_block(content, self.block_bytes)
        if block is None:
            raise text.error(1, _too_long(self.block_bytes))
        _require_text(text, block)
        _require_objects(text, block)
        _require_shallow(text, block)
        # Without a schema, pyarrow infers all columns whatever is to become of unexpected ones.
        unexpected = "infer" if self.options.get("explicit_schema") is None else self._unexpected
        options = json.ParseOptions(explicit_schema=self._explicit, unexpected_field_behavior=unexpected)
        parser = JsonParser(options, self.block_bytes, is_strict=self._is_strict)
        table = parser.block(text, block, lambda: 0, use_threads=False)  # with them, files would wait for one another
        return Sample(table.schema, table.num_rows, len(block))

    def can_cut(self, storage: Storage, file: StoredFile, head: bytes) -> bool:  # noqa: ARG002
        """Return True: a row is a line, because line ends within strings are escaped."""
        return True

    def unified(self, schemas: Sequence[FileSchema]) -> list[pa.Schema]:
        """Return the columns of all files together: any file may have any of them after its beginning."""
        whole = unified(schemas)
        if not whole.problems:
            return [whole.schema] * len(schemas)
        in_files = [
            {column.name: column for column in file.schema if column.name in whole.problems} for file in schemas
        ]
        return [pa.schema([in_file.get(column.name, column) for column in whole.schema]) for in_file in in_files]

    def counting_parser(self, names: Sequence[str]) -> JsonParser:  # noqa: ARG002
        """Return the parser that counts rows: every line is parsed, and no field is kept."""
        options = json.ParseOptions(explicit_schema=pa.schema([]), unexpected_field_behavior="ignore")
        return JsonParser(options, self.block_bytes)

    def parser(self, names: Sequence[str], stored: pa.Schema, floats: Collection[str]) -> JsonParser:
        """Return the parser of a file's texts."""
        known: Sequence[str] | None = None
        if self._unexpected == "error" and len(stored) < len(names):
            unexpected, known = "infer", names  # pyarrow would refuse the columns that are not needed
        elif self._unexpected != "infer":
            unexpected = self._unexpected
        elif not self.takes_unknown and len(stored) == len(names):
            unexpected = "error"
        else:  # pyarrow would also ignore unknown fields within columns
            unexpected = "infer" if any(_holds_struct(column.type) for column in stored) else "ignore"
        options = json.ParseOptions(explicit_schema=stored, unexpected_field_behavior=unexpected)
        inferred = set(floats).difference(self._explicit.names)
        return JsonParser(options, self.block_bytes, stored.names, known, inferred, is_strict=self._is_strict)

    @property
    def _is_strict(self) -> bool:
        """Whether the user wants no unexpected field."""
        return bool(self._unexpected == "error")


class JsonParser:
    """Parses lines into rows.

    `names` are the columns to return; None if only types, or the number of rows, are needed. Values are then not
    validated: pyarrow infers the right type of lists that begin with null, but wrong values. `known` are the columns
    that lines may have, if the options do not say so; None for any. `floats` are those of inferred types that hold
    floats. `is_strict` says that the user wants no others.
    """

    def __init__(
        self,
        options: json.ParseOptions,
        block_bytes: int,
        names: list[str] | None = None,
        known: Sequence[str] | None = None,
        floats: Collection[str] = (),
        *,
        is_strict: bool = False,
    ) -> None:
        self._options = options
        self._block_bytes = block_bytes
        self._names = names
        self._known = None if known is None else frozenset(known)
        self._floats = sorted(floats)
        self._is_strict = is_strict
        self._types = {column.name: column.type for column in options.explicit_schema}

    def tables(self, text: Text, shared: SharedParsing) -> Iterator[pa.Table]:
        """Yield the rows, some blocks at a time."""
        has_rows = False
        for block, line in self._blocks(text, piece_sizes(text, self._block_bytes)):
            yield self.block(text, block, line, use_threads=shared.uses_threads)
            has_rows = True
        if not has_rows:
            yield self._selected(self._options.explicit_schema.empty_table())

    def batches(self, text: Text, *, use_threads: bool) -> Iterator[pa.RecordBatch]:
        """Yield the rows, block by block."""
        for block, line in self._blocks(text, repeat(self._block_bytes)):
            yield from self.block(text, block, line, use_threads=use_threads).to_batches()

    def block(self, text: Text, block: bytes | pa.Buffer, line: Callable[[], int], *, use_threads: bool) -> pa.Table:
        """Return the rows of a block of lines; `line` counts the lines of the text that are before the block."""
        table = self._parsed(block, use_threads=use_threads)
        if isinstance(table, pa.Table):
            self._require_exact(text, block, line, table)
            return self._selected(table)
        raise self._error(text, bytes(block), line(), table)

    def _require_exact(self, text: Text, block: bytes | pa.Buffer, line: Callable[[], int], table: pa.Table) -> None:
        """Raise if a float stands for an integer that it does not hold."""
        doubtful = [
            name
            for name in self._floats
            if any(map(may_be_rounded, floats_of(table[name], self._types[name], pa.types.is_floating)))
        ]
        for number, content in enumerate(bytes(block).split(b"\n") if doubtful else [], 1):
            row = standard_json.loads(content, parse_int=integer_of) if LONG_INTEGER.search(content) else {}
            for name in doubtful:
                value = next(filter(is_rounded, _integers(row.get(name), self._types[name])), None)
                if value is not None:
                    raise text.error(line() + number, rounded(name, value, "'explicit_schema': ..."))

    def _selected(self, table: pa.Table) -> pa.Table:
        return table if self._names is None else table.select(self._names)

    def _blocks(self, text: Text, sizes: Iterator[int]) -> Iterator[tuple[bytes | pa.Buffer, Callable[[], int]]]:
        """Yield blocks of whole lines, of about a size each, and what counts the lines before each."""
        if text.compression is None:
            yield from self._blocks_in_memory(text, sizes)
        else:
            yield from self._blocks_of_stream(text, sizes)

    def _blocks_in_memory(self, text: Text, sizes: Iterator[int]) -> Iterator[tuple[pa.Buffer, Callable[[], int]]]:
        """Yield blocks without copying them."""
        content = text.content
        start = len(BOM) if not text.start and bytes(content[: len(BOM)]) == BOM else 0
        stop = start
        while start < content.size:
            size = next(sizes)
            stop = content.size if stop + size + size // 2 >= content.size else stop + size
            end = content.size if stop == content.size else last_line_end(content, start, stop)
            if end > start:
                yield content.slice(start, end - start), partial(line_ends, content.slice(0, start))
                start = stop = end
            elif stop - start > LONGEST * self._block_bytes:
                raise text.error(line_ends(content.slice(0, start)) + 1, _too_long(self._block_bytes))

    def _blocks_of_stream(self, text: Text, sizes: Iterator[int]) -> Iterator[tuple[bytes, Callable[[], int]]]:
        rest, line, first = b"", 0, not text.start
        try:
            with text.open() as stream:
                while content := stream.read(next(sizes)):
                    content = content.removeprefix(BOM) if first else content
                    first = False
                    whole, end, left = content.rpartition(b"\n")
                    if not end and len(rest) + len(left) > LONGEST * self._block_bytes:
                        raise text.error(line + 1, _too_long(self._block_bytes))
                    if end:
                        block = rest + whole + end
                        yield block, partial(int, line)
                        line += block.count(b"\n")
                        rest = left
                    else:
                        rest += left
        except OSError as error:
            if isinstance(error, UnreadableFileError):
                raise
            raise text.error(None, f"it is cut short or damaged: {error}") from None
        if rest:
            yield rest, partial(int, line)

    def _parsed(self, block: bytes | pa.Buffer, *, use_threads: bool, divided: bool = True) -> pa.Table | str:
        """Return the rows of some lines, or what is wrong with them, as a message.

        pyarrow divides them into blocks of its own, in which it may refuse a long line: then it gets them once more.
        """
        lines = self._count(block)
        if isinstance(lines, str):
            return lines
        if not lines:
            return self._options.explicit_schema.empty_table()
        size = self._block_bytes if divided else max(self._block_bytes, len(block) + 1)
        try:
            read = json.ReadOptions(use_threads=use_threads, block_size=size)
            table = json.read_json(pa.BufferReader(block), read, self._options, memory_pool=memory_pool())
            if self._names is not None:
                table.validate(full=True)  # strings are not validated before
        except pa.ArrowException as error:
            return self._parsed(block, use_threads=False, divided=False) if divided else str(error)
        if any(table.schema.field(name).type != self._types[name] for name in self._names or ()):
            return UNEXPECTED_WITHIN
        if self._known is not None and not self._known.issuperset(table.schema.names):
            return UNEXPECTED
        return table if table.num_rows == lines else SEVERAL

    def _count(self, block: bytes | pa.Buffer) -> int | str:
        """Return how many rows some lines hold, or what is wrong with them, as a message."""
        characters = np.frombuffer(block, dtype=np.uint8)
        pieces = ((first, characters[first : first + CHUNK]) for first in range(0, len(characters), CHUNK))
        ends = np.concatenate([np.flatnonzero(piece == ord("\n")) + first for first, piece in pieces])
        starts = ends[ends < len(characters) - 1] + 1
        if np.diff(starts, prepend=0, append=len(block)).max() > LONGEST * self._block_bytes:
            return _too_long(self._block_bytes)
        if characters[0] == ord("{") and (characters[starts] == ord("{")).all():
            return len(starts) + 1
        if NOT_AN_OBJECT.search(block):
            return "this is no JSON object: a row is an object in a line of its own"
        return sum(1 for line in bytes(block).split(b"\n") if line.strip(b" \t\r"))

    def _error(self, text: Text, block: bytes, line: int, what: str) -> UnreadableFileError:
        """Return the error of the first wrong line, found by bisection."""
        lines = [content + b"\n" for content in block.split(b"\n")] if b"\n" in block else [block]
        sound, wrong = 0, len(lines)
        while wrong - sound > 1:
            middle = (sound + wrong) // 2
            found = self._parsed(b"".join(lines[:middle]), use_threads=False, divided=False)
            if isinstance(found, str):
                wrong, what = middle, found
            else:
                sound = middle
        schema = self._options.explicit_schema
        others = (self._known or frozenset()).difference(schema.names)
        known = pa.schema([*schema, *(pa.field(name, pa.null()) for name in others)])
        return text.error(line + wrong, _explained(what, lines[wrong - 1], known, is_strict=self._is_strict))


def _explained(what: str, line: bytes, known: pa.Schema, *, is_strict: bool) -> str:
    """Return what is wrong with a line, and what to do where that is known."""
    what = IN_ROW.sub("", what.removeprefix("JSON parse error: "))
    option = "format_options={'explicit_schema': ...}"
    if what in (UNEXPECTED, UNEXPECTED_WITHIN):
        unknown: list[str] = []
        with contextlib.suppress(ValueError, RecursionError):
            unknown = list(_unknown_fields(standard_json.loads(line), pa.struct(list(known))))
        if what == UNEXPECTED_WITHIN:  # unknown columns are not requested
            unknown = [name for name in unknown if "." in name]
        if is_strict:
            what = f"the fields {unknown} are" if unknown else "a field is"
            return f"{what} unexpected, and unexpected_field_behavior is 'error': give their types by {option}"
        what = f"the fields {unknown} were" if unknown else "a field was"
        what += f" not in the beginning of any file: give their types by {option}"
        if any("." not in name for name in unknown):
            what += ", or name `columns` without them"
    elif "changed from null" in what:
        what += f": it had no value in the beginning of any file, so its type is not known; give it by {option}"
    elif "list offsets" in what:
        what = "a list holds nothing but null, so the type of what it holds is not known; give it by " + option
    elif (dtype := _read_from_numbers(what, known)) is not None:
        of_text = "timestamp[s] or string" if pa.types.is_date(dtype) else "string"
        what += f": pyarrow reads {dtype} from numbers; give what is text the type {of_text} by {option}"
    elif "changed from" in what or "Failed to convert" in what:
        what += f"; types may be set by {option}"
    return what


def _read_from_numbers(what: str, known: pa.Schema) -> pa.DataType | None:
    """Return the type of a column of dates or times of a day that text was found in; None if that is not wrong."""
    found = FROM_NUMBER.search(what)
    dtype = known.field(found[1]).type if found and found[1] in known.names else None
    return dtype if dtype is not None and (pa.types.is_date(dtype) or pa.types.is_time(dtype)) else None


def _integers(value: object, dtype: pa.DataType) -> Iterator[int]:
    """Yield the integers, at any depth, that a value has where its type has floats."""
    if pa.types.is_floating(dtype):
        yield from [value] if isinstance(value, int) else []
    elif isinstance(value, list) and pa.types.is_list(dtype):
        for inner in value:
            yield from _integers(inner, dtype.value_type)
    elif isinstance(value, dict) and pa.types.is_struct(dtype):
        for field in dtype:
            yield from _integers(value.get(field.name), field.type)


def _unknown_fields(value: object, dtype: pa.DataType, within: str = "") -> Iterator[str]:
    """Yield the fields, at any depth, that a value has and its type does not."""
    if isinstance(value, dict) and pa.types.is_struct(dtype):
        known = {field.name: field.type for field in dtype}
        for name, inner in value.items():
            if name in known:
                yield from _unknown_fields(inner, known[name], f"{within}{name}.")
            else:
                yield f"{within}{name}"
    elif isinstance(value, list) and pa.types.is_list(dtype):
        for inner in value:
            yield from _unknown_fields(inner, dtype.value_type, within)


def _holds_struct(dtype: pa.DataType) -> bool:
    return pa.types.is_struct(dtype) or (pa.types.is_list(dtype) and _holds_struct(dtype.value_type))


def _is_wrong(line: bytes) -> bool:
    """Whether a line is neither blank nor one object."""
    try:
        return bool(line.strip()) and not isinstance(standard_json.loads(line), dict)
    except (ValueError, RecursionError):
        return True


def _first_block(content: bytes, size: int) -> bytes | None:
    """Return the first whole lines of a text, of about a size; None if it has no line end."""
    end = content.rfind(b"\n", 0, size) + 1 or content.find(b"\n", size) + 1
    return content[:end] if end else None


def _require_text(text: Text, block: bytes) -> None:
    """Raise unless it is UTF-8, because columns are named by it."""
    try:
        block.decode()
    except UnicodeDecodeError as error:
        raise text.error(block.count(b"\n", 0, error.start) + 1, f"is not valid UTF-8: {error.reason}") from None


def _require_objects(text: Text, block: bytes) -> None:
    """Raise if a line has null after an object: pyarrow, inferring columns from it, would crash the process."""
    for number, line in enumerate(block.split(b"\n") if NULL_AFTER.search(block) else (), 1):
        if _is_wrong(line):
            raise text.error(number, SEVERAL)


def _require_shallow(text: Text, block: bytes) -> None:
    """Raise if values are nested so deeply that pyarrow, inferring columns by recursion, would crash the process."""
    if _depth(block) <= DEEPEST:
        return
    for number, line in enumerate(block.split(b"\n"), 1):
        if _depth(STRING.sub(b"", line)) > DEEPEST:
            raise text.error(number, f"its values are nested more than {DEEPEST} deep")


def _depth(content: bytes) -> int:
    """Return how deeply values are nested, at most."""
    brackets = np.frombuffer(content.translate(None, NO_BRACKETS), dtype=np.uint8)
    steps = np.where((brackets == ord("[")) | (brackets == ord("{")), 1, -1)
    return int(np.cumsum(steps).max(initial=0))


def _too_long(block_bytes: int) -> str:
    return f"is longer than {LONGEST * block_bytes} bytes: pass format_options={{'block_size': ...}} in bytes"
