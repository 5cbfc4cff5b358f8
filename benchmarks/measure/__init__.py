"""Workloads, and how they are measured: `workloads` names the contenders, `rounds` runs each in a process of its own.

A `session` runs workloads and writes the raw results as JSON. The S3 server and the environments of other loaders are
started and made here, too. Imports from ``data``, and from ``contenders`` only what needs no more than NumPy.
"""
