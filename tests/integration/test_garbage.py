"""An epoch leaves nothing to the garbage collector, which would come late for it: files, threads, parsed footers."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyarrow import csv, orc
from support import open_loader, write_dataset

from torch_dataloader_utils import MixedDataset, Source
from torch_dataloader_utils.errors import UnreadableFileError

FILES = ((400, 50), (300, 70), (400, 90))
WRITERS: dict[str, Callable[[pa.Table, Path], object]] = {
    "orc": orc.write_table,
    "csv": csv.write_csv,
    "jsonl": lambda table, path: path.write_text("\n".join(map(_line, table["value"].to_pylist())), encoding="utf-8"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "in order": {},
    "rows shuffled": {"shuffle": True, "shuffle_buffer_size": 200},
    "rows shuffled in rounds": {"shuffle": True, "shuffle_buffer_size": 20},
    "a grid": {"virtual_ranks": 2, "virtual_workers": 1, "uneven_ranks": "drop", "columns": ["value"]},
    "a filter": {"filters": pc.field("value") < 500},
    "a filter that is counted": {"filters": pc.field("value") < 500, "count_rows": True},
    "a transform": {"transform": lambda table: table, "columns": ["value"]},
    "persistent workers": {"num_workers": 2, "persistent_workers": True},
    "new workers": {"num_workers": 2},
}


def _line(value: int) -> str:
    return f'{{"value": {value}}}'


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of Parquet files, and one of each other format."""
    directory = tmp_path_factory.mktemp("garbage")
    write_dataset(directory / "parquet", FILES)
    table = pq.read_table(directory / "parquet", columns=["value"])
    for kind, write in WRITERS.items():
        (directory / kind).mkdir()
        write(table, directory / kind / f"part.{kind}")
    return directory


def require_none_left(loader: Iterable[Any]) -> None:
    """Deliver three epochs; of the second and third nothing may be left that only the collector finds."""

    def epoch() -> None:
        assert sum(1 for _ in loader) > 1

    require_nothing_left_by(epoch)


def require_nothing_left_by(epoch: Callable[[], None]) -> None:
    left: list[Counter[str]] = []
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            epoch()
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            gc.set_debug(0)
            left.append(Counter(type(each).__qualname__ for each in gc.garbage))
            gc.garbage.clear()
            gc.collect()
    finally:
        gc.set_debug(0)
        if was_enabled:
            gc.enable()
    assert not any(left[1:])


@pytest.mark.parametrize("way", OPTIONS)
def test_an_epoch_leaves_nothing_to_the_collector(directory, way):
    require_none_left(open_loader(directory / "parquet", **OPTIONS[way])[0])


@pytest.mark.parametrize("kind", WRITERS)
def test_an_epoch_of_another_format_leaves_nothing_to_the_collector(directory, kind):
    require_none_left(open_loader(directory / kind, format=kind, row_id_column=None)[0])


def test_an_epoch_of_a_mixture_leaves_nothing_to_the_collector(directory):
    sources = {name: Source(str(directory / "parquet")) for name in "ab"}
    loader, _ = MixedDataset.create_dataloader(
        sources, {"a": 1, "b": 2}, rows_per_epoch=1500, num_workers=0, batch_size=16, shuffle=True
    )
    require_none_left(loader)


@pytest.mark.parametrize("way", [way for way in OPTIONS if "workers" not in way])
def test_an_epoch_that_ends_in_an_error_leaves_nothing_to_the_collector(tmp_path, way):
    """Errors of workers are raised by torch, whose frame refers to them."""
    write_dataset(tmp_path, FILES)
    damaged = min(tmp_path.glob("*.parquet"))
    content = damaged.read_bytes()
    footer = pq.read_metadata(damaged)
    column = footer.row_group(footer.num_row_groups - 1).column(0)
    begin = column.dictionary_page_offset or column.data_page_offset
    damaged.write_bytes(content[:begin] + b"\xff" * 40 + content[begin + 40 :])
    loader, _ = open_loader(tmp_path, **OPTIONS[way])

    def epoch() -> None:
        with pytest.raises(UnreadableFileError):
            for _ in loader:
                pass

    require_nothing_left_by(epoch)
