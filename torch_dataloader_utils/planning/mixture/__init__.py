"""Mixtures: where each epoch begins in the sources, what it takes of them, and its plan. Pure.

A `MixtureEpochs` enters at `planner.MixturePlanner`; the `Plan` of an epoch leaves, with a stream for each source.
"""
