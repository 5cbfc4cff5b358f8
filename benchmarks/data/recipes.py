"""What the data sets contain: the tables of each, made from a fixed seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

__all__ = ["LABELS", "RECIPES", "Recipe", "Tables"]

SEED = 20
WORDS = 4096

Tables = Iterator[tuple[str, list[pa.Table]]]
"""File names, and the tables that become a file's row groups."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a data set is made.

    Attributes:
        note: A description for the report.
        write: Called with the scale, yields its files.
        verify: The column whose sum shows that each row was delivered once.
    """

    note: str
    write: Callable[[float], Tables]
    verify: str = "id"


def _scaled(rows: int, scale: float, least: int) -> int:
    return max(least, int(rows * scale))


def _numeric_table(random: np.random.Generator, first: int, rows: int) -> pa.Table:
    columns: dict[str, Any] = {f"f{n:02}": random.standard_normal(rows, dtype=np.float32) for n in range(18)}
    columns |= {f"d{n}": random.standard_normal(rows) for n in range(2)}
    return pa.table(columns | {"user": random.integers(0, 1 << 40, rows), "id": np.arange(first, first + rows)})


def _numeric(scale: float, rows: int, files: int, group: int) -> Tables:
    groups = _scaled(rows // files // group, scale, 1)
    for file in range(files):
        random = np.random.default_rng([SEED, file])
        begin = file * groups * group
        yield (
            f"part-{file:03}.parquet",
            [_numeric_table(random, begin + number * group, group) for number in range(groups)],
        )


def _tokens(scale: float) -> Tables:
    group = 2_000
    for file in range(4):
        random = np.random.default_rng([SEED, file])
        tables = []
        for _ in range(_scaled(10, scale, 1)):
            tokens = random.integers(0, 50_257, group * 1024, dtype=np.int32)
            tables.append(pa.table({"tokens": pa.FixedSizeListArray.from_arrays(pa.array(tokens), 1024)}))
        yield f"part-{file:03}.parquet", tables


def _documents(scale: float) -> Tables:
    group = 2_500
    for file in range(4):
        random = np.random.default_rng([SEED, file])
        tables = []
        for _ in range(_scaled(8, scale, 1)):
            lengths = np.clip(random.lognormal(5.8, 1.1, group), 1, 20_000).astype(np.int32)
            tokens = random.integers(1, 50_257, int(lengths.sum()), dtype=np.int32)
            documents = pa.ListArray.from_arrays(np.append(0, np.cumsum(lengths)).astype(np.int32), tokens)
            tables.append(pa.table({"tokens": documents}))
        yield f"part-{file:03}.parquet", tables


def _strings(files: int, groups: int, group: int) -> Tables:
    random = np.random.default_rng(SEED)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = np.array(["".join(random.choice(letters, size)) for size in random.integers(2, 11, WORDS)])
    categories = [f"category {number}" for number in range(100)]
    for file in range(files):
        tables = []
        for number in range(groups):
            first = (file * groups + number) * group
            lengths = random.integers(3, 25, group)
            chosen = words[random.integers(0, WORDS, int(lengths.sum()))]
            texts = [" ".join(part) for part in np.split(chosen, np.cumsum(lengths)[:-1])]
            category = pa.DictionaryArray.from_arrays(random.integers(0, 100, group, dtype=np.int32), categories)
            tables.append(
                pa.table({"text": texts, "category": category.cast(pa.string()), "id": np.arange(first, first + group)})
            )
        yield f"part-{file:03}.parquet", tables


def _values(scale: float) -> Tables:
    """Write values that only Python's own types hold: times, dates, decimals and categories."""
    random, group = np.random.default_rng(SEED), 25_000
    categories = [f"category {number}" for number in range(100)]
    for file in range(4):
        tables = []
        for number in range(_scaled(4, scale, 1)):
            first = (file * _scaled(4, scale, 1) + number) * group
            columns = {
                "id": np.arange(first, first + group),
                "when": pa.array(random.integers(0, 2 * 10**15, group), pa.timestamp("us", "UTC")),
                "day": pa.array(random.integers(0, 20_000, group, dtype=np.int32), pa.date32()),
                "price": pa.array(random.integers(0, 10**6, group), pa.int32()).cast(pa.decimal128(12, 2)),
                "category": pa.DictionaryArray.from_arrays(random.integers(0, 100, group, dtype=np.int32), categories),
            }
            tables.append(pa.table(columns))
        yield f"part-{file:03}.parquet", tables


CATEGORIES = (3, 7, 10, 24, 50, 200, 1_000, 2_000)
"""How many values each column of categories has."""


def _categories(scale: float) -> Tables:
    """Write strings as tables of features have them: few values, of any number of rows."""
    random, group = np.random.default_rng(SEED), 25_000
    values = [pa.array([f"value {number} of {count}" for number in range(count)]) for count in CATEGORIES]
    for file in range(4):
        tables = []
        for number in range(_scaled(4, scale, 1)):
            first = (file * _scaled(4, scale, 1) + number) * group
            drawn = (each.take(pa.array(random.integers(0, len(each), group))) for each in values)
            columns = {f"of_{count}": column for count, column in zip(CATEGORIES, drawn, strict=True)}
            tables.append(pa.table(columns | {"id": np.arange(first, first + group)}))
        yield f"part-{file:03}.parquet", tables


def _wide(scale: float) -> Tables:
    group, random = 10_000, np.random.default_rng(SEED)
    tables = []
    for number in range(_scaled(6, scale, 1)):
        columns: dict[str, Any] = {f"f{n:03}": random.standard_normal(group, dtype=np.float32) for n in range(998)}
        ids = np.arange(number * group, (number + 1) * group)
        tables.append(pa.table(columns | {"d0": random.standard_normal(group), "id": ids.astype(np.float64)}))
    yield "part-000.parquet", tables


def _uneven(scale: float) -> Tables:
    first, group = 0, _scaled(30_000, scale, 500)
    for file, groups in enumerate((1, 32, 2, 16, 4, 8)):
        random = np.random.default_rng([SEED, file])
        tables = [_numeric_table(random, first + number * group, group) for number in range(groups)]
        first += groups * group
        yield f"part-{file:03}.parquet", tables


def _labels(scale: float, group: int) -> Tables:
    """Write files sorted by label."""
    rows = _scaled(500_000 // group, scale, 5) * group
    for file in range(4):
        random = np.random.default_rng([SEED, file])
        tables = []
        for first in range(file * rows, (file + 1) * rows, group):
            ids = np.arange(first, first + group)
            columns: dict[str, Any] = {f"f{n}": random.standard_normal(group, dtype=np.float32) for n in range(8)}
            tables.append(pa.table(columns | {"label": ids * LABELS // (4 * rows), "id": ids}))
        yield f"part-{file:03}.parquet", tables


def _many_files(scale: float) -> Tables:
    rows, random = 100, np.random.default_rng(SEED)
    for file in range(_scaled(10_000, scale, 50)):
        ids = np.arange(file * rows, (file + 1) * rows)
        columns = {f"f{n}": random.standard_normal(rows, dtype=np.float32) for n in range(3)}
        yield f"part-{file:05}.parquet", [pa.table(columns | {"id": ids})]


def _s3_projected(scale: float) -> Tables:
    group = _scaled(10_000, scale, 1_000)
    for file in range(8):
        random = np.random.default_rng([SEED, file])
        tables = []
        for number in range(2):
            columns: dict[str, Any] = {f"f{n:02}": random.standard_normal(group, dtype=np.float32) for n in range(99)}
            first = (2 * file + number) * group
            tables.append(pa.table(columns | {"id": np.arange(first, first + group)}))
        yield f"part-{file:03}.parquet", tables


def _in_format(numeric: Tables, suffix: str) -> Tables:
    """Rename files so that they are written in another format."""
    for name, tables in numeric:
        yield name.replace(".parquet", suffix), tables


LABELS = 50

RECIPES = {
    "labels_small": Recipe(
        "8 float32 and 2 int64 columns in 4 files, sorted by 50 labels, row groups of 500 rows, snappy",
        lambda scale: _labels(scale, 500),
    ),
    "labels_large": Recipe(
        "8 float32 and 2 int64 columns in 4 files, sorted by 50 labels, row groups of 50,000 rows, snappy",
        lambda scale: _labels(scale, 50_000),
    ),
    "numeric": Recipe(
        "18 float32, 2 float64 and 2 int64 columns in 4 files, row groups of 100,000 rows, snappy",
        lambda scale: _numeric(scale, 4_000_000, 4, 100_000),
    ),
    "groups_of_50k": Recipe(
        "the same columns in 4 files, row groups of 50,000 rows, snappy",
        lambda scale: _numeric(scale, 2_000_000, 4, 50_000),
    ),
    "groups_of_100k": Recipe(
        "the same columns in 8 files, row groups of 100,000 rows, snappy",
        lambda scale: _numeric(scale, 2_400_000, 8, 100_000),
    ),
    "small_files": Recipe(
        "the same columns in 200 files of 5,000 rows, snappy",
        lambda scale: _numeric(scale, 1_000_000, 200, 5_000),
    ),
    "groups_of_2k": Recipe(
        "the same columns in 4 files, row groups of 2,000 rows, snappy",
        lambda scale: _numeric(scale, 800_000, 4, 2_000),
    ),
    "small": Recipe(
        "the same columns in 4 files, row groups of 25,000 rows, snappy",
        lambda scale: _numeric(scale, 500_000, 4, 25_000),
    ),
    "sources": Recipe(
        "the same columns in 8 files, row groups of 10,000 rows, snappy",
        lambda scale: _numeric(scale, 2_000_000, 8, 10_000),
    ),
    "tokens": Recipe("rows of 1,024 int32 tokens in 4 files, row groups of 2,000 rows, snappy", _tokens, "tokens"),
    "documents": Recipe(
        "80,000 documents of int32 tokens in 4 files, log-normal lengths, row groups of 2,500 documents, snappy",
        _documents,
        "tokens",
    ),
    "strings": Recipe(
        "a text of 3 to 24 words, a category and an integer in 4 files, snappy",
        lambda scale: _strings(4, _scaled(4, scale, 1), 25_000),
    ),
    "small_files_of_strings": Recipe(
        "a text of 3 to 24 words, a category and an integer in 200 files of 2,000 rows, snappy",
        lambda scale: _strings(_scaled(200, scale, 10), 1, 2_000),
    ),
    "values": Recipe("an integer, a time in UTC, a date, a decimal and a category in 4 files, snappy", _values),
    "categories": Recipe("8 columns of 3 to 2,000 strings each and an integer in 4 files, snappy", _categories),
    "wide": Recipe("1,000 float columns in one file, row groups of 10,000 rows, snappy", _wide),
    "uneven": Recipe("22 numeric columns in 6 files of 1 to 32 row groups, snappy", _uneven),
    "many_files": Recipe("4 numeric columns in 10,000 files of 100 rows, snappy", _many_files),
    "s3": Recipe(
        "18 float32, 2 float64 and 2 int64 columns in 16 files, row groups of 25,000 rows, snappy",
        lambda scale: _numeric(scale, 800_000, 16, 25_000),
    ),
    "s3_few": Recipe(
        "the same columns in 4 files of 10 row groups of 25,000 rows, snappy",
        lambda scale: _numeric(scale, 1_000_000, 4, 25_000),
    ),
    "s3_large": Recipe(
        "the same columns in 8 files of 10 row groups of 100,000 rows, snappy",
        lambda scale: _numeric(scale, 8_000_000, 8, 100_000),
    ),
    "orc": Recipe(
        "18 float32, 2 float64 and 2 int64 columns in 4 ORC files, zstd",
        lambda scale: _in_format(_numeric(scale, 1_000_000, 4, 50_000), ".orc"),
    ),
    "csv": Recipe(
        "18 float32, 2 float64 and 2 int64 columns in 4 CSV files, plain",
        lambda scale: _in_format(_numeric(scale, 400_000, 4, 50_000), ".csv"),
    ),
    "jsonl": Recipe(
        "18 float32, 2 float64 and 2 int64 columns in 4 files of JSON lines, plain",
        lambda scale: _in_format(_numeric(scale, 200_000, 4, 50_000), ".jsonl"),
    ),
    "s3_projected": Recipe("99 float32 and an int64 column in 8 files of 2 row groups, snappy", _s3_projected),
}
