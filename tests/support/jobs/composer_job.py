"""In several ranks, under Composer: train two epochs with the guide's code, and die at a step if told to.

Its argument, JSON: ``page``, the guide; ``directory``, with the data and the checkpoints; ``die``, the step of this run
at which all ranks kill themselves, or null.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from composer import Callback
from jobs.pages import code_of


class Trained(Callback):  # type: ignore[misc]
    """The rows that all ranks have trained, which Composer saves with the model."""

    def __init__(self, die: int | None) -> None:
        self.runs: list[Any] = []
        self.rows: list[tuple[int, float]] = []
        self._die, self._step = die, 0

    def after_loss(self, state: Any, _logger: Any) -> None:
        """Note the rows of a batch."""
        self.rows += [(int(state.timestamp.epoch), x) for x in state.batch["x"].tolist()]

    def batch_checkpoint(self, _state: Any, _logger: Any) -> None:
        """Die, after what Composer saves."""
        self._step += 1
        if self._step == self._die:
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)

    def state_dict(self) -> dict[str, Any]:
        """Return the rows of all runs and ranks."""
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, self.rows)
        return {"runs": [*self.runs, every]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the rows of the runs before."""
        self.runs = state["runs"]


def main() -> None:
    """Train."""
    arguments = json.loads(sys.argv[1])
    os.chdir(arguments["directory"])
    os.environ |= {"LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"], "NODE_RANK": "0"}  # as Composer's launcher sets them
    guide: dict[str, Any] = {"__name__": __name__}
    exec(code_of(arguments["page"]).rpartition("make_trainer(")[0], guide)  # noqa: S102
    torch.manual_seed(0)
    trained = Trained(arguments["die"])
    guide["make_trainer"](trained, max_duration="2ep", device="cpu", progress_bar=False).fit()
    runs = trained.state_dict()["runs"]
    if dist.get_rank() == 0:
        Path("runs.json").write_text(json.dumps(runs))


if __name__ == "__main__":
    main()
