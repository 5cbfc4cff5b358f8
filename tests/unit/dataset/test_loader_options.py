"""Every wrong argument is an error that names it, before any file, log or catalog is looked at."""

from __future__ import annotations

import inspect
from typing import Any

import pyarrow.compute as pc
import pytest
from support import write_dataset
from torch.utils.data import DataLoader

from torch_dataloader_utils import DeltaDataset, IcebergDataset, StructuredDataset
from torch_dataloader_utils.dataset.options import LoaderOptions

WRONG: dict[str, tuple[Any, type[Exception]]] = {
    "path": (3, TypeError),
    "format": ("hdf5", ValueError),
    "format_options": ("delimiter", TypeError),
    "count_rows": (1, TypeError),
    "batch_size": (0, ValueError),
    "global_batch_size": (0, ValueError),
    "drop_last": ("no", TypeError),
    "columns": ("value", TypeError),
    "filters": ("value > 3", TypeError),
    "transform": ("tokenise", TypeError),
    "transform_id": (3, TypeError),
    "shuffle": (None, TypeError),
    "shuffle_seed": (1.5, TypeError),
    "shuffle_buffer_size": (0, ValueError),
    "shuffle_interleave": (0, ValueError),
    "split_bytes": ("1 parsec", ValueError),
    "split_rows": ("3", TypeError),
    "split_strategy": (object(), TypeError),
    "read_ahead_bytes": (0, ValueError),
    "num_workers": (-1, ValueError),
    "num_ranks": (2, ValueError),
    "rank": (0, ValueError),
    "mesh": (3, TypeError),
    "output_format": ("pandas", ValueError),
    "column_formats": ({"x": "jagged"}, ValueError),
    "fill_nulls": ({"x": None}, ValueError),
    "mask_nulls": (["x", "x"], ValueError),
    "packing": ("tokens", TypeError),
    "count_tokens": (3, TypeError),
    "batching": ("tokens", TypeError),
    "collate_fn": ("list", TypeError),
    "storage_options": ("key", TypeError),
    "storage_timeout": (0, ValueError),
    "memory_map": ("yes", TypeError),
    "partitioning": ("directories", TypeError),
    "manifest": (b"no manifest", ValueError),
    "row_id_column": ("", TypeError),
    "fingerprint": ("yes", TypeError),
    "uneven_ranks": ("stop", ValueError),
    "virtual_ranks": (4, ValueError),
    "virtual_workers": (4, ValueError),
    "show_progress": ("yes", TypeError),
    "progress_interval_sec": (-1, ValueError),
    "run_log": (3, TypeError),
    "hooks": (print, TypeError),
}

OF_TORCH: dict[str, tuple[Any, type[Exception]]] = {
    "sampler": ([0], ValueError),
    "batch_sampler": ([[0]], ValueError),
    "in_order": (False, ValueError),
    "timeout": (-1, ValueError),
    "prefetch_factor": (-1, ValueError),
    "multiprocessing_context": ("threads", ValueError),
    "worker_init_fn": ("seed", TypeError),
}

OF_PATHS = ("path", "format", "partitioning", "manifest")
"""Parameters that a table determines."""


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_a_wrong_argument_is_listed_here_for_every_parameter():
    parameters = set(inspect.signature(StructuredDataset.create_dataloader).parameters)
    assert set(WRONG) == parameters - {"dataloader_kwargs"}


@pytest.mark.parametrize("name", sorted(WRONG | OF_TORCH))
def test_a_wrong_argument_is_reported_although_the_path_does_not_exist(tmp_path, name):
    value, error = (WRONG | OF_TORCH)[name]
    arguments = {"path": tmp_path / "nothing here", "num_workers": 1, name: value}
    with pytest.raises(error, match=name) as raised:
        StructuredDataset.create_dataloader(**arguments)
    assert not isinstance(raised.value, OSError)


@pytest.mark.parametrize("name", sorted(set(WRONG | OF_TORCH) - {*OF_PATHS}))
def test_a_wrong_argument_is_reported_although_the_table_does_not_exist(tmp_path, name):
    value, error = (WRONG | OF_TORCH)[name]
    with pytest.raises(error, match=name):
        DeltaDataset.create_dataloader(tmp_path / "nothing here", **{"num_workers": 1, name: value})


@pytest.mark.parametrize("name", sorted(set(WRONG | OF_TORCH) - {*OF_PATHS}))
def test_a_wrong_argument_is_reported_although_the_catalog_does_not_exist(name):
    value, error = (WRONG | OF_TORCH)[name]
    catalog = {"type": "sql", "uri": "sqlite:////nothing/here.db"}
    with pytest.raises(error, match=name):
        IcebergDataset.create_dataloader("db.t", catalog_config=catalog, **{"num_workers": 1, name: value})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("shufle", "shuffle"),
        ("batchsize", "batch_size"),
        ("num_worker", "num_workers"),
        ("Filters", "filters"),
        ("pin_memori", "pin_memory"),
        ("prefetch", "prefetch_factor"),
        ("persistant_workers", "persistent_workers"),
    ],
)
def test_a_misspelt_parameter_is_named_with_the_one_that_was_meant(tmp_path, name, meant):
    with pytest.raises(TypeError, match=rf"create_dataloader\(\) has no parameter '{name}'; did you mean '{meant}'\?"):
        StructuredDataset.create_dataloader(tmp_path / "nothing here", **{name: True})


def test_a_parameter_that_is_like_none_is_refused_with_all_that_there_are(tmp_path):
    with pytest.raises(TypeError, match=r"no parameter 'q'; there are batch_sampler, batch_size, .*worker_init_fn"):
        StructuredDataset.create_dataloader(tmp_path / "nothing here", q=1)


def test_a_misspelt_parameter_of_a_table_is_compared_with_the_tables_own(tmp_path):
    with pytest.raises(TypeError, match="did you mean 'version'"):
        DeltaDataset.create_dataloader(tmp_path / "nothing here", versoin=3)
    with pytest.raises(TypeError, match="did you mean 'shuffle'"):
        DeltaDataset.create_dataloader(tmp_path / "nothing here", shufle=True)
    with pytest.raises(TypeError, match="did you mean 'snapshot_id'"):
        IcebergDataset.create_dataloader("db.t", catalog_config={"type": "no such"}, snapshotid=3)


@pytest.mark.parametrize(
    ("filters", "message"),
    [("city =", "cannot be parsed"), (3, "expected a pyiceberg expression")],
    ids=["text", "int"],
)
def test_a_wrong_scan_filter_is_reported_before_the_catalog_is_loaded(filters, message):
    with pytest.raises((TypeError, ValueError), match=f"scan_filter={filters!r}.*{message}"):
        IcebergDataset.create_dataloader("db.t", catalog_config={"type": "no such"}, scan_filter=filters)


def test_a_scan_filter_makes_lengths_unknown_before_the_catalog_is_loaded():
    with pytest.raises(ValueError, match="uneven_ranks='drop' needs the number of rows"):
        IcebergDataset.create_dataloader(
            "db.t", catalog_config={"type": "no such"}, scan_filter="x > 3", uneven_ranks="drop"
        )


@pytest.mark.parametrize("name", ["sampler", "batch_sampler"])
def test_torchs_own_parameters_may_be_passed_with_their_defaults(tmp_path, name):
    with pytest.raises(FileNotFoundError):
        StructuredDataset.create_dataloader(tmp_path / "nothing here", **{name: None})


def test_every_parameter_of_torchs_data_loader_is_known(tmp_path):
    for name, parameter in inspect.signature(DataLoader).parameters.items():
        if name not in WRONG and name != "dataset":
            with pytest.raises(FileNotFoundError):
                StructuredDataset.create_dataloader(tmp_path / "nothing here", **{name: parameter.default})


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [({}, 1024), ({"batch_size": 8}, 8), ({"global_batch_size": 12}, 4), ({"batch_size": None}, 1024)],
    ids=["none", "of a rank", "of all ranks", "unset"],
)
def test_a_batch_size_is_that_of_a_rank_or_of_all_ranks(tmp_path, sizes, expected):
    assert write_dataset(tmp_path / "data")
    ranks = {"num_ranks": 3, "rank": 0, "uneven_ranks": "drop"}
    loader, dataset = StructuredDataset.create_dataloader(tmp_path / "data", **ranks, **sizes)
    assert dataset.batch_size == expected
    assert f"batch_size={expected}" in repr(loader)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"global_batch_size": 10}, "global_batch_size=10 cannot be divided among 3 ranks"),
        ({"global_batch_size": 12, "batch_size": 4}, "batch_size=4 and global_batch_size=12: give one of them"),
        ({"global_batch_size": 12, "batch_size": 1024}, "batch_size=1024 and global_batch_size=12: give one"),
    ],
    ids=["indivisible", "both", "both, the default"],
)
def test_batch_sizes_that_do_not_fit_are_refused_before_the_path_is_looked_at(tmp_path, sizes, message):
    with pytest.raises(ValueError, match=message):
        StructuredDataset.create_dataloader(tmp_path / "nothing here", num_ranks=3, rank=0, **sizes)


def test_options_are_frozen_and_show_no_secret(tmp_path):
    given = {
        name: parameter.default
        for name, parameter in inspect.signature(StructuredDataset.create_dataloader).parameters.items()
    }
    given |= {"path": str(tmp_path), "storage_options": {"secret": "hunter2"}, "dataloader_kwargs": {}}
    options = LoaderOptions.parse(given | {"filters": pc.field("x") > 3}, given)
    assert "hunter2" not in repr(options)
    with pytest.raises(AttributeError):
        options.batch_size = 3
