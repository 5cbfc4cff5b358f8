"""A run: everything that a plan depends on, except the epoch. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from torch_dataloader_utils.checkpoint.mixture_run import MixtureRun
from torch_dataloader_utils.planning.excluded import NO_EXCLUSIONS, Exclusions
from torch_dataloader_utils.planning.manifest import Manifest
from torch_dataloader_utils.planning.plan import PlanOptions
from torch_dataloader_utils.planning.planner import newest_algorithm
from torch_dataloader_utils.planning.token_budget import TokenBudget
from torch_dataloader_utils.planning.topology import Topology


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that a plan depends on, except the epoch. A state of a run records it.

    There is a digest of the filter, of what the filter's columns are in the files, and of the format options that
    determine the rows of a file; of the split strategy its name and a digest. `filter_bindings` has what the filter's
    columns are in each single file, where states list the files. Iceberg tables have a snapshot, Delta Lake tables a
    version. The batch size, the token budget and `drop_last` are recorded, so that earlier steps are known, and
    compared only where skipped steps lie ahead whose rows they decide. Nor is what is excluded, which a state brings
    along. A mixture's manifest has the files of each pass that the epoch reaches, and its sources what else there is of
    files. A transform is known by what the user calls it.
    """

    manifest: Manifest
    options: PlanOptions
    filter_digest: str | None
    topology: Topology
    filter_binding: str | None = None
    filter_bindings: str | None = None
    format: str = "parquet"
    format_options: str | None = None
    snapshot_id: int | None = None
    version: int | None = None
    split_strategy: str | None = None
    plan_algorithm: int = field(default_factory=newest_algorithm)
    exclusions: Exclusions = NO_EXCLUSIONS
    batch_size: int | None = None
    drop_last: bool | None = None
    mixture: MixtureRun | None = None
    transform_id: str | None = None
    batching: TokenBudget | None = None

    def settings(self) -> dict[str, Any]:
        """Return what must be equal to load a state, by the names that users know. Files are compared separately."""
        return {
            "num_workers": self.topology.num_workers,
            "num_ranks": self.topology.num_ranks,
            "rank": self.topology.rank,
            "shuffle_seed": self.options.shuffle_seed,
            **self._plan_settings(),
            "rows": self.manifest.rows,
            "filters": self.filter_digest,
            "filter_binding": self.filter_binding,
            "plan_algorithm": self.plan_algorithm,
            "unit": self.options.unit,
            "transform_id": self.transform_id,
        }

    def plan(self) -> dict[str, Any]:
        """Return what a state records of the plan."""
        return {
            "fingerprint": self.manifest.fingerprint,
            "root": self.manifest.root,
            "files": len(self.manifest.files),
            "rows": self.manifest.rows,
            **self._plan_settings(),
            "filter": self.filter_digest,
            "filter_binding": self.filter_binding,
            "filter_bindings": self.filter_bindings,
            **self._made_of_rows(),
            **({} if self.batching is None else {"batching": _plain(self.batching)}),
        }

    def _made_of_rows(self) -> dict[str, Any]:
        """Return what a state records of what is made of rows; nothing where the rows themselves are delivered."""
        if self.options.unit == "rows":
            return {}
        return {"unit": self.options.unit, "transform_id": self.transform_id}

    def _plan_settings(self) -> dict[str, Any]:
        options = self.options
        size = options.batch_size
        return {
            "format": self.format,
            "format_options": self.format_options,
            "snapshot_id": self.snapshot_id,
            "version": self.version,
            "split_strategy": self.split_strategy,
            "split_bytes": options.split_bytes,
            "split_rows": options.split_rows,
            "shuffle": options.shuffle,
            "shuffle_buffer_size": options.shuffle_buffer_size,
            "shuffle_interleave": options.shuffle_interleave,
            "packing": options.packing,
            "uneven_ranks": options.uneven_ranks,
            "virtual_ranks": self.topology.virtual_ranks,
            "virtual_workers": self.topology.virtual_workers,
            "global_batch_size": None if size is None else size * self.topology.planned_ranks,
        }


def _plain(budget: TokenBudget) -> dict[str, Any]:
    """Return a token budget as plain values: a name may be of a class of its own, as members of enumerations are."""
    values = asdict(budget)
    return {name: str.__str__(value) if isinstance(value, str) else value for name, value in values.items()}
