"""The code of a guide, for jobs that run it in a framework."""

from __future__ import annotations

import re
from pathlib import Path


def code_of(page: str) -> str:
    """Return a page's Python blocks, one after the other."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```", Path(page).read_text(), re.DOTALL | re.MULTILINE))
