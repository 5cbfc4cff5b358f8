"""torchrun that ends with the tests: ``launch.py PARENT`` and torchrun's own arguments."""

from __future__ import annotations

import runpy
import signal
import sys

from lifeline import end_with_parent

end_with_parent(int(sys.argv.pop(1)), by=signal.SIGTERM)  # on which torchrun ends its ranks
runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
