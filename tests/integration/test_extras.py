"""Extras: what needs another package is imported when it is asked for, and says what to install."""

from __future__ import annotations

import subprocess
import sys

from jobs.processes import inherited

SCRIPT = """
import sys
import torch_dataloader_utils as package

assert not {"pyiceberg", "deltalake"} & set(sys.modules), "imported at once"
assert {"IcebergDataset", "DeltaDataset"} <= set(dir(package))
sys.modules |= {"pyiceberg": None, "deltalake": None}  # as if they were not there
for name, extra in (("IcebergDataset", "iceberg"), ("DeltaDataset", "delta")):
    try:
        getattr(package, name)
    except ImportError as error:
        assert f'pip install "torch-dataloader-utils[{extra}]"' in str(error), error
    else:
        raise AssertionError(name)
try:
    package.HudiDataset
except AttributeError as error:
    assert "HudiDataset" in str(error)
else:
    raise AssertionError
"""


def test_the_package_needs_no_table_library_until_one_is_asked_for():
    subprocess.run([sys.executable, "-c", SCRIPT], env=inherited(), check=True, timeout=240)
