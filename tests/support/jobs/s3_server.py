"""An S3 server for one test run: ``s3_server.py PARENT`` writes the port that the system chose and serves."""

from __future__ import annotations

import signal
import sys

from lifeline import end_with_parent
from moto.server import ThreadedMotoServer

end_with_parent(int(sys.argv[1]))
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
_, port = server.get_host_and_port()
sys.stdout.write(f"{port}\n")
sys.stdout.flush()
signal.pause()
