"""Footers are parsed as pyarrow parses them, in a part of the time."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import open_loader

from torch_dataloader_utils import UnreadableFileError
from torch_dataloader_utils.formats.parquet import footer
from torch_dataloader_utils.formats.parquet.footer import parse_footer

ROWS = pa.table({"row": range(10), "words": [["a", "b"], [], None, ["c"], [None]] * 2})


def write(path: Path) -> Path:
    pq.write_table(ROWS, path, row_group_size=4)
    return path


def footer_of(path: Path) -> bytes:
    content = path.read_bytes()
    return content[-8 - int.from_bytes(content[-8:-4], "little") :]


def test_a_footer_is_parsed_as_pyarrow_does(tmp_path: Path):
    path = write(tmp_path / "part.parquet")
    parsed = parse_footer(footer_of(path))
    assert parsed.equals(pq.read_metadata(path))
    assert parsed.schema.to_arrow_schema() == ROWS.schema


def test_a_release_that_asks_for_the_columns_first_parses_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class AsksFirst:
        metadata = None

        def open(self, file: Any, read_dictionary: Iterable[str]) -> None:  # noqa: ARG002 - as pyarrow's
            list(read_dictionary)

    path = write(tmp_path / "part.parquet")
    metadata = pq.read_metadata(path)
    monkeypatch.setattr(footer.pq, "ParquetReader", AsksFirst)
    assert parse_footer(footer_of(path)).equals(metadata)


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_a_damaged_arrow_schema_is_an_error_that_names_the_file(tmp_path: Path, damaged: int):
    paths = [write(tmp_path / f"part-{number}.parquet") for number in range(3)]
    content = paths[damaged].read_bytes()
    schema = re.search(rb"ARROW:schema.*?([A-Za-z0-9+/=]{100,})", content, re.DOTALL)
    assert schema is not None
    assert base64.b64decode(schema[1])
    paths[damaged].write_bytes(content.replace(schema[1], b"A" * len(schema[1])))
    with pytest.raises(UnreadableFileError, match=rf"part-{damaged}\.parquet"):
        open_loader(tmp_path, batch_size=4, columns=["row"])
