"""A file of another format is an error that says which format to pass, by the file's bytes or its name."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.orc as pa_orc
import pyarrow.parquet as pq
import pytest
from support import open_loader

from torch_dataloader_utils import UnreadableFileError
from torch_dataloader_utils.formats.recognition import ENDINGS, format_hint

TABLE = pa.table({"number": range(100)})
CSV = b"number\n" + b"".join(b"%d\n" % number for number in range(100))
JSONL = b"".join(b'{"number": %d}\n' % number for number in range(100))


def parquet(path: Path) -> None:
    pq.write_table(TABLE, path)


def orc(path: Path) -> None:
    pa_orc.write_table(TABLE, path)


def text(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


WRITERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a.parquet": ("parquet", parquet),
    "a.orc": ("orc", orc),
    "a.csv": ("csv", text(CSV)),
    "A.CSV": ("csv", text(CSV)),
    "a.csv.gz": ("csv", text(gzip.compress(CSV, mtime=0))),
    "a.json": ("jsonl", text(JSONL)),
    "a.jsonl": ("jsonl", text(JSONL)),
    "a.ndjson": ("jsonl", text(JSONL)),
    "a.jsonl.gz": ("jsonl", text(gzip.compress(JSONL, mtime=0))),
}


@pytest.mark.parametrize("opened_as", ["parquet", "orc", "csv", "jsonl"])
@pytest.mark.parametrize("name", WRITERS)
def test_a_directory_with_files_of_another_format_alone_names_it(tmp_path, name, opened_as):
    found, write = WRITERS[name]
    write(tmp_path / name)
    (tmp_path / "README.txt").write_text("about these files")
    if found == opened_as:
        loader, _ = open_loader(tmp_path, format=opened_as, row_id_column=None)
        assert sum(len(batch["number"]) for batch in loader) == 100
        return
    ending = name.lower().removeprefix("a")
    expected = rf"only 2 others, such as .*{re.escape(name)}'; its name ends in '{ending}': pass format=\"{found}\"$"
    with pytest.raises(FileNotFoundError, match=expected):
        open_loader(tmp_path, format=opened_as, row_id_column=None)


def test_a_directory_with_one_file_of_another_format_names_it(tmp_path):
    (tmp_path / "a.csv").write_bytes(CSV)
    with pytest.raises(FileNotFoundError, match=r"only '.*a\.csv'; its name ends in '\.csv': pass format=\"csv\"$"):
        open_loader(tmp_path, row_id_column=None)


@pytest.mark.parametrize("opened_as", ["parquet", "orc"])
@pytest.mark.parametrize("name", [name for name, (found, _) in WRITERS.items() if found not in ("parquet", "orc")])
def test_text_that_is_opened_as_parquet_or_orc_is_named_by_its_ending(tmp_path, name, opened_as):
    found, write = WRITERS[name]
    write(tmp_path / name)
    expected = rf"no complete .* file: it ends in .*; its name ends in '{name[1:].lower()}': pass format=\"{found}\"$"
    with pytest.raises(UnreadableFileError, match=expected):
        open_loader(tmp_path / name, format=opened_as, row_id_column=None)


@pytest.mark.parametrize("name", ["data", "data.csv", "data.parquet", "data.orc"])
@pytest.mark.parametrize("opened_as", ["parquet", "orc", "csv", "jsonl"])
@pytest.mark.parametrize("write", [parquet, orc])
def test_parquet_and_orc_are_known_by_their_bytes_whatever_their_name(tmp_path, write, opened_as, name):
    write(tmp_path / name)
    if write.__name__ == opened_as:
        loader, _ = open_loader(tmp_path / name, format=opened_as, row_id_column=None)
        assert sum(len(batch["number"]) for batch in loader) == 100
        return
    shown = {"parquet": "a Parquet", "orc": "an ORC"}[write.__name__]
    with pytest.raises(UnreadableFileError, match=rf"; it looks like {shown} file: pass format=\"{write.__name__}\"$"):
        open_loader(tmp_path / name, format=opened_as, row_id_column=None)


def test_a_short_or_another_text_file_has_the_hint_too(tmp_path):
    (tmp_path / "short.csv").write_bytes(b"a\n1\n")
    with pytest.raises(
        UnreadableFileError, match=r'it has only 4 bytes; its name ends in \'.csv\': pass format="csv"$'
    ):
        open_loader(tmp_path / "short.csv")
    (tmp_path / "short.orc").write_bytes(b"ORC")
    with pytest.raises(UnreadableFileError, match=r"it has only 3 bytes$"):
        open_loader(tmp_path / "short.orc", format="orc")
    (tmp_path / "a.csv").write_bytes(CSV)
    with pytest.raises(UnreadableFileError, match=r'line 1: .*; its name ends in \'.csv\': pass format="csv"$'):
        open_loader(tmp_path / "a.csv", format="jsonl", row_id_column=None)


@pytest.mark.parametrize("name", ["a.parquet", "a", "a.txt"])
def test_nothing_is_guessed_of_what_is_no_known_format(tmp_path, name):
    (tmp_path / name).write_bytes(b"no columns at all")
    with pytest.raises(UnreadableFileError, match=r"not in b'PAR1'$"):
        open_loader(tmp_path / name)


@pytest.mark.parametrize("known", ENDINGS)
def test_a_file_of_the_opened_format_gives_no_hint(known):
    for ending in ENDINGS[known]:
        assert format_hint(f"data/a{ending}", known) == ""
        others = [format_hint(f"data/a{ending}", other) for other in ENDINGS if other != known]
        assert all(hint.endswith(f': pass format="{known}"') for hint in others)
