"""Which thread decodes a row group."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import all_rows_of, open_loader

from torch_dataloader_utils.formats import cpus
from torch_dataloader_utils.formats.cpus import decoding_threads, uses_arrows_threads
from torch_dataloader_utils.reading.row_groups.decoder import Decoder

SIZES = {"a": 4_000, "b": 10, "c": 10, "d": 10}
"""Rows of each file, which is one row group: the first is larger than all others together."""


def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pa, "cpu_count", lambda: 2)


def one_thread_for_other_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun starts each of several ranks on a machine."""
    monkeypatch.setattr(pa, "cpu_count", lambda: 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def a_container_of_two_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with more of them, which Arrow sees."""
    monkeypatch.setattr(pa, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(cpus, "cpu_quota", lambda: 2.5)
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("threads", [two_threads, one_thread_for_other_libraries, a_container_of_two_cpus])
def test_a_row_group_does_not_wait_for_a_large_one_while_another_thread_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: Callable[[pytest.MonkeyPatch], None]
) -> None:
    first = 0
    for name, rows in SIZES.items():
        pq.write_table(pa.table({"id": range(first, first + rows)}), tmp_path / f"{name}.parquet")
        first += rows
    threads(monkeypatch)
    decode = Decoder._attempt
    third = threading.Event()
    came: list[bool] = []

    def attempt(self: Decoder, path: str, numbers: range, rest: Any) -> Any:
        if path == "a.parquet":
            came.append(third.wait(60))
        decoded = decode(self, path, numbers, rest)
        if path == "c.parquet":
            third.set()
        return decoded

    monkeypatch.setattr(Decoder, "_attempt", attempt)
    loader, _ = open_loader(tmp_path, batch_size=100)
    assert all_rows_of(loader) == list(range(sum(SIZES.values())))
    assert came == [True]


def test_as_many_threads_decode_as_arrow_has_unless_nobody_has_chosen_how_many_these_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one_thread_for_other_libraries(monkeypatch)
    assert (decoding_threads(), uses_arrows_threads()) == (2, False), "two ranks share four CPUs"
    monkeypatch.setattr(cpus, "get_worker_info", object)
    assert (decoding_threads(), uses_arrows_threads()) == (1, True), "a worker, which has its share already"
    monkeypatch.undo()

    a_container_of_two_cpus(monkeypatch)
    assert (decoding_threads(), uses_arrows_threads()) == (2, False)
    monkeypatch.setattr(pa, "cpu_count", lambda: 5)
    assert (decoding_threads(), uses_arrows_threads()) == (5, True), "the program says so by pyarrow.set_cpu_count"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(pa, "cpu_count", lambda: 3)
    assert (decoding_threads(), uses_arrows_threads()) == (3, True), "the environment says so"
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(pa, "cpu_count", lambda: 64)
    monkeypatch.setattr(cpus, "cpu_quota", lambda: math.inf)
    assert (decoding_threads(), uses_arrows_threads()) == (64, True)
