"""Apache Parquet: footers, `_metadata` files, statistics, and where column chunks are in a file."""
