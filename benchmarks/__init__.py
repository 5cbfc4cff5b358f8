"""Measures what the loader costs, compared with Arrow's own readers and with other loaders.

``python -m benchmarks`` lists the commands. The folders, each of which imports only from those below it:

- ``report``: the promised ratios, the comparison of two checkouts, and the page docs/benchmarks.md.
- ``measure``: workloads, and how their contenders are run and measured.
- ``data``: the data sets.
- ``contenders``: the scripts that are measured, each run in a process of its own.

``results`` has the raw results that the page is written from. All else that the suite writes goes to build/bench.
"""
