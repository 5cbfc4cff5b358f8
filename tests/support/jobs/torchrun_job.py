"""In ranks, as under torchrun: the example's training, of which one start is stopped at a step if told to.

Its argument, JSON: ``arguments``, the example's command line; ``stops``, by the number of the start: the ``step``, the
``rank``, and ``how``: ``die`` by SIGKILL; ``hold``, to wait for being killed; or ``terminate``, to get SIGTERM and
go on. A rank that is stopped in another way writes the mark of its torchrun into a file in ``directory``. Each rank
writes how many steps it has made into another one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

EXAMPLE = Path(__file__).parents[3] / "examples" / "torchrun"
sys.path.insert(0, str(EXAMPLE))

import train  # noqa: E402 - the example is no package

ARGUMENTS = json.loads(sys.argv[1])


class Stopped(train.Training):
    """The example's training, stopped at some steps."""

    steps = 0

    def step(self, batch: dict[str, Tensor]) -> None:
        """Make a step, after which this rank may stop."""
        super().step(batch)
        self.steps += 1
        Path(ARGUMENTS["directory"], f"steps-{self.starts}-{dist.get_rank()}").write_text(str(self.steps))
        stop = ARGUMENTS["stops"].get(str(self.starts))
        if stop is None or [self.steps, dist.get_rank()] != [stop["step"], stop["rank"]]:
            return
        if stop["how"] == "terminate":
            signal.raise_signal(signal.SIGTERM)  # to this thread: its handler has run when this returns
            return
        unfinished = Path(ARGUMENTS["directory"], "unfinished")
        unfinished.write_text(os.environ["TEST_JOB"])
        unfinished.rename(unfinished.with_name(f"stopped-{self.starts}"))
        if stop["how"] == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            time.sleep(1)


train.Training = Stopped
sys.argv = [str(EXAMPLE / "train.py"), *ARGUMENTS["arguments"]]
train.main()
