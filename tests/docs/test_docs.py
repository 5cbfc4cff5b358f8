"""Every Python block of the README and of the documentation runs as it stands."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jobs.forked import run_forked
from jobs.processes import inherited

import torch_dataloader_utils as package
from torch_dataloader_utils import distributed

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
ELSEWHERE = {"composer.md", "ray.md", "torchtitan.md"}
"""Pages whose code a test of its own runs, where the framework is installed."""
FRAMEWORKS = {"accelerate", "lightning", "transformers"}
"""Pages, named after the framework that their code needs."""
NEEDED = {"packing": "torch.nn.attention.flex_attention"}
"""What else the code of a page needs, which torch has from 2.5 on."""
GUIDES = [page for page in PAGES if "```python" in page.read_text(encoding="utf-8") and page.name not in ELSEWHERE]

READERS_OWN = """
import itertools, os, torch
from torch_dataloader_utils import StructuredDataset
torch.distributed.init_process_group(
    "gloo", init_method="file://" + os.path.abspath("rendezvous"), rank=0, world_size=1
)
linear = torch.nn.Linear(1, 1)
model = torch.nn.parallel.DistributedDataParallel(linear)
loader, dataset = StructuredDataset.create_dataloader("data", num_workers=2)
train_step, device, folder, step, epochs, port = lambda batch: None, "cpu", "checkpoints", 7, 2, 0
"""
"""What the guides take for granted, for their blocks are parts of a reader's own program. The README's are whole."""


def blocks_of(page: Path) -> list[str]:
    """Return a page's Python blocks, those inside lists included."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^([ ]*)```python\n(.*?)^\1```", text, flags=re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for _, block in found]


def before_blocks_of(page: Path) -> list[str]:
    """Return a page's blocks of code with another loader, which it shows beside that with this one.

    They begin with "py", so that they are not taken for the reader's program.
    """
    return re.findall(r"^```py\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def write_data(directory: Path, rows: int) -> Path:
    """Write three files of so many rows each, in five row groups, and return the directory with the data in it."""
    (directory / "data").mkdir()
    for number in range(3):
        x = np.linspace(number, number + 1, rows)
        table = pa.table({"x": x, "y": 2 * x})
        pq.write_table(table, directory / "data" / f"part-{number}.parquet", row_group_size=rows // 5)
    return directory


@pytest.fixture
def directory_with_data(tmp_path):
    return write_data(tmp_path, 5_000)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_the_python_blocks_of_a_guide_run_in_order(page, directory_with_data, monkeypatch, request):
    needed = NEEDED.get(page.stem, page.stem if page.stem in FRAMEWORKS else "json")
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    if page.stem in FRAMEWORKS:
        request.getfixturevalue("preloaded_frameworks")
    monkeypatch.chdir(directory_with_data)
    run_forked("\n".join([READERS_OWN, *blocks_of(page)]), directory_with_data)


def test_the_python_blocks_of_the_readme_run_in_order_as_a_program(tmp_path):
    program = write_data(tmp_path, 1_000) / "page.py"
    program.write_text("\n".join(blocks_of(README)), encoding="utf-8")
    environment = {name: value for name, value in inherited().items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(program)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_code_with_another_loader_is_python_and_stands_first_on_the_pages_for_who_comes_from_it():
    assert {page for page in PAGES if before_blocks_of(page)} == set((ROOT / "docs" / "coming_from").glob("*.md"))
    for page in PAGES:
        for block in before_blocks_of(page):
            compile(block, page.name, "exec")
            assert page.read_text(encoding="utf-8").index(block) < page.read_text(encoding="utf-8").index("```python")


def test_code_with_the_previous_package_runs_with_this_one_and_resumes(directory_with_data, monkeypatch):
    monkeypatch.chdir(directory_with_data)
    block = "\n".join(before_blocks_of(ROOT / "docs" / "coming_from" / "previous_package.md"))
    run_forked(f"{READERS_OWN}\n{block}\nassert first == 0\n{block}\nassert first == 1", directory_with_data)


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.name)
def test_every_python_block_of_a_page_is_found(page):
    """One that began in another way, such as with a title, would not run."""
    begins = re.findall(
        r"^[ ]*(?:```|~~~)[ {.]*(?i:py\S*|ipython\S*).*$", page.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(begins) == len(blocks_of(page)) + len(before_blocks_of(page)), begins


def test_pages_with_code_are_found():
    assert {page.name for page in GUIDES} >= {"index.md", "checkpointing.md"}
    assert blocks_of(README)


def test_the_api_page_has_every_public_name():
    listed = set(re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), flags=re.MULTILINE))
    listed |= {name.removesuffix(".create_dataloader") for name in listed}
    public = {f"{module.__name__}.{name}" for module in (package, distributed) for name in module.__all__}
    public |= {f"{package.__name__}.{name}" for name in package._LAZY}
    assert public - listed == set()
