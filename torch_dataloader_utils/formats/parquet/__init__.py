"""Apache Parquet: footers, `_metadata` files, statistics, and row groups.

`footer` reads a file's footer once; it is kept, and sent to workers with their assignments. A `_metadata` file
(`metadata_file`) replaces all footers while the epoch is planned. `codec` then reads each file's own footer just
before its rows are read, and compares the two, since `_metadata` may be older than the files. `statistics` rules out
row groups for a filter, by pyarrow's own reasoning.
"""
