"""What `tdu plan` advises follows from the files and the settings, and each reason has the numbers."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torch_dataloader_utils.cli.advice import advise
from torch_dataloader_utils.cli.epoch_plan import plan_epoch, summarise

SETTINGS = {"num_ranks": 1, "rank": 0, "num_workers": 0}


def advice(directory, sizes, machine_bytes=None, **settings: Any):
    """Return what is advised for a file whose row groups have these rows: the reasons, by subject."""
    path = directory / "data.parquet"
    with pq.ParquetWriter(path, pa.schema([("x", pa.int64())])) as writer:
        for rows in sizes:
            writer.write_table(pa.table({"x": range(rows)}), row_group_size=rows)
    summary = summarise(plan_epoch({"path": str(path), **SETTINGS, **settings}))
    found = advise(summary, machine_bytes)
    return {one.about: (one.text, one.reason) for one in found}


def test_nothing_is_advised_where_files_and_settings_fit(tmp_path):
    assert advice(tmp_path, [2_000] * 32, num_workers=4, batch_size=100) == {}


def test_a_storage_that_fails_is_waited_for_half_a_minute(tmp_path):
    pq.write_table(pa.table({"x": [1]}), tmp_path / "data.parquet")
    assert plan_epoch({"path": str(tmp_path), **SETTINGS}).options.storage_timeout == 30


def test_workers_without_a_row_group_are_counted(tmp_path):
    text, reason = advice(tmp_path, [20_000] * 5, num_workers=4, num_ranks=2)["workers"]
    assert text == "write row groups of about 3,125 rows, or use fewer workers"
    assert "5 row groups for 8 processes that read (2 ranks × 4 workers): 3 of them have nothing to read" in reason


def test_row_groups_are_not_to_be_so_small_that_they_cost_more_to_open_than_to_read(tmp_path):
    assert advice(tmp_path, [2_000] * 5, num_workers=4, num_ranks=2)["workers"][0] == "use fewer workers"
    buffer = {"shuffle": True, "shuffle_buffer_size": 4_000}
    assert advice(tmp_path, [1_000] * 40, **buffer)["shuffling"][0] == "use a larger --buffer"


def test_text_has_no_row_groups_that_could_be_written_otherwise(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("x\n" + "1\n" * 100_000)
    settings = {**SETTINGS, "num_workers": 4, "shuffle": True, "shuffle_buffer_size": 10_000}
    found = advise(summarise(plan_epoch({"path": str(path), "format": "csv", "count_rows": True, **settings})), 2**40)
    assert {one.about: one.text for one in found}["workers"] == "use fewer workers"
    assert not any("row groups of" in one.text for one in found)


def test_a_worker_that_reads_much_more_than_others_is_told(tmp_path):
    _, reason = advice(tmp_path, [100, 100, 2_000], num_workers=2)["workers"]
    assert "the busiest reads 1.91 times the mean" in reason


def test_ranks_of_different_lengths_are_told_unless_they_are_balanced(tmp_path):
    sizes = [1_000, 1_000, 500]
    _, reason = advice(tmp_path, sizes, num_ranks=2, batch_size=100)["ranks"]
    assert "10 to 15 steps" in reason
    assert "ranks" not in advice(tmp_path, sizes, num_ranks=2, batch_size=100, uneven_ranks="pad")


def test_a_buffer_that_holds_few_row_groups_is_told(tmp_path):
    shuffle = {"shuffle": True, "shuffle_buffer_size": 40_000}
    text, reason = advice(tmp_path, [10_000] * 40, **shuffle)["shuffling"]
    assert "rows of about 4 row groups are shuffled together; row groups have 10,000 rows, the buffer 40,000" in reason
    assert "row groups of at most 2,500 rows" in text
    assert "shuffling" not in advice(tmp_path, [2_500] * 160, **shuffle)


def test_row_groups_larger_than_the_buffer_are_told_with_the_interleave(tmp_path):
    text, reason = advice(tmp_path, [1_000] * 40, shuffle=True, shuffle_buffer_size=500)["shuffling"]
    assert "rows of about 8 row groups are shuffled together" in reason
    assert "a larger --interleave than 8" in text


def test_a_shuffle_of_shards_alone_is_told(tmp_path):
    _, reason = advice(tmp_path, [5_000] * 8, shuffle=True, batch_size=100)["shuffling"]
    assert "a batch of 100 rows is from one row group of 5,000" in reason


@pytest.mark.parametrize(
    ("sizes", "settings", "words"),
    [
        ([100_000] * 2, {"read_ahead_bytes": "1MiB"}, "takes 781.2 KiB, more than 4/9 of read_ahead_bytes (1.0 MiB)"),
        ([10] * 120, {}, "at most 10 rows (80 B)"),
    ],
    ids=["large", "small"],
)
def test_row_groups_of_a_size_that_costs_time_are_told(tmp_path, sizes, settings, words):
    assert words in advice(tmp_path, sizes, **settings)["row groups"][1]


def test_short_batches_are_told_where_they_are_many(tmp_path):
    _, reason = advice(tmp_path, [300] * 16, num_workers=4, batch_size=1_000)["batches"]
    assert "4 of 8 batches of a rank are short" in reason


def test_memory_is_told_where_it_is_more_than_half_of_the_machines(tmp_path):
    _, reason = advice(tmp_path, [2_000] * 32, machine_bytes=2**27, num_workers=4, batch_size=100)["memory"]
    assert reason == "a rank may hold 160.5 MiB; this machine has 128.0 MiB"
