"""Small row groups of a shard whose rows are shuffled are decoded together, which only the number of calls tells."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from decoded_together import Calls, note_decoded_together
from support import all_rows_of, open_loader, write_dataset

from torch_dataloader_utils.errors import ColumnError, UnreadableFileError
from torch_dataloader_utils.reading.row_groups import together as together_rules

ROWS = 50
"""Of a row group."""
SIZES = [(20 * ROWS, ROWS), (7 * ROWS + 3, ROWS), *[(ROWS, ROWS)] * 20]
"""Rows of each file, and of its row groups."""
TOTAL = sum(rows for rows, _ in SIZES)
GROUPS = 20 + 8 + 20

OPTIONS: dict[str, Any] = {
    "columns": ["value", "score"],
    "shuffle": True,
    "shuffle_buffer_size": 16 * ROWS,
    "batch_size": 61,
    "fingerprint": True,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("shuffled") / "data"
    write_dataset(directory, SIZES)
    return directory


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The row groups that are decoded together, by file, call by call."""
    return note_decoded_together(monkeypatch)


def test_those_of_a_file_are_decoded_by_one_call_also_if_others_are_between_them(path, together):
    loader, dataset = open_loader(path, **OPTIONS)
    assert sorted(all_rows_of(loader)) == list(range(TOTAL))
    of_files = [numbers for call in together for _, numbers in call]
    assert max(map(len, of_files)) > 2
    assert any(numbers[-1] - numbers[0] >= len(numbers) for numbers in of_files)  # others are between them
    assert max(map(len, together)) == together_rules.MOST_TOGETHER
    assert dataset.get_metrics()["row_groups_read"] == GROUPS


WAYS: dict[str, dict[str, Any]] = {
    "all rows": {},
    "filter": {"filters": [("value", "!=", 77)]},
    "counted filter": {"filters": [("value", "!=", 77)], "count_rows": True},
    "a part of the rows": {"uneven_ranks": "drop", "num_ranks": 3, "rank": 1},
    "small shards": {"shuffle_buffer_size": 3 * ROWS},
    "Arrow": {"output_format": "arrow"},
}


def delivered(path: Path, way: str, left_out: Sequence[int] = (), state: Any = None) -> list[tuple[Any, Any]]:
    """Return each batch of an epoch, and the state after it."""
    loader, dataset = open_loader(path, **OPTIONS | WAYS[way])
    if left_out:
        dataset.exclude({"part-000.parquet": left_out})
    if state is not None:
        loader.load_state_dict(state)
    return [
        ({name: batch[name].tolist() for name in batch} if isinstance(batch, dict) else batch, loader.state_dict())
        for batch in loader
    ]


@pytest.mark.parametrize("way", WAYS)
def test_batches_states_and_resumes_are_those_of_row_groups_that_are_decoded_one_by_one(
    path, together, monkeypatch, way
):
    left_out = [0, *range(7 * ROWS, 8 * ROWS), 9 * ROWS + 3]
    found, without = delivered(path, way), delivered(path, way, left_out)
    resumed = delivered(path, way, state=found[len(found) // 2][1])
    assert together
    together.clear()
    monkeypatch.setattr(together_rules, "SHUFFLED_BYTES", 0)
    assert delivered(path, way) == found
    assert delivered(path, way, left_out) == without
    assert resumed == found[len(found) // 2 + 1 :]
    assert not together


@pytest.mark.parametrize("bad", [0, 3, 19])
@pytest.mark.parametrize("how", ["null", "damaged", "a time of 96 bits"])
def test_an_error_names_the_row_group_that_it_comes_from(tmp_path, together, bad, how):
    values: list[int | None] = list(range(20 * ROWS))
    if how == "null":
        values[bad * ROWS + 7] = None
    table = pa.table({"value": pa.array(values, pa.int64())})
    is_time = how == "a time of 96 bits"
    if is_time:
        values[bad * ROWS + 7] = 10**17  # microseconds: too far from 1970 for nanoseconds of 64 bits
        table = pa.table({"value": pa.array(values, pa.timestamp("us"))})
    file = tmp_path / "a.parquet"
    # Without statistics, only reading tells that there is a null.
    options = {"use_dictionary": False, "write_statistics": False, "use_deprecated_int96_timestamps": is_time}
    pq.write_table(table, file, row_group_size=ROWS, **options)
    if how == "damaged":
        header = pq.read_metadata(file).row_group(bad).column(0).data_page_offset
        content = bytearray(file.read_bytes())
        content[header : header + 8] = b"\xff" * 8
        file.write_bytes(content)
    loader, _ = open_loader(tmp_path, shuffle=True, shuffle_buffer_size=100 * ROWS)
    error = ColumnError if how == "null" else UnreadableFileError
    with pytest.raises(error, match=rf"row group {bad} of .*a\.parquet"):
        list(loader)
    assert together


def test_a_row_has_the_values_that_are_stored_of_it(path):
    loader, _ = open_loader(path, **OPTIONS)
    stored = pa.concat_tables(pq.read_table(file, columns=["value", "score"]) for file in sorted(path.iterdir()))
    for batch in loader:
        for name in ("value", "score"):
            assert np.array_equal(batch[name].numpy(), stored[name].to_numpy()[batch["row"].numpy()])
