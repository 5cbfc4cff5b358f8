"""Read an epoch from its start, without training: what a resume costs with a loader that cannot resume.

`demo.py` runs it on as many ranks as `train.py`, with the same settings. It measures the time to the batch after
a given step when everything before is read again. Then it reads the rest, so that `demo.py` can compare the order
of this uninterrupted epoch with the order of the training.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import islice
from pathlib import Path

import torch.distributed as dist
from ledger import Ledger, ledger_path
from train import make_loader


def main() -> None:
    """Read the epoch, and write a ledger and a report of each rank into the folder of the run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--until-step", type=int, required=True, help="the step that training was resumed at")
    arguments = parser.parse_args()
    arguments.run_dir.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    dist.barrier()

    started = time.perf_counter()
    loader, dataset = make_loader(arguments.data, arguments.batch_size)
    batches = iter(loader)
    row_ids = [batch.row_id.numpy() for batch in islice(batches, arguments.until_step + 1)]
    report = {"seconds_to_batch": time.perf_counter() - started, "metrics": dataset.get_metrics()}

    row_ids += [batch.row_id.numpy() for batch in batches]
    ledger = Ledger(ledger_path(arguments.run_dir, dist.get_rank()), step=0)
    for step, rows in enumerate(row_ids, start=1):
        ledger.append(step, rows)
    ledger.close()
    (arguments.run_dir / f"report-rank-{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
