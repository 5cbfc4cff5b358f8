"""Extras: what needs another package is imported when it is asked for, and says what to install."""

from __future__ import annotations

import subprocess
import sys

from jobs.processes import inherited

SCRIPT = """
import sys
from importlib import import_module
import torch_dataloader_utils as package

EXTRAS = {"pyiceberg", "deltalake", "prometheus_client", "opentelemetry", "tensorboard"}
assert not EXTRAS & set(sys.modules), "imported at once"
assert {"IcebergDataset", "DeltaDataset"} <= set(dir(package))
sys.modules |= dict.fromkeys(EXTRAS)  # as if they were not there
for name, extra in (("IcebergDataset", "iceberg"), ("DeltaDataset", "delta")):
    try:
        getattr(package, name)
    except ImportError as error:
        assert f'pip install "torch-dataloader-utils[{extra}]"' in str(error), error
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


def test_the_package_needs_no_library_of_an_extra_until_it_is_asked_for():
    subprocess.run([sys.executable, "-c", SCRIPT], env=inherited(), check=True, timeout=240)
