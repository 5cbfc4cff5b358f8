"""`partitioning="hive"` with S3 URLs of files, lists and globs."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
from support import open_loader


def rows_of_loader(s3, path):
    loader, _ = open_loader(
        path, partitioning="hive", output_format="arrow", row_id_column=None, storage_options=s3.storage_options()
    )
    return pa.concat_tables(loader).to_pydict()


def test_urls_of_files_lists_and_globs_take_columns_from_all_their_directories(s3, tmp_path):
    for number, directory in enumerate(("run=7/year=2020/region=us", "run=7/year=2021/region=e%20u")):
        (tmp_path / directory).mkdir(parents=True)
        pq.write_table(pa.table({"x": [number]}), tmp_path / directory / "part.parquet")
    bucket = s3.new_bucket(tmp_path)
    us, eu = (f"s3://{bucket}/run=7/{directory}" for directory in ("year=2020/region=us", "year=2021/region=e%20u"))
    assert rows_of_loader(s3, f"{us}/part.parquet") == {"x": [0], "run": [7], "year": [2020], "region": ["us"]}
    both = {"x": [0, 1], "run": [7, 7], "year": [2020, 2021], "region": ["us", "e u"]}
    assert rows_of_loader(s3, [f"{us}/part.parquet", f"{eu}/part.parquet"]) == both
    assert rows_of_loader(s3, f"s3://{bucket}/run=7/*/*/*.parquet") == both
    assert rows_of_loader(s3, f"s3://{bucket}/run=7") == {name: both[name] for name in ("x", "year", "region")}
    assert rows_of_loader(s3, us) == {"x": [0]}
