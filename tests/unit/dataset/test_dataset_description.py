"""What a dataset says of itself: `repr`, `len` and truth."""

from __future__ import annotations

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import open_loader

from torch_dataloader_utils import StructuredDataset


@pytest.fixture
def data(tmp_path):
    for number in range(3):
        pq.write_table(pa.table({"x": list(range(500))}), tmp_path / f"{number}.parquet", row_group_size=100)
    return tmp_path


def test_repr_names_files_rows_rank_workers_and_epoch_in_one_line(data):
    _, dataset = open_loader(data, num_ranks=4, rank=1, num_workers=8)
    dataset.set_epoch(3)
    assert repr(dataset) == (
        f"StructuredDataset({str(data)!r}, parquet, 3 files, 1,500 rows, rank 1 of 4, 8 workers, epoch 3)"
    )


def test_repr_of_a_single_file_and_a_filter(data):
    _, dataset = open_loader(data / "0.parquet", num_workers=1, filters=[("x", ">", 3)])
    assert "parquet, 1 file, 500 rows before the filter, rank 0 of 1, 1 worker, epoch 0)" in repr(dataset)


def test_repr_of_text_says_whether_its_rows_were_counted(tmp_path):
    (tmp_path / "a.csv").write_text("x\n1\n2\n")
    for counts, shown in ((False, "csv, 1 file, rows not counted,"), (True, "csv, 1 file, 2 rows,")):
        _, dataset = StructuredDataset.create_dataloader(tmp_path, "csv", count_rows=counts, num_workers=0)
        assert shown in repr(dataset)


def test_repr_shows_no_secret(data):
    memory = fsspec.filesystem("memory")
    memory.put(str(data / "0.parquet"), "/hunter2/data/0.parquet")
    try:
        _, dataset = open_loader("memory://hunter2/data", storage_options={"token": "hunter2"})
        assert repr(dataset).startswith("StructuredDataset('memory:///***/data', parquet")
    finally:
        memory.rm("/hunter2", recursive=True)


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_ranks": 2, "rank": 1}, {"drop_last": True}])
def test_len_is_the_number_of_batches(data, options):
    loader, dataset = open_loader(data, batch_size=64, **options)
    assert len(dataset) == len(loader) == dataset.num_batches == len(list(loader))


def test_len_is_a_type_error_where_only_reading_tells_and_list_still_works(data):
    loader, dataset = open_loader(data, batch_size=64, filters=[("x", ">", 3)])
    for sized in (dataset, loader):
        with pytest.raises(TypeError, match="number of batches is not known ahead"):
            len(sized)
    assert len(list(dataset)) > 1


def test_len_of_text_is_a_type_error_unless_its_rows_were_counted(tmp_path):
    (tmp_path / "a.csv").write_text("x\n1\n2\n")
    _, dataset = StructuredDataset.create_dataloader(tmp_path, "csv", num_workers=0)
    with pytest.raises(TypeError, match="count_rows=True"):
        len(dataset)
    assert len(list(dataset)) == 1
    _, dataset = StructuredDataset.create_dataloader(tmp_path, "csv", num_workers=0, count_rows=True)
    assert len(dataset) == 1


def test_a_dataset_is_true_whatever_its_length(data):
    _, empty = open_loader(data, batch_size=10_000, drop_last=True)
    assert len(empty) == 0
    assert empty
    _, unknown = open_loader(data, filters=[("x", ">", 3)])
    assert unknown
