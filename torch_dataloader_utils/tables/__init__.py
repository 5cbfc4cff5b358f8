"""Iceberg and Delta Lake tables as lists of files, each pinned to a snapshot or a version.

It imports `dataset` and what is below it; the library of a table format is imported when its class is first used. A
table's name or path enters at `create_dataloader`, and leaves as a dataset of files.
"""
