"""Small shards of shuffled rows are read and permuted together, each within itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from support import open_loader, rows_of, write_dataset

from torch_dataloader_utils.reading import shuffled

GROUPS = 40
ROWS = 50
"""Of a row group, and of a shard."""


def rows_and_takes(path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[list[int], int]:
    """Return the rows of an epoch, and how many tables were permuted for them."""
    takes = []

    def take(table: pa.Table, indices: pa.Array, **how: Any) -> pa.Table:
        takes.append(len(indices))
        return real(table, indices, **how)

    real = pc.take
    monkeypatch.setattr(pc, "take", take)
    loader, _ = open_loader(path, shuffle=True, shuffle_buffer_size=ROWS, **options)
    return [row for batch in loader for row in rows_of(batch)], len(takes)


def test_small_shards_are_permuted_at_once_and_each_keeps_its_rows(tmp_path: Path, monkeypatch):
    write_dataset(tmp_path, ((GROUPS * ROWS, ROWS),))
    rows, takes = rows_and_takes(tmp_path, monkeypatch)
    assert takes <= GROUPS // 8
    shards = [rows[first : first + ROWS] for first in range(0, len(rows), ROWS)]
    assert all(len({row // ROWS for row in shard}) == 1 for shard in shards)
    assert not any(shard == sorted(shard) for shard in shards)
    assert sorted(rows) == list(range(GROUPS * ROWS))


def test_the_memory_for_reading_bounds_what_is_permuted_at_once(tmp_path: Path, monkeypatch):
    write_dataset(tmp_path, ((GROUPS * ROWS, ROWS),))
    together, _ = rows_and_takes(tmp_path, monkeypatch)
    monkeypatch.undo()
    one_by_one, takes = rows_and_takes(tmp_path, monkeypatch, read_ahead_bytes=1_000)
    assert takes >= GROUPS
    assert one_by_one == together


@pytest.mark.parametrize("columns", [None, ["value"]])
def test_the_order_of_a_shard_does_not_depend_on_which_thread_draws_it(tmp_path: Path, monkeypatch, columns):
    write_dataset(tmp_path, ((GROUPS * ROWS, ROWS),))
    options = {"shuffle": True, "shuffle_buffer_size": 3 * ROWS, "columns": columns}
    drawn_later = [row for batch in open_loader(tmp_path, **options)[0] for row in rows_of(batch)]
    monkeypatch.setattr(shuffled, "MOST_DRAWN_AT_ONCE", 0)
    drawn_ahead = [row for batch in open_loader(tmp_path, **options)[0] for row in rows_of(batch)]
    assert drawn_ahead == drawn_later
    assert sorted(drawn_ahead) == list(range(GROUPS * ROWS))
