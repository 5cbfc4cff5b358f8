"""Extras: what needs another package is imported when it is asked for, and says what to install, by a name that works.

The package index has another package under this one's name, so no text may say to install this one from there.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from jobs.processes import inherited

import torch_dataloader_utils

PACKAGE = Path(torch_dataloader_utils.__file__).parent
ROOT = Path(__file__).parents[2]
INSTALLED_BY_NAME = re.compile(r"pip install \S*torch[-_]dataloader[-_]utils")

SCRIPT = """
import sys
from importlib import import_module
import torch_dataloader_utils as package

EXTRAS = {"pyiceberg", "deltalake", "prometheus_client", "opentelemetry", "tensorboard"}
assert not EXTRAS & set(sys.modules), "imported at once"
assert {"IcebergDataset", "DeltaDataset"} <= set(dir(package))
import_module("torch_dataloader_utils.distributed")
assert "torch.distributed.checkpoint" not in sys.modules, "only the store needs it"
assert package.CheckpointStore.__name__ == "CheckpointStore"
assert "torch.distributed.checkpoint" in sys.modules
sys.modules |= dict.fromkeys(EXTRAS)  # as if they were not there
for name, library in (("IcebergDataset", "pyiceberg"), ("DeltaDataset", "deltalake")):
    try:
        getattr(package, name)
    except ImportError as error:
        assert str(error) == f"{name} needs {library}: pip install {library}", error
    else:
        raise AssertionError(name)
NEEDED = {"prometheus": "prometheus-client", "opentelemetry": "opentelemetry-api", "tensorboard": "tensorboard"}
for name, needed in NEEDED.items():
    try:
        import_module(f"torch_dataloader_utils.integrations.{name}")
    except ImportError as error:
        assert str(error).endswith(f": pip install {needed}"), error
    else:
        raise AssertionError(name)
try:
    package.HudiDataset
except AttributeError as error:
    assert "HudiDataset" in str(error)
else:
    raise AssertionError
"""


def test_the_package_needs_no_library_of_an_extra_and_not_what_only_the_store_needs_until_it_is_asked_for():
    subprocess.run([sys.executable, "-c", SCRIPT], env=inherited(), check=True, timeout=240)


def test_no_message_and_no_page_says_to_install_the_other_package_of_this_name():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    texts = [*pages, *PACKAGE.rglob("*.py")]
    assert len(texts) > 100
    assert [path for path in texts if INSTALLED_BY_NAME.search(path.read_text(encoding="utf-8"))] == []
