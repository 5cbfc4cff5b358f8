"""Parquet files that pyarrow refuses are refused by name: those with damaged pages, or with encrypted columns."""

from __future__ import annotations

import base64
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ranged import ranged
from support import open_loader

from torch_dataloader_utils import UnreadableFileError

RESOURCES = Path(__file__).parents[1] / "resources"
ROWS = 1000
GROUP = 250


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of four row groups whose pages have checksums."""
    values = np.random.default_rng(0).permutation(ROWS)
    table = pa.table({"x": values, "y": values / 8})
    pq.write_table(
        table,
        tmp_path / "part.parquet",
        row_group_size=GROUP,
        write_page_checksum=True,
        use_dictionary=False,
        compression="none",
    )
    return tmp_path / "part.parquet"


def flip(path: Path, group: int, column: int, bit: int) -> None:
    """Flip a bit of a value of a row group's column."""
    chunk = pq.read_metadata(path).row_group(group).column(column)
    content = bytearray(path.read_bytes())
    content[chunk.data_page_offset + chunk.total_compressed_size - 1 - bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def read(path: Path, **options: Any) -> list[int]:
    return [int(value) for batch in open_loader(path, **options)[0] for value in batch["x"]]


@pytest.mark.parametrize(
    "options", [{}, {"read_ahead_bytes": 1000}, {"num_workers": 1}, {"shuffle": True, "shuffle_buffer_size": 100}]
)
@pytest.mark.parametrize("remote", [False, True])
def test_a_flipped_bit_of_a_page_with_a_checksum_is_an_error_that_names_the_row_group(path, options, remote):
    flip(path, group=2, column=0, bit=77)
    where = ranged(path) if remote else path
    with pytest.raises(UnreadableFileError, match=r"row group 2 of .*part\.parquet.*CRC checksum"):
        read(where, **options)
    unverified = read(where, **options, format_options={"page_checksum_verification": False})
    assert len(unverified) == ROWS
    assert sorted(unverified) != list(range(ROWS))
    assert sorted(read(where, **options, columns=["y"], row_id_column="x")) == list(range(ROWS))  # not read, no error


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"page_checksum": False}, ValueError, "has no 'page_checksum' for format='parquet'; did you mean"),
        ({"page_checksum_verification": 1}, TypeError, "page_checksum_verification=1 is int, expected True or False"),
    ],
    ids=["name", "type"],
)
def test_wrong_options_of_parquet_are_refused_by_name(path, options, error, message):
    with pytest.raises(error, match=message):
        open_loader(path, format_options=options)


def test_a_file_with_encrypted_columns_and_a_plain_footer_is_an_error_that_names_it(tmp_path):
    encryption = pytest.importorskip("pyarrow.parquet.encryption", reason="this pyarrow was built without encryption")

    class Keys(encryption.KmsClient):
        def __init__(self, _: Any) -> None:
            super().__init__()

        def wrap_key(self, key: bytes, _: str) -> bytes:
            return base64.b64encode(key)

        def unwrap_key(self, key: bytes, _: str) -> bytes:
            return base64.b64decode(key)

    configuration = encryption.EncryptionConfiguration(
        footer_key="footer", column_keys={"column": ["y"]}, plaintext_footer=True, double_wrapping=False
    )
    keys = encryption.CryptoFactory(Keys)
    properties = keys.file_encryption_properties(encryption.KmsConnectionConfig(), configuration)
    table = pa.table({"x": [1, 2], "y": [3, 4]})
    with pq.ParquetWriter(tmp_path / "part.parquet", table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)
    with pytest.raises(OSError, match="decrypt"):
        pq.read_table(tmp_path / "part.parquet")
    with pytest.raises(UnreadableFileError, match=r"part\.parquet: it has encrypted columns"):
        open_loader(tmp_path)


def test_times_of_96_bits_before_1970_are_read_as_arrow_wrote_them_before_release_24():
    """Their time of day is negative, and in microseconds they are 584 years later. pyarrow 21 wrote the file."""
    written = [
        *("1969-12-31T23:59:59.999999999", "1960-01-01T00:00:00", "1900-01-01T12:34:56.789"),
        *("1677-09-22T00:00:00.000000001", None, "2024-02-29T01:02:03.000004"),
    ]
    times = pa.array([None if time is None else np.datetime64(time, "ns") for time in written], pa.timestamp("ns"))
    batches, _ = open_loader(RESOURCES / "int96_before_1970.parquet", output_format="arrow", row_id_column=None)
    table = pa.concat_tables(batches)
    assert table["t"].combine_chunks().equals(times)
    assert table["l"].combine_chunks().flatten().equals(times)


@pytest.mark.parametrize("time", [datetime(2300, 1, 1, 12, 0, 0, 123456), datetime(2554, 7, 21, 23, 34, 33, 709551)])  # noqa: DTZ001
def test_times_of_96_bits_as_late_as_those_before_1970_seem_are_an_error(tmp_path, time):
    pq.write_table(
        pa.table({"t": pa.array([time], pa.timestamp("us"))}),
        tmp_path / "times.parquet",
        use_deprecated_int96_timestamps=True,
    )
    with pytest.raises(UnreadableFileError, match=f"'t' holds {time}, which is too far"):
        list(open_loader(tmp_path)[0])


@pytest.mark.parametrize("read_ahead", ["128MiB", "2KiB"], ids=["whole row groups", "parts"])
@pytest.mark.parametrize("memory_map", [True, False])
def test_times_of_96_bits_are_those_that_were_written_or_an_error(tmp_path, read_ahead, memory_map):
    """Of a time that nanoseconds of 64 bits do not hold pyarrow makes another one."""
    first, last = (
        np.datetime64(time, "ns") for time in ("1677-09-22T00:00:00.000000001", "2262-04-11T23:47:16.854775807")
    )
    times = pa.array([first, last, None] * 300, pa.timestamp("ns"))
    far = pa.array([datetime(2020, 1, 1)] * 500 + [datetime(9999, 12, 31), None], pa.timestamp("us"))  # noqa: DTZ001
    options = {
        "memory_map": memory_map,
        "read_ahead_bytes": read_ahead,
        "output_format": "arrow",
        "row_id_column": None,
    }

    def read(values: pa.Array) -> pa.Table:
        path = tmp_path / "times.parquet"
        pq.write_table(pa.table({"t": values}), path, use_deprecated_int96_timestamps=True)
        return pa.concat_tables(open_loader(path, **options)[0])

    def nested(values: pa.Array) -> list[pa.Array]:
        lists = pa.ListArray.from_arrays(range(len(values) + 1), values)
        return [values, lists, pa.StructArray.from_arrays([lists], ["l"])]

    for values in nested(times):
        assert read(values)["t"].combine_chunks().cast(values.type).equals(values)
    for values in nested(far):
        with pytest.raises(UnreadableFileError, match=r"row group 0 of .*times\.parquet.*'t' holds 9999-12-31"):
            read(values)
