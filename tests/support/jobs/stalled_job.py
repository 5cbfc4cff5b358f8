"""Without torchrun: take one batch, leave the workers with full queues, and wait to be killed.

Its arguments: the data, and how workers are started.
"""

from __future__ import annotations

import signal
import sys

from torch_dataloader_utils import StructuredDataset

if __name__ == "__main__":
    loader, _ = StructuredDataset.create_dataloader(
        sys.argv[1], batch_size=4000, num_workers=2, prefetch_factor=4, multiprocessing_context=sys.argv[2]
    )
    batches = iter(loader)
    next(batches)
    sys.stdout.write("begun\n")
    sys.stdout.flush()
    signal.pause()
