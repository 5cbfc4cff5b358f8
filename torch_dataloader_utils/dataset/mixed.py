"""`MixedDataset`: how users make a dataset of several sources, and its loader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from torch_dataloader_utils.dataset.discovery import Request
from torch_dataloader_utils.dataset.file_set import FileSet
from torch_dataloader_utils.dataset.kept_rows import kept_rows
from torch_dataloader_utils.dataset.manifest_file import dump_opened
from torch_dataloader_utils.dataset.sources import SourceDescription, open_sources, require_rows, require_sources
from torch_dataloader_utils.dataset.structured import StructuredDataset
from torch_dataloader_utils.dataset.weights import ExactSchedule, Weights, WeightSchedule, exact_shares, parse_weights
from torch_dataloader_utils.errors import LedgerUnknownError
from torch_dataloader_utils.formats.opened_files import Opened, OpenedFiles, OpenedSources
from torch_dataloader_utils.formats.text.footer import Cutting
from torch_dataloader_utils.loader.arguments import optional_count, parse_bytes
from torch_dataloader_utils.loader.data_loader import StructuredDataLoader
from torch_dataloader_utils.planning.ledger.row_steps import Rows, RowStep
from torch_dataloader_utils.planning.mixture.epochs import MixtureEpochs
from torch_dataloader_utils.planning.mixture.passes import Base, PlannedSource, Start
from torch_dataloader_utils.planning.mixture.planner import MixturePlanner
from torch_dataloader_utils.planning.mixture.source_paths import parse_source_path, source_path
from torch_dataloader_utils.planning.plan import PlanOptions
from torch_dataloader_utils.planning.planner import EpochPlanner
from torch_dataloader_utils.planning.strategy import SplitStrategy

OF_A_SOURCE = (
    "path",
    "format",
    "format_options",
    "count_rows",
    "columns",
    "filters",
    "transform",
    "transform_id",
    "partitioning",
    "manifest",
)
"""Parameters of one dataset that each source of a mixture has for itself."""


class MixedDataset(StructuredDataset):
    """Batches of the rows of several sources in given shares, for one rank; otherwise like `StructuredDataset`."""

    @classmethod
    def create_dataloader(  # type: ignore[override] # sources replace the path
        cls,
        sources: Mapping[str, SourceDescription],
        weights: Weights | WeightSchedule,
        *,
        rows_per_epoch: int | None = None,
        source_column: str | None = None,
        **options: Any,
    ) -> tuple[StructuredDataLoader, MixedDataset]:
        """Open several sources and make the loader of this rank's batches.

        A source is an endless sequence of passes, each of which has every row of the source once. An epoch takes of
        each source the rows after those that the epoch before has taken. After every batch each source has delivered
        its share of this rank's rows since the epoch began, less than one row off: of each virtual rank's, if the rank
        stands for several.

        Args:
            sources: The sources by name, each a `Source`.
            weights: The share of each source in the delivered rows, by name: numbers of at least 0, of which only the
                ratios matter. 0 rests a source. Or a schedule: a list of pairs of a row and such a mapping, which holds
                from that planned row of the whole run on, over all ranks.
            rows_per_epoch: Rows of an epoch, of all ranks together. None for as many as there are before the first
                source has been through once: the least, over the sources with a weight above 0, of its rows divided by
                its share.
            source_column: Name of an int64 column to add: the place of the row's source among `sources`, from 0.
            **options: The parameters of `StructuredDataset.create_dataloader`, except those that say which rows there
                are, which each `Source` has for itself, `split_strategy` and `batching`. With `packing` the documents
                of each row group of each source are packed, and all that counts rows here counts sequences: how many
                there are is counted in this call. `shuffle_buffer_size` and
                `read_ahead_bytes` are those of the whole mixture. `uneven_ranks` is ``"drop"`` unless it is ``"pad"``:
                all ranks make equally many steps. `storage_options` are those of the run log.

        Returns:
            The loader and the dataset. Both have `state_dict` and `load_state_dict`.

        Raises:
            TypeError: If there is no such parameter, or an argument has the wrong type.
            ValueError: If an argument's value makes no sense, or the number of a source's rows is not known; the
                message names the source.
            FileNotFoundError: If the path of a source matches no file.
            UnreadableFileError: If a file cannot be read.
            ColumnError: If the columns of sources cannot be unified, or one does not fit what was chosen for it; the
                message names the sources and the column.
        """
        described = require_sources(sources)
        schedule = parse_weights(weights, list(described))
        refuse_options(options)
        if len(schedule) > 1 and rows_per_epoch is None:
            raise ValueError("rows_per_epoch: give it together with a schedule of weights, under which it would change")
        require_column_name(source_column)
        if options.get("fingerprint") is True:
            require_stored_rows(described)
        files = MixedFiles(
            described,
            schedule,
            optional_count(rows_per_epoch, "rows_per_epoch"),
            source_column,
            Cutting(
                parse_bytes(options.get("split_bytes", "128MiB"), "split_bytes"),
                optional_count(options.get("shuffle_buffer_size"), "shuffle_buffer_size"),
            ),
        )
        loader, dataset = super().create_dataloader(files, **{"uneven_ranks": "drop", **options})
        return loader, cast("MixedDataset", dataset)

    def set_weights(self, weights: Weights) -> None:
        """Change the weights from the next epoch on: call it before `set_epoch`. All ranks make the same call.

        Before `load_state_dict` they are those that the loaded epoch goes on with; a strict load needs the state's.

        Args:
            weights: The share of each source, by name, as in `create_dataloader`.

        Raises:
            TypeError: If a weight is no number.
            ValueError: If a source has no weight, a weight makes no sense or its source has no row; or if the loader
                was made with a schedule.
        """
        opened = self._sources
        shares = exact_shares(weights, list(opened))
        for (name, files), share in zip(opened.items(), shares, strict=True):
            require_rows(name, share, files.manifest.rows)
        self._epoch_state.set_weights(shares)

    def get_metrics(self) -> dict[str, Any]:
        """Return what `StructuredDataset.get_metrics` does, and what was delivered of each source.

        Returns:
            Under ``sources``, by name, a dictionary of this rank's ``rows`` of the source in this epoch; ``pass``, the
            newest pass of the source that they reach; ``share_asked``, its weight at the beginning of the epoch or at
            the last elastic load; and ``share_delivered``, its share of the epoch's rows so far. Of the rows that all
            ranks together had delivered before an elastic load, an equal part counts as this rank's.
        """
        return super().get_metrics() | {"sources": self._epoch_state.source_metrics()}

    def rows_at(self, step: int, epoch: int | None = None, rank: int | None = None, *, scan: bool = False) -> Rows:
        """Return the rows of a step of a rank, without reading data: see `StructuredDataset.rows_at`.

        The file of a row is given as ``source@pass/path``.

        Raises:
            LedgerUnknownError: Also if rows of the step are of a source with a filter or a transform: of these the
                dataset knows the number, and not which they are. So it is with `packing`.
        """
        rows = super().rows_at(step, epoch, rank, scan=scan)
        for path in np.unique(rows.files).tolist():
            self._require_unfiltered(parse_source_path(path).source)
        return rows

    def step_of(self, path: str, row: int, epoch: int | None = None, *, scan: bool = False) -> RowStep | None:
        """Return the step that has a row, without reading data: see `StructuredDataset.step_of`.

        Args:
            path: The row's file: ``source@pass/path``, as in `rows_at`, or ``source/path`` for any pass.
            row: The row's number in the file, from 0.
            epoch: The epoch; None for the current one.
            scan: Has no meaning for a mixture, whose rows are counted.

        Returns:
            The step, and in `others` those that have the row in other passes; None if the epoch does not have it.

        Raises:
            LedgerUnknownError: As in `rows_at`.
            ValueError: If there is no such file, or no such row in it.
        """
        source, _, rest = str(path).partition("/")
        if source not in self._sources:
            if source.rpartition("@")[0] in self._sources:
                self._require_unfiltered(source.rpartition("@")[0])
            return super().step_of(path, row, epoch, scan=scan)
        self._require_unfiltered(source)
        if rest not in self._sources[source].manifest.rows_of:
            return super().step_of(path, row, epoch, scan=scan)  # it raises
        reached = {known.number for known in map(parse_source_path, self._paths_of(epoch)) if known.source == source}
        paths = (source_path(source, number, rest) for number in sorted(reached))
        found = [step for one in paths if (step := super(MixedDataset, self).step_of(one, row, epoch)) is not None]
        steps = sorted((each for step in found for each in (step, *step.others)), key=lambda step: step.step)
        return replace(steps[0], others=tuple(replace(step, others=()) for step in steps[1:])) if steps else None

    @property
    def _sources(self) -> Mapping[str, OpenedFiles]:
        return cast("OpenedSources", self._opened_files).sources

    def _paths_of(self, epoch: int | None) -> Iterable[str]:
        """Return the paths of the files of each pass that an epoch reaches."""
        segments = self._epoch_state.segments
        return segments.manifest(segments.of(self._fresh(epoch))[-1]).rows_of

    def _require_unfiltered(self, source: str) -> None:
        """Raise if only reading tells which rows a source has."""
        if self._sources[source].packing is not None:
            msg = f"source {source!r} is packed, and a sequence has tokens of many rows; batch_at(step) reads a batch"
            raise LedgerUnknownError(msg)
        if self._sources[source].makes_rows:
            msg = f"source {source!r} has a transform, and only reading tells which rows it makes of which; "
            raise LedgerUnknownError(f"{msg}batch_at(step) reads a batch")
        if self._sources[source].stored_rows is not None:
            msg = (
                f"source {source!r} has a filter: how many rows it keeps of each row group was counted, and not which "
            )
            raise LedgerUnknownError(f"{msg}they are; batch_at(step) reads a batch")

    def restore_skipped(self) -> None:
        """Raise: skipped steps of a mixture stay skipped.

        Raises:
            ValueError: Always. After an elastic load the rows that were skipped are no steps any more, so that they
                would be delivered in other shares than the weights.
        """
        msg = (
            "restore_skipped: skipped steps of a mixture stay skipped, since an elastic load would leave rows of them "
        )
        raise ValueError(f"{msg}in other shares than the weights; they come again with the next pass of their sources")

    def dump_manifest(self, source: str) -> bytes:  # type: ignore[override] # each source has its own
        """Return the files and footers of a source, and what was counted of it, for the `manifest` of a `Source`.

        Args:
            source: The name of the source.

        Returns:
            Bytes to keep in a file or to send. They hold no credentials.

        Raises:
            ValueError: As in `StructuredDataset.dump_manifest`, or if there is no such source.
        """
        return manifest_of(source, self._sources)

    def __repr__(self) -> str:
        """Describe the dataset in one line, without secrets."""
        topology = self._epoch_state.topology
        sources = ", ".join(self._sources)
        return (
            f"{type(self).__name__}({sources}; rank {topology.rank} of {topology.num_ranks}, "
            f"{topology.num_workers} workers, epoch {self.epoch})"
        )


@dataclass(frozen=True, slots=True)
class MixedFiles(FileSet):
    """The files of all sources of a mixture, and in which shares their rows are delivered."""

    described: Mapping[str, SourceDescription]
    schedule: ExactSchedule
    rows_per_epoch: int | None
    source_column: str | None
    cutting: Cutting

    @property
    def sources(self) -> int:
        """Number of sources."""
        return len(self.described)

    @property
    def is_mixture(self) -> bool:
        """That they are those of a mixture."""
        return True

    def open(self, request: Request) -> OpenedSources:
        """Open every source once."""
        return OpenedSources(open_sources(self.described, request, self.cutting, self.source_column))

    def planner(
        self,
        opened: Opened,
        options: PlanOptions,
        strategy: SplitStrategy | None,  # noqa: ARG002 - a mixture is refused one
        *,
        drop_last: bool,
    ) -> EpochPlanner:
        """Return what plans the epochs of the mixture.

        Raises:
            ValueError: If a source with a weight has no row.
        """
        assert isinstance(opened, OpenedSources)  # noqa: S101 - `open` returned it
        sources = tuple(
            PlannedSource(name, files.manifest, files.selection, files.makes_rows)
            for name, files in opened.sources.items()
        )
        for _, weights in self.schedule:
            for source, weight in zip(sources, weights, strict=True):
                require_rows(source.name, weight, source.rows)
        base = Base(0, (Start(),) * len(sources))
        return MixturePlanner(
            MixtureEpochs(sources, options, self.schedule, self.rows_per_epoch, drop_last=drop_last, base=base)
        )


def require_column_name(name: object) -> None:
    """Raise unless the value is the name of the source column, or None."""
    if name is not None and (not isinstance(name, str) or not name):
        raise TypeError(f"source_column={name!r}: expected the name of the column to add")


def require_stored_rows(sources: Mapping[str, SourceDescription]) -> None:
    """Raise a ValueError if a source delivers other rows than those of its files."""
    for name, source in sources.items():
        if source.transform is not None:
            msg = f"fingerprint=True hashes which rows of files are delivered, and the transform of source {name!r} "
            raise ValueError(f"{msg}makes others of them")


def refuse_options(options: Mapping[str, Any]) -> None:
    """Raise if options of a mixture are those of a source, or cannot be had with several sources."""
    wrong = [name for name in OF_A_SOURCE if name in options]
    if wrong:
        raise TypeError(f"{' and '.join(wrong)}: give that to each source, as in Source(path, {wrong[0]}=...)")
    if options.get("storage_options") is not None and options.get("run_log") is None:
        msg = "storage_options: give them to each source, as in Source(path, storage_options=...); those of a mixture "
        raise TypeError(f"{msg}are for its run_log, and there is none")
    if options.get("split_strategy") is not None:
        raise ValueError("split_strategy: the shards of a mixture are those of its sources' passes")
    if options.get("uneven_ranks") == "allow":
        msg = "uneven_ranks='allow': the ranks of a mixture always make equally many steps; choose 'drop' or 'pad'"
        raise ValueError(msg)


def manifest_of(source: str, opened: Mapping[str, OpenedFiles]) -> bytes:
    """Return a source's manifest."""
    if source not in opened:
        raise ValueError(f"there is no source {source!r}: there are {', '.join(map(repr, opened))}")
    files = opened[source]
    return dump_opened(files, kept=kept_rows(files))
