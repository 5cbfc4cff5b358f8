"""Iceberg and Delta Lake tables as lists of files, each pinned to a snapshot or a version.

It imports `dataset` and what is below it; the library of a table format is imported when its class is first used. A
table's name or path enters at `create_dataloader`, and leaves as a dataset of files.

A table is opened at one snapshot or version, which is part of the state. The table format's library reads metadata
and plans; the bytes of data files and of Iceberg's delete files go through `storage`. A table's column is found in a
file by its field id or its mapped name, and its type may have grown since the file was written. A filter is given to
pyiceberg in a weaker form, so that partitions are ruled out by their transforms: only comparisons that both sides
hold exactly are translated, nothing is negated, and what is not understood passes everything.
"""
