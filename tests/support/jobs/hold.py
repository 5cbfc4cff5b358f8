"""Keep the namespaces of a made-up host alive until the tests end: ``hold.py PARENT``."""

from __future__ import annotations

import signal
import sys

from lifeline import end_with_parent

end_with_parent(int(sys.argv[1]))
sys.stdout.write("ready\n")
sys.stdout.flush()
signal.pause()
