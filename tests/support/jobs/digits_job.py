"""In several ranks: run a script of the digits example, note what it trains on, and die at a step if told to.

Its argument, JSON: ``script``, a path; ``arguments``, its command line; ``notes``, a folder in which each rank notes
the ids of the rows that it trains on, a line a step; ``die``, the step at which rank 0 kills itself, or null.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import torch


def main() -> None:
    """Run the script."""
    arguments = json.loads(sys.argv[1])
    script = Path(arguments["script"])
    sys.path.insert(0, str(script.parent))  # as Python does for a script
    import digits  # noqa: PLC0415 - only there now

    # As torchrun does: Lightning looks for the one, and without the other Accelerate starts more threads.
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "OMP_NUM_THREADS": "1"}
    notes = Path(arguments["notes"])
    notes.mkdir(exist_ok=True)
    rank, steps = os.environ["RANK"], 0
    learn = digits.loss_and_counts

    def noted(model: Any, batch: Any) -> Any:
        nonlocal steps
        if torch.is_grad_enabled():
            steps += 1
            with (notes / f"rank-{rank}.jsonl").open("a") as file:
                file.write(json.dumps(batch.ids.tolist()) + "\n")
            if rank == "0" and steps == arguments["die"]:
                os.kill(os.getpid(), signal.SIGKILL)
        return learn(model, batch)

    digits.loss_and_counts = noted
    sys.argv = [str(script), *arguments["arguments"]]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
