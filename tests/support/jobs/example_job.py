"""In several ranks: run the training of an example, and die at a step if told to.

Its argument, JSON: ``example``, its folder; ``arguments``, its command line; ``die``, the step of this run after which
rank 0 kills itself, or null.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

ARGUMENTS = json.loads(sys.argv[1])
EXAMPLE = Path(__file__).parents[3] / "examples" / ARGUMENTS["example"]
sys.path.insert(0, str(EXAMPLE))

import train  # noqa: E402 - the example is no package


class Killed(train.Training):
    """The example's training, of which rank 0 kills itself after a step."""

    steps = 0

    def learn(self, batch: Any) -> None:
        """Make a step, after which this rank may die."""
        super().learn(batch)
        self.steps += 1
        if os.environ["RANK"] == "0" and self.steps == ARGUMENTS["die"]:
            os.kill(os.getpid(), signal.SIGKILL)


train.Training = Killed
sys.argv = [str(EXAMPLE / "train.py"), *ARGUMENTS["arguments"]]
train.main()
