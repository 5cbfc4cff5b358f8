"""Which allocator holds what is decoded: jemalloc, unless the user chose one."""

from __future__ import annotations

import pyarrow as pa
import pytest
from support import open_loader, write_dataset

from torch_dataloader_utils.columns import arrow_memory

pytestmark = pytest.mark.skipif(
    not {"jemalloc", "mimalloc"} <= set(pa.supported_memory_backends()), reason="this build of Arrow has one allocator"
)


@pytest.fixture
def default(monkeypatch):
    """Arrow's default allocator is mimalloc, and no choice is remembered."""
    monkeypatch.delenv(arrow_memory.CHOICE, raising=False)
    before = pa.default_memory_pool()
    pa.set_memory_pool(pa.mimalloc_memory_pool())
    arrow_memory.memory_pool.cache_clear()
    yield
    pa.set_memory_pool(before)
    arrow_memory.memory_pool.cache_clear()


@pytest.mark.usefixtures("default")
@pytest.mark.parametrize("options", [{}, {"shuffle": True, "shuffle_buffer_size": 1000}], ids=["in order", "shuffled"])
def test_rows_are_decoded_into_jemalloc(tmp_path, options):
    write_dataset(tmp_path, [(20_000, 20_000)])
    loader, _ = open_loader(tmp_path, batch_size=20_000, output_format="arrow", **options)
    before = pa.jemalloc_memory_pool().bytes_allocated()
    for batch in loader:
        held = pa.jemalloc_memory_pool().bytes_allocated() - before
        assert held > batch.nbytes // 2 > 0  # row ids are added outside


@pytest.mark.usefixtures("default")
def test_an_allocator_that_the_environment_names_is_used(monkeypatch):
    monkeypatch.setenv(arrow_memory.CHOICE, "mimalloc")
    assert arrow_memory.memory_pool() is None


@pytest.mark.usefixtures("default")
def test_an_allocator_that_the_program_sets_is_used():
    pa.set_memory_pool(pa.system_memory_pool())
    assert arrow_memory.memory_pool() is None


@pytest.mark.usefixtures("default")
def test_a_build_without_jemalloc_uses_arrows_default(monkeypatch):
    monkeypatch.setattr(pa, "supported_memory_backends", lambda: ["mimalloc", "system"])
    assert arrow_memory.memory_pool() is None
