"""Adapters for training frameworks and monitoring systems, one module each, imported only when a user asks for it.

A framework's adapter lets the framework's own hooks save and load the states of all ranks, and begin epochs. It may
import all of this package and its framework. Batches leave the loader here, and are counted as the framework takes
them. A monitoring system's adapter gets the counters and events of loaders.
"""
