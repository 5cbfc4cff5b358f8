"""The proxy of `faults.proxy`: ``s3_proxy.py PARENT UPSTREAM`` writes its port, then obeys one line at a time."""

from __future__ import annotations

import asyncio
import sys

from faults.proxy import FaultyProxy
from lifeline import end_with_parent

end_with_parent(int(sys.argv[1]))
asyncio.run(FaultyProxy(sys.argv[2]).run())
