"""What tests share: small datasets of several files and row groups, and the rows of batches by their ids."""

from __future__ import annotations

import hashlib
import importlib.util
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import settings
from hypothesis import strategies as st

from torch_dataloader_utils import StructuredDataLoader, StructuredDataset
from torch_dataloader_utils.planning.manifest import DataFile, Manifest, RowGroup
from torch_dataloader_utils.planning.plan import Plan, PlanOptions, Shard


def skip_unless_installed(*names: str, reason: str) -> None:
    """Skip a module of tests unless packages are installed. They are not imported: most processes only collect it."""
    if any(importlib.util.find_spec(name) is None for name in names):
        pytest.skip(reason, allow_module_level=True)


DEFAULT_FILES = ((130, 50), (7, 50), (211, 40), (95, 30))
"""Rows and row group size of each file: uneven, one tiny, no row group as long as a batch is."""


def write_dataset(directory: Path, files: tuple[tuple[int, int], ...] = DEFAULT_FILES) -> int:
    """Write one Parquet file for each (rows, row group size) and return the number of rows.

    `value` is the row's place in the dataset, `score` a float made from it, `name` a string.
    """
    directory.mkdir(parents=True, exist_ok=True)
    first = 0
    for number, (rows, group_rows) in enumerate(files):
        values = np.arange(first, first + rows)
        names = pa.array([f"row {value}" for value in values], pa.string())
        table = pa.table({"value": values, "score": values / 7, "name": names})
        pq.write_table(table, directory / f"part-{number:03d}.parquet", row_group_size=group_rows)
        first += rows
    return first


def open_loader(path: Any, **options: Any) -> tuple[StructuredDataLoader, StructuredDataset]:
    """Open a dataset with row ids in the column `row`, batches of 16, in this process, unless told otherwise."""
    return StructuredDataset.create_dataloader(
        path, **{"row_id_column": "row", "batch_size": 16, "num_workers": 0, **options}
    )


def rows_of(batch: Any) -> list[int]:
    """Return a batch's row ids."""
    rows = batch["row"]
    return [int(row) for row in (rows.to_pylist() if isinstance(rows, pa.ChunkedArray) else rows)]


def edited(state: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a state with other values, and without the checksum, by which a change would be noticed."""
    return {key: value for key, value in state.items() if key != "checksum"} | changes


def batches_of(iterable: Any) -> list[list[int]]:
    """Return the row ids of every batch."""
    return [rows_of(batch) for batch in iterable]


def all_rows_of(iterable: Any) -> list[int]:
    """Return the row ids of all batches in one list."""
    return [row for batch in iterable for row in rows_of(batch)]


def counted(rows: pa.Table) -> Counter[str]:
    """Return how often each row of a table is there, as a text, in which NaN is equal to itself."""
    return Counter(map(repr, rows.select(sorted(rows.column_names)).to_pylist()))


def delivered(iterable: Any) -> Counter[str]:
    """Return the same of batches that are dictionaries of Python lists."""
    counts: Counter[str] = Counter()
    for batch in iterable:
        names = sorted(batch)
        rows = zip(*(batch[name] for name in names), strict=True)
        counts.update(repr(dict(zip(names, row, strict=True))) for row in rows)
    return counts


def examples(most: int, least: int = 20, part: int = 4) -> settings:
    """Have Hypothesis try so many examples in `make soak`, and a part of them, always the same, elsewhere.

    Args:
        most: How many in `make soak`.
        least: How many elsewhere if that part is less.
        part: Which part: 4 is a quarter, 8 an eighth.
    """
    few = min(most, max(least, most // part))
    return settings(max_examples=most if settings.get_current_profile_name() == "random" else few)


FILE_NAMES = ("a.parquet", "b/a.parquet", "b/z z.parquet", "day=1/x.parquet", "day=10/x.parquet", "\u00e9.parquet")


def manifest_of(*files: Iterable[tuple[int, int]], root: str = "/data") -> Manifest:
    """Return the manifest of made-up files, each given as the (rows, bytes) of its row groups."""
    return Manifest(root, tuple(_data_file(path, groups) for path, groups in zip(FILE_NAMES, files, strict=False)))


def _data_file(path: str, groups: Iterable[tuple[int, int]]) -> DataFile:
    row_groups = tuple(RowGroup(rows, size) for rows, size in groups)
    digest = hashlib.blake2b(repr(row_groups).encode(), digest_size=8).hexdigest()
    return DataFile(path, 100 + len(row_groups), digest, row_groups)


def manifests() -> st.SearchStrategy[Manifest]:
    """Any layout: no files, files without row groups, row groups without rows, no bytes or far too many."""
    group = st.tuples(st.integers(0, 60), st.one_of(st.integers(0, 300), st.just(2**60)))
    uneven = st.lists(group, max_size=8)
    even = st.tuples(st.tuples(st.integers(1, 12), st.just(100)), st.integers(3, 24)).map(lambda one: [one[0]] * one[1])
    files = st.lists(st.one_of(uneven, even), max_size=len(FILE_NAMES))
    return files.map(lambda layout: manifest_of(*layout))


@st.composite
def plan_options(draw: st.DrawFn) -> PlanOptions:
    """Any options of a plan."""
    shuffle = draw(st.booleans())
    return PlanOptions(
        split_bytes=draw(st.one_of(st.integers(1, 1500), st.just(2**70))),
        split_rows=draw(st.one_of(st.none(), st.integers(1, 200))),
        shuffle=shuffle,
        shuffle_seed=draw(st.one_of(st.integers(-3, 3), st.just(-(2**80)), st.just(2**200))),
        shuffle_buffer_size=draw(st.one_of(st.none(), st.integers(1, 300))) if shuffle else None,
    )


def shards_of(plan: Plan) -> list[Shard]:
    """Return the shards of a plan, in order."""
    return [shard_slice.shard for shard_slice in plan.slices]


def row_ids(manifest: Manifest, shard: Shard) -> list[int]:
    """Return the places of a shard's rows among all rows of the manifest, in file order of its splits."""
    first = manifest.first_rows
    return [first[split.path] + split.row_offset + row for split in shard.splits for row in range(split.row_length)]
