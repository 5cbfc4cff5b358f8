"""Imported last by the fork server, so that its processes share the memory of what it has imported."""

from __future__ import annotations

import gc

from jobs.processes import use_huge_pages

gc.enable()  # jobs.uncollected has disabled it
gc.collect()
gc.freeze()  # a collection writes to all that it looks at, and a process that writes to memory gets a copy of it
use_huge_pages()
