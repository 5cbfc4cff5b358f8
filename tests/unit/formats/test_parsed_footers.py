"""Footers are parsed as pyarrow parses them, in a part of the time."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from support import open_loader

from torch_dataloader_utils import MetadataFileWarning, UnreadableFileError
from torch_dataloader_utils.formats.parquet import footer
from torch_dataloader_utils.formats.parquet.footer import parse_footer

ROWS = pa.table({"value": range(10), "words": [["a", "b"], [], None, ["c"], [None]] * 2})


def write(path: Path) -> Path:
    pq.write_table(ROWS, path, row_group_size=4)
    return path


def damage_arrow_schema(path: Path) -> None:
    content = path.read_bytes()
    schema = re.search(rb"ARROW:schema.*?([A-Za-z0-9+/=]{100,})", content, re.DOTALL)
    assert schema is not None
    assert base64.b64decode(schema[1])
    path.write_bytes(content.replace(schema[1], b"A" * len(schema[1])))


def footer_of(path: Path) -> bytes:
    content = path.read_bytes()
    return content[-8 - int.from_bytes(content[-8:-4], "little") :]


def test_a_footer_is_parsed_as_pyarrow_does(tmp_path: Path):
    path = write(tmp_path / "part.parquet")
    parsed = parse_footer(footer_of(path))
    assert parsed.equals(pq.read_metadata(path))
    assert parsed.schema.to_arrow_schema() == ROWS.schema


def test_pyarrow_derives_no_arrow_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    opened = []

    class Told(pq.ParquetReader):
        def open(self, *args: Any, **kwargs: Any) -> None:
            opened.append(self)
            super().open(*args, **kwargs)
            pytest.fail("the reader was opened to its end")

    path = write(tmp_path / "part.parquet")
    metadata = pq.read_metadata(path)
    monkeypatch.setattr(footer.pq, "ParquetReader", Told)
    assert parse_footer(footer_of(path)).equals(metadata)
    assert len(opened) == 1


@pytest.mark.parametrize("takes", [list, "".join, len], ids=["asks first", "asks first for strings", "wants a list"])
def test_a_release_that_looks_at_the_columns_first_parses_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes: Callable[[Iterable[str]], Any]
):
    class LooksFirst:
        metadata = None

        def open(self, file: Any, read_dictionary: Iterable[str]) -> None:  # noqa: ARG002 - as pyarrow's
            takes(read_dictionary)

    path = write(tmp_path / "part.parquet")
    metadata = pq.read_metadata(path)
    monkeypatch.setattr(footer.pq, "ParquetReader", LooksFirst)
    assert parse_footer(footer_of(path)).equals(metadata)


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_a_damaged_arrow_schema_is_an_error_that_names_the_file(tmp_path: Path, damaged: int):
    paths = [write(tmp_path / f"part-{number}.parquet") for number in range(3)]
    damage_arrow_schema(paths[damaged])
    with pytest.raises(UnreadableFileError, match=rf"part-{damaged}\.parquet"):
        open_loader(tmp_path, batch_size=4, columns=["value"])


@pytest.mark.parametrize("filters", [None, pc.field("value") > 9], ids=["read", "ruled out"])
def test_a_damaged_arrow_schema_behind_a_metadata_file_is_an_error_that_names_the_file(
    tmp_path: Path, filters: pc.Expression | None
):
    path = write(tmp_path / "part.parquet")
    metadata = pq.read_metadata(path)
    metadata.set_file_path("part.parquet")
    metadata.write_metadata_file(tmp_path / "_metadata")
    damage_arrow_schema(path)
    with pytest.raises(UnreadableFileError, match=r"part\.parquet"):
        list(open_loader(tmp_path, batch_size=4, columns=["value"], filters=filters)[0])


def test_a_metadata_file_with_a_damaged_arrow_schema_is_not_used(tmp_path: Path):
    path = write(tmp_path / "part.parquet")
    metadata = pq.read_metadata(path)
    metadata.set_file_path("part.parquet")
    metadata.write_metadata_file(tmp_path / "_metadata")
    damage_arrow_schema(tmp_path / "_metadata")
    with pytest.warns(MetadataFileWarning, match="_metadata is not used"):
        loader, _ = open_loader(tmp_path, batch_size=4, columns=["value"])
    assert [row for batch in loader for row in batch["value"].tolist()] == list(range(10))
