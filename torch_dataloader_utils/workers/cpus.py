"""How many worker processes are started by default."""

from __future__ import annotations

from torch_dataloader_utils.formats.cpus import usable_cpus


def default_num_workers(num_ranks: int) -> int:
    """Return the default number of workers: the CPUs that this process may use, less one for the training itself.

    The plan depends on the number of workers, and all ranks have to make the same plan. Their machines may have
    different numbers of CPUs. So with several ranks the default is 1.
    """
    return 1 if num_ranks > 1 else max(1, usable_cpus() - 1)
