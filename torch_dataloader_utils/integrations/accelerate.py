"""Hugging Face Accelerate: a loader whose batches are on the device, and whose states are in `save_state`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.utils import send_to_device

from torch_dataloader_utils.dataset.structured import StructuredDataset
from torch_dataloader_utils.distributed.gather import gather_states, load_gathered, on_all_ranks
from torch_dataloader_utils.distributed.steps import agreed_end
from torch_dataloader_utils.loader.arguments import require_count
from torch_dataloader_utils.loader.data_loader import StructuredDataLoader
from torch_dataloader_utils.loader.device import require_loader
from torch_dataloader_utils.loader.iteration import with_last

SKIPS = """a prepared loader has no `drop_last`, which skip_first_batches needs to make another DataLoader. That one \
would read batches to skip them, and would not know the epoch. To continue where a training stopped, call \
accelerator.save_state there and accelerator.load_state here, or load_state_dict with the result of state_dict"""


def prepare_loader(accelerator: Accelerator, loader: StructuredDataLoader) -> PreparedLoader:
    """Prepare a loader for Accelerate, in place of ``accelerator.prepare(loader)``. All ranks call it together.

    The loader already delivers this rank's rows, so nothing is dealt out again. ``accelerator.save_state`` saves the
    states of all ranks, and ``load_state`` loads them, also into another number of ranks or workers: then each
    remaining row is delivered once, in another order.

    Args:
        accelerator: The accelerator.
        loader: This rank's loader, which `StructuredDataset.create_dataloader` made after the accelerator. Where the
            accelerator's `parallelism_config` divides the model among processes, it is made with the data-parallel part
            of the accelerator's mesh: ``mesh=accelerator.torch_device_mesh["dp_shard"]``.

    Returns:
        A loader to iterate over. It may be passed to ``accelerator.prepare``, too, which returns it as it is.

    Raises:
        TypeError: If the loader is not this package's loader.
        ValueError: If the loader has another number of data-parallel ranks than the accelerator, or is another rank's.
    """
    prepared = PreparedLoader(accelerator, loader, ends_together=True)
    accelerator.register_for_checkpointing(prepared)
    return prepared


class PreparedLoader(DataLoaderStateMixin):  # type: ignore[misc]
    """A loader as Accelerate uses one. `prepare_loader` makes it.

    Each pass delivers the next epoch, as with Accelerate's own loaders: `set_epoch` need not be called. A pass after
    ``load_state`` continues the saved epoch, or begins the next one if the saved epoch had ended on all ranks.

    Args:
        accelerator: The accelerator.
        loader: This rank's loader.
        ends_together: Whether a pass ends on all ranks as soon as one has no batch left, where a filter may leave them
            different numbers of batches. Training needs that, and `prepare_loader` asks for it. To validate, each rank
            delivers all of its rows.

    Attributes:
        loader: The loader of this package.
    """

    _is_accelerate_prepared = True  # Accelerator.prepare returns what has this as it is
    use_stateful_dataloader = False

    def __init__(self, accelerator: Accelerator, loader: StructuredDataLoader, *, ends_together: bool = False) -> None:
        require_loader(loader)
        self.loader = loader
        self._require_own_rank(accelerator)
        self.device = accelerator.device if accelerator.device_placement else None
        self._accelerator = accelerator
        self.gradient_state = accelerator.gradient_state
        self._non_blocking = accelerator.non_blocking
        self._ends_together = ends_together
        self._ended: int | None = None  # the epoch that was delivered last, if it was to its end
        self._restored = False  # whether skipped steps were to be restored by then
        self.reset()

    def _require_own_rank(self, accelerator: Accelerator) -> None:
        """Raise unless the loader is that of this process, which may share its batches with others."""
        dataset, parallelism = self.dataset, accelerator.parallelism_config
        # As Accelerate divides batches: the dimensions of tensors and contexts are the last of its mesh.
        alike = parallelism.tp_size * parallelism.cp_size if parallelism else 1
        num_ranks, rank = accelerator.num_processes // alike, accelerator.process_index // alike
        if (dataset.num_ranks, dataset.rank) == (num_ranks, rank):
            return
        msg = f"the loader is that of rank {dataset.rank} of {dataset.num_ranks}, and the accelerator has process "
        msg += f"{accelerator.process_index} of {accelerator.num_processes}"
        if alike == 1:
            raise ValueError(f"{msg}: make the loader after the accelerator, without num_ranks and rank")
        dimensions = ", ".join(f'"{name}"' for name in parallelism.dp_dim_names)
        options = f"mesh=accelerator.torch_device_mesh[{dimensions}]" if dimensions else "num_ranks=1, rank=0"
        raise ValueError(f"{msg}, which is data-parallel rank {rank} of {num_ranks}: make the loader with {options}")

    @property
    def dataset(self) -> StructuredDataset:
        """The dataset."""
        return self.loader.dataset  # type: ignore[return-value]

    @property
    def batch_size(self) -> int | None:
        """Rows in a batch of this rank; None where a token budget decides how many these are."""
        return self.dataset.batch_size

    @property
    def drop_last(self) -> bool:
        """Missing: `skip_first_batches` of Accelerate asks for it, and gets an error that says how to resume."""
        raise AttributeError(SKIPS)

    @property
    def epoch(self) -> int:
        """The epoch that the next pass delivers, or continues."""
        return self.dataset.epoch + self._has_ended

    @property
    def _has_ended(self) -> bool:
        """Whether the epoch was delivered to its end, and this rank has no skipped steps to restore."""
        is_asked_since = self.loader.will_restore and not self._restored  # of a rank that has other batches left, too
        return self.dataset.epoch == self._ended and not is_asked_since and not self.loader.leaves_restored

    def _has_ended_everywhere(self) -> bool:
        """Whether no rank has skipped steps to restore after the end of the epoch. All ranks ask together."""
        return on_all_ranks(self._has_ended) if self.loader.skip_requests.restores else self._has_ended

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: see `StructuredDataset.set_epoch`."""
        self.loader.set_epoch(require_count(epoch, "epoch", least=0))
        self._ended = None

    def __len__(self) -> int:
        """Return the number of batches of the whole epoch, also if it continues from a state."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Deliver the epoch, or the rest of it that a loaded state has left, on the accelerator's device."""
        if self._has_ended_everywhere():
            self.set_epoch(self.dataset.epoch + 1)
        elif self.dataset.epoch == self._ended and not self.dataset.is_finished:
            self.loader.load_state_dict(self.loader.state_dict())  # the pass ended with another rank's batches
        self.reset()
        self.gradient_state._add_dataloader(self)  # noqa: SLF001 - as the mixin's begin() does
        try:
            agreed = agreed_end(self.loader) if self._ends_together else bool
            # torch draws the workers' seed when it starts them. The model's numbers must not depend on that, since
            # `load_state` has restored them; and without the epoch all epochs would have one seed.
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed((torch.initial_seed() + self.dataset.epoch) % 2**63)
                batches = iter(self.loader)
            is_last = False
            for batch, is_last in with_last(batches, agreed):
                self.end_of_dataloader = is_last
                self._end(self.dataset.epoch if is_last else None)
                yield batch if self.device is None else send_to_device(batch, self.device, self._non_blocking)
            if not is_last:  # no batch was left
                self._end(self.dataset.epoch)
        finally:
            self.end()

    def _end(self, epoch: int | None) -> None:
        self._ended, self._restored = epoch, self.loader.skip_requests.restores

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks. All ranks call it together, as ``accelerator.save_state`` does."""
        is_alike = self.dataset.num_ranks == 1  # on all processes
        states = [self.loader.state_dict()] if is_alike else gather_states(self.loader)
        return {"ranks": states, "step": self._accelerator.step, "ended": on_all_ranks(self._has_ended)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states of all ranks. All ranks call it together, as ``accelerator.load_state`` does."""
        load_gathered(self.loader, state_dict["ranks"])
        # Accelerate keeps its count towards the next accumulated step per rank: a new rank would begin at 0, and wait.
        self._accelerator.step = state_dict["step"]
        # Where ranks end together, some have batches left when the epoch has ended. Older states do not say that.
        ended = on_all_ranks(self.dataset.is_finished) or state_dict.get("ended", False)
        self._end(self.dataset.epoch if ended else None)
