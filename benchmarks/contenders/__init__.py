"""The scripts that are measured: each reads a job from a file, delivers the data, and prints its figures.

They run with this folder on their path, in the interpreter of their own environment, and import from each other and
from `harness` and `batches`, never from the rest of the suite.
"""
