"""Iceberg and Delta Lake tables as lists of files, each pinned to a snapshot or version.

It imports `dataset` and what is below it, and the table format's own library when it is asked for. A table's name or
path enters at `create_dataloader`; what leaves is a dataset like any other.
"""
