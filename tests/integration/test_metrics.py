"""Counters."""

from __future__ import annotations

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from support import batches_of, open_loader, write_dataset


@pytest.fixture
def data(tmp_path):
    write_dataset(tmp_path / "data")
    return tmp_path / "data"


def compressed_bytes(directory, columns):
    """Bytes of the column chunks of all files, from their footers."""
    total = 0
    for path in directory.iterdir():
        footer = pq.read_metadata(path)
        for group in range(footer.num_row_groups):
            chunks = map(footer.row_group(group).column, range(footer.num_columns))
            total += sum(chunk.total_compressed_size for chunk in chunks if chunk.path_in_schema in columns)
    return total


@pytest.mark.parametrize("num_workers", [0, 2])
def test_metrics_count_the_batches_rows_and_bytes_of_an_epoch(data, num_workers):
    loader, dataset = open_loader(data, num_workers=num_workers, columns=["score"])
    assert dataset.get_metrics()["rows_delivered"] == 0
    batches = batches_of(loader)
    assert dataset.get_metrics() == {
        "epoch": 0,
        "batches_delivered": len(batches),
        "rows_delivered": sum(map(len, batches)),
        "rows_excluded": 0,
        "rows_dropped": 0,
        "bytes_read": compressed_bytes(data, {"score"}),
        "bytes_read_again": 0,
        "row_groups_pruned": 0,
        "bytes_pruned": 0,
    }


def test_columns_that_only_the_filter_needs_count_as_read(data):
    loader, dataset = open_loader(data, columns=["score"], filters=pc.field("value") >= 0)
    batches_of(loader)
    assert dataset.get_metrics()["bytes_read"] == compressed_bytes(data, {"score", "value"})


def test_only_the_row_group_that_holds_delivered_rows_is_counted_as_read_again(data):
    loader, _ = open_loader(data, batch_size=60)
    next(iter(loader))
    resumed, dataset = open_loader(data, batch_size=60)
    resumed.load_state_dict(loader.state_dict())
    batches_of(resumed)
    group = pq.read_metadata(data / "part-000.parquet").row_group(1)  # rows 50 to 100 hold row 60
    expected = sum(group.column(number).total_compressed_size for number in range(group.num_columns))
    assert dataset.get_metrics()["bytes_read_again"] == expected


def test_a_resume_at_a_row_group_reads_nothing_again(data):
    loader, _ = open_loader(data, batch_size=50)
    next(iter(loader))
    resumed, dataset = open_loader(data, batch_size=50)
    resumed.load_state_dict(loader.state_dict())
    batches_of(resumed)
    assert dataset.get_metrics()["bytes_read_again"] == 0


def test_rows_that_drop_last_leaves_out_are_counted(data):
    loader, dataset = open_loader(data, num_workers=2, batch_size=64, drop_last=True)
    rows = sum(map(len, batches_of(loader)))
    metrics = dataset.get_metrics()
    assert metrics["rows_delivered"] == rows
    assert metrics["rows_dropped"] == 443 - rows > 0


def test_what_a_filter_rules_out_before_anything_is_read_is_counted(data):
    _, dataset = open_loader(data, filters=pc.field("value") < 137)  # of the third file one row group of six may match
    footers = [pq.read_metadata(path) for path in sorted(data.iterdir())]
    groups = [footer.row_group(number) for footer in footers for number in range(footer.num_row_groups)]
    pruned = [group for group in groups if group.column(0).statistics.min >= 137]
    assert dataset.get_metrics()["row_groups_pruned"] == len(pruned) > 0
    assert dataset.get_metrics()["bytes_pruned"] == sum(group.total_byte_size for group in pruned)
