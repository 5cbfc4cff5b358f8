"""Adapters for training frameworks, one module a framework, which is imported only when a user asks for it.

An adapter lets the framework's own hooks save and load the states of all ranks, and begin epochs. It may import all of
this package and its framework. Batches leave the loader here, and are counted as the framework takes them.
"""
