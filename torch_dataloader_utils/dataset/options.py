"""What `create_dataloader` was called with, checked and converted before any file is looked at."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from torch.utils.data import DataLoader

from torch_dataloader_utils.columns.convert import OUTPUT_FORMATS
from torch_dataloader_utils.columns.options import ColumnOptions, Packing, parse_column_options
from torch_dataloader_utils.columns.transform import ColumnTransform, refuses_announced_nulls
from torch_dataloader_utils.dataset.batching import parse_batching, require_countable
from torch_dataloader_utils.dataset.counted_tokens import with_tokens
from torch_dataloader_utils.dataset.discovery import Request
from torch_dataloader_utils.dataset.file_set import FileSet, PathSet
from torch_dataloader_utils.dataset.manifest_file import parse_tokens
from torch_dataloader_utils.dataset.packing import UNKNOWN_SEQUENCES, packing_text, parse_packing, require_packable
from torch_dataloader_utils.dataset.ranks import Ranks, world
from torch_dataloader_utils.dataset.transforms import parse_transform, with_transform
from torch_dataloader_utils.formats.base import Format
from torch_dataloader_utils.formats.opened_files import Opened, OpenedFiles, files_of
from torch_dataloader_utils.formats.registry import FORMATS, choose_format, require_known_rows
from torch_dataloader_utils.formats.row_packing import FACTS, RowGroupPacking
from torch_dataloader_utils.formats.row_transform import Transform
from torch_dataloader_utils.formats.text.footer import Cutting
from torch_dataloader_utils.gc_pause import without_gc
from torch_dataloader_utils.loader import arguments
from torch_dataloader_utils.loader.events import Hook, parse_hooks
from torch_dataloader_utils.loader.progress_bar import require_tqdm
from torch_dataloader_utils.loader.run_log import RunLogFiles
from torch_dataloader_utils.planning.plan import UNEVEN_RANKS, PlanOptions
from torch_dataloader_utils.planning.strategy import SplitStrategy, require_strategy
from torch_dataloader_utils.planning.token_budget import TokenBudget
from torch_dataloader_utils.planning.topology import Topology, arrange
from torch_dataloader_utils.reading.row_groups.selection import MARKS_COLUMN
from torch_dataloader_utils.reading.scan import ReadOptions
from torch_dataloader_utils.workers.cpus import default_num_workers

Condition: TypeAlias = tuple[str, str, Any]
"""A column, an operator and a value, as in ``("x", ">", 3)``."""

Filters: TypeAlias = pc.Expression | Sequence[Condition] | Sequence[Sequence[Condition]]
"""Which rows to deliver: an expression, or conditions as ``pyarrow.parquet.read_table`` takes them."""

FILTERS_EXPECTED = (
    "expected a pyarrow.compute.Expression such as pc.field('x') > 3, or pyarrow's lists of tuples: "
    "[('x', '>', 3), ('y', 'in', ['a', 'b'])] for rows that meet all conditions, a list of such lists for rows that "
    "meet all conditions of one of them"
)

DEFAULT_BATCH_SIZE = 1024

OPERATORS = ("==", "=", "!=", "<", ">", "<=", ">=", "in", "not in")


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """The arguments of `StructuredDataset.create_dataloader`, which documents them: checked, and grouped by their use.

    Attributes:
        files: What to open: `path`, with `format`, `storage_options`, `partitioning` and `manifest`; or a table.
        column_options: `output_format`, `column_formats`, `fill_nulls` and `mask_nulls`.
        topology: The ranks and workers, and the virtual topology.
        process_group: The process group of the ranks that `mesh` stands for; None without one.
        ranks_are_assumed: Whether there is one rank because nothing tells how many there are.
        adopts_num_workers: Whether the number of workers of a loaded state replaces this run's.
        plan: What the plan depends on: the sizes of shards, shuffling, balancing.
        batch_size: Rows in a batch of this rank, given as `batch_size` or by `global_batch_size`; not used beside
            `batching`.
        progress_interval_sec: Seconds after which the progress bar is drawn again; None for no bar in this process.
        run_log: The directory of the run log; None without one.
        writes_run_log: Whether this process writes it: the first one of a job.
        hooks: Functions that are called with each event.
        torch_options: `dataloader_kwargs`, for ``torch.utils.data.DataLoader``.
        transform: What makes other rows of the rows, and what the user calls it; None for nothing.
        packing: How rows become sequences; None where they do not.
        count_tokens: Whether their tokens are counted ahead, or the column that says how many each document has.
        batching: How many tokens a batch has; None where batches have `batch_size` rows.
    """

    files: FileSet
    storage_timeout: float
    columns: list[str] | None
    column_options: ColumnOptions
    filters: pc.Expression | None
    topology: Topology
    process_group: Any
    ranks_are_assumed: bool
    adopts_num_workers: bool
    plan: PlanOptions
    strategy: SplitStrategy | None
    batch_size: int
    drop_last: bool
    row_id_column: str | None
    fingerprint: bool
    read_ahead_bytes: int
    memory_map: bool | None
    collate_fn: Callable[[Any], Any] | None
    progress_interval_sec: float | None
    run_log: RunLogFiles | None
    writes_run_log: bool
    hooks: tuple[Hook, ...]
    torch_options: Mapping[str, Any]
    transform: tuple[Transform, str | None] | None
    packing: Packing | None
    count_tokens: bool | str
    batching: TokenBudget | None

    @classmethod
    def parse(cls, given: Mapping[str, Any], parameters: Iterable[str]) -> LoaderOptions:
        """Check all arguments, by parameter of `create_dataloader`. No storage, catalog or table is accessed.

        `parameters` are the names that a misspelt one is compared with. They are asked for only if there may be one.

        Raises:
            TypeError: If there is no such parameter, or an argument has the wrong type.
            ValueError: If an argument's value makes no sense, alone or with another's.
        """
        torch_options = given["dataloader_kwargs"]
        if torch_options:
            arguments.require_known_names(torch_options, {*parameters, *arguments.TORCH_OPTIONS})
        columns = arguments.parse_columns(given["columns"], given["row_id_column"])
        arguments.require_callable(given["collate_fn"], "collate_fn")
        transform = parse_transform(given)
        arguments.require_options(given["storage_options"], "storage_options")
        file_format = _parse_format(given)
        files = given["path"] if isinstance(given["path"], FileSet) else PathSet.parse(given, file_format)
        filters = parse_filters(given["filters"])
        batching = parse_batching(given, is_mixture=files.is_mixture)
        ranks = _parse_ranks(given)
        batch_size = _parse_batch_size(given, ranks.num_ranks)
        topology = _parse_topology(
            given, ranks, batch_size, is_filtered=filters is not None or files.is_filtered or transform is not None
        )
        packing = parse_packing(given, is_mixture=files.is_mixture)
        plan = _parse_plan(given, topology, batch_size, packing)
        if files.is_mixture:  # what its sources deliver is counted when they are opened
            plan = replace(plan, is_open_ended=False)
        if given["split_strategy"] is not None:
            require_strategy(given["split_strategy"], plan)
        _try_torch_options(torch_options, topology.num_workers)
        return cls(
            files=files,
            storage_timeout=arguments.require_timeout(given["storage_timeout"], "storage_timeout"),
            columns=columns,
            column_options=parse_column_options(
                arguments.require_choice(given["output_format"], "output_format", OUTPUT_FORMATS),
                *(given[name] for name in ("column_formats", "fill_nulls", "mask_nulls")),
            ),
            filters=filters,
            topology=replace(topology, sources=files.sources),
            process_group=ranks.process_group,
            ranks_are_assumed=ranks.are_assumed,
            adopts_num_workers=given["num_workers"] is None,
            plan=plan,
            strategy=given["split_strategy"],
            batch_size=batch_size,
            drop_last=arguments.require_flag(given["drop_last"], "drop_last"),
            row_id_column=given["row_id_column"],
            fingerprint=given["fingerprint"],
            read_ahead_bytes=arguments.parse_bytes(given["read_ahead_bytes"], "read_ahead_bytes"),
            memory_map=arguments.optional_flag(given["memory_map"], "memory_map"),
            collate_fn=given["collate_fn"],
            progress_interval_sec=_parse_progress(given, topology.rank),
            run_log=_parse_run_log(given),
            writes_run_log=_is_first(topology.rank),
            hooks=parse_hooks(given["hooks"]),
            torch_options=torch_options,
            transform=transform,
            packing=packing,
            count_tokens=given["count_tokens"],
            batching=batching,
        )

    @without_gc
    def open_files(self) -> Opened:
        """List the files and read their footers."""
        request = Request(
            self.columns,
            self.filters,
            self._refuses_nulls,
            self.storage_timeout,
            self.memory_map,
            self.row_id_column,
            self._forks,
            self._new_packing if self.packing is not None and self.files.is_mixture else None,
        )
        opened = self.files.open(request)
        if self.transform is not None:
            opened = with_transform(files_of(opened, "transform"), *self.transform, self.row_id_column)
        if self.packing is not None and not self.files.is_mixture:
            opened = self._packable(files_of(opened, "packing"), self.packing)
        return opened

    @property
    def _forks(self) -> bool:
        """Whether worker processes are forked from this one, and read what it has opened."""
        given = self.torch_options.get("multiprocessing_context")
        if not isinstance(given, str):  # to ask for the default would set it for good
            given = (given or multiprocessing).get_start_method(allow_none=True)
        return self.topology.num_workers > 0 and (given or multiprocessing.get_all_start_methods()[0]) == "fork"

    def _packable(self, files: OpenedFiles, packing: Packing) -> OpenedFiles:
        """Return files whose rows are packed, with their tokens counted if that is asked for."""
        if self.count_tokens is False:
            return replace(files, unknown_made=UNKNOWN_SEQUENCES)
        require_packable(packing, files.schema, ColumnTransform.of(files.schema, self.column_options).forms)
        manifest = self.files.manifest if isinstance(self.files, PathSet) else None
        return with_tokens(
            files,
            packing,
            self.count_tokens if isinstance(self.count_tokens, str) else None,
            known=None if manifest is None else parse_tokens(manifest),
            nulls_are_values=packing.column in self.column_options.fills,
        )

    def _new_packing(self, schema: pa.Schema) -> RowGroupPacking:
        """Return what packs the columns that all sources of a mixture deliver."""
        packing, documents = self.packing, ColumnTransform.of(schema, self.column_options)
        assert packing is not None  # noqa: S101 - the caller asks
        require_packable(packing, schema, documents.forms)
        return RowGroupPacking.of(packing, packing_text(packing), schema, documents)

    def _refuses_nulls(self, column: pa.Field) -> bool:
        """Whether nulls that a footer announces in a column are certain to be an error; a transform may fill them."""
        return self.transform is None and refuses_announced_nulls(column, self.column_options)

    def read_options(self, schema: pa.Schema) -> ReadOptions:
        """Return how rows of these columns become batches, or raise a ColumnError if what was chosen does not fit."""
        if self.packing is not None and self.files.is_mixture:
            return self._read_options(_of_sequences(schema, self.column_options.output_format))
        added: tuple[str | None, ...] = self.row_id_column, MARKS_COLUMN if self.fingerprint else None
        if self.transform is not None:  # its table has the row ids or leaves them out
            added = ()
        transform = ColumnTransform.of(schema, self.column_options, *added)
        if self.packing is not None:
            require_packable(self.packing, schema, transform.forms)
        if self.batching is not None:
            require_countable(self.batching, transform.schema)
        return self._read_options(transform)

    def _read_options(self, transform: ColumnTransform) -> ReadOptions:
        return ReadOptions(
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            transform=transform,
            row_id_column=self.row_id_column,
            row_shuffle_seed=self.plan.row_shuffle_seed,
            read_ahead_bytes=self.read_ahead_bytes,
            fingerprint=self.fingerprint,
            packing=self.packing,
            batching=self.batching,
        )


def _of_sequences(schema: pa.Schema, output_format: str) -> ColumnTransform:
    """Return what is delivered of sequences that are made of row groups."""
    transform = ColumnTransform.of(schema, ColumnOptions(output_format))
    columns = [column for column in transform.schema if column.name not in FACTS.names]
    return replace(transform, schema=pa.schema(columns))


def parse_filters(filters: Any) -> pc.Expression | None:
    """Return a filter as an expression: lists of conditions as `pyarrow.parquet.filters_to_expression` converts them.

    Raises:
        TypeError: If it is neither an expression nor such lists.
        ValueError: If a list is empty, or an operator or a value does not fit.
    """
    if filters is None or isinstance(filters, pc.Expression):
        return filters
    if not _is_list(filters) or not all(map(_is_list, filters)):
        raise TypeError(f"filters={filters!r}: {FILTERS_EXPECTED}")
    is_flat = any(isinstance(inner[0], str) for inner in filters if inner)
    alternatives = [filters] if is_flat else filters
    if not filters or not all(alternatives):
        raise ValueError(f"filters={filters!r} has an empty list: {FILTERS_EXPECTED}")
    checked = [[_parse_condition(condition) for condition in conditions] for conditions in alternatives]
    try:
        return pq.filters_to_expression(checked)
    except (TypeError, pa.ArrowException) as error:
        raise ValueError(f"filters={filters!r}: {error}") from None


def _parse_condition(condition: Any) -> Condition:
    match condition:
        case [str(column), operator, value]:
            pass
        case _:
            raise TypeError(f"filters holds {condition!r}: {FILTERS_EXPECTED}")
    if operator not in OPERATORS:
        raise ValueError(f"filters holds {condition!r}: expected one of the operators {', '.join(OPERATORS)}")
    if operator.endswith("in"):
        if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
            raise TypeError(f"filters holds {condition!r}: {operator!r} needs a list of values")
        value = _sorted(value) if isinstance(value, AbstractSet) else value
    return column, operator, value


def _sorted(values: Iterable[Any]) -> list[Any]:
    """Return a set's values in an order that is the same in every process: states record the filter's digest."""
    try:
        return sorted(values)
    except TypeError:
        return sorted(values, key=repr)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _parse_format(given: Mapping[str, Any]) -> Format:
    """Return the files' format, if it can do what other arguments need."""
    buffer_rows = arguments.optional_count(given["shuffle_buffer_size"], "shuffle_buffer_size")
    file_format = choose_format(
        arguments.require_choice(given["format"], "format", FORMATS),
        given["format_options"],
        count_rows=arguments.require_flag(given["count_rows"], "count_rows"),
        cutting=Cutting(arguments.parse_bytes(given["split_bytes"], "split_bytes"), buffer_rows),
        names_columns=given["columns"] is not None,
    )
    needing = {name: given[name] for name in ("row_id_column", "uneven_ranks", "virtual_ranks", "virtual_workers")}
    if arguments.require_choice(given["uneven_ranks"], "uneven_ranks", UNEVEN_RANKS) == "allow":
        del needing["uneven_ranks"]
    if arguments.require_flag(given["fingerprint"], "fingerprint"):
        needing["fingerprint"] = True
    if given["count_tokens"] is not False:
        needing["count_tokens"] = given["count_tokens"]
    if given["split_strategy"] is not None:
        needing["split_strategy with shuffle_buffer_size"] = buffer_rows
    require_known_rows(file_format, needing)
    return file_format


def _parse_ranks(given: Mapping[str, Any]) -> Ranks:
    """Return the ranks: those of the mesh, else as specified, else of the process group or of the environment."""
    num_ranks, rank, mesh = given["num_ranks"], given["rank"], given["mesh"]
    if mesh is None:
        found = arguments.resolve_rank(num_ranks, rank, world())
        return Ranks(*(found or (1, 0)), process_group=None, are_assumed=found is None)
    if num_ranks is not None or rank is not None:
        msg = f"num_ranks={num_ranks!r} and rank={rank!r} beside a mesh, which has both: give the mesh alone"
        raise ValueError(msg)
    return Ranks.of(mesh)


def _parse_batch_size(given: Mapping[str, Any], num_ranks: int) -> int:
    """Return the rows of a batch of each rank."""
    batch_size, global_batch_size = given["batch_size"], given["global_batch_size"]
    if global_batch_size is None:
        return DEFAULT_BATCH_SIZE if batch_size is None else arguments.require_count(batch_size, "batch_size")
    rows = arguments.require_count(global_batch_size, "global_batch_size")
    if batch_size is not None:
        msg = f"batch_size={batch_size!r} and global_batch_size={rows}: give one of them; batch_size is the rows of a "
        raise ValueError(msg + "rank's batch, global_batch_size those of all ranks together")
    if rows % num_ranks:
        msg = f"global_batch_size={rows} cannot be divided among {num_ranks} ranks: it needs to be a multiple of "
        raise ValueError(f"{msg}{num_ranks}")
    return rows // num_ranks


def _parse_topology(given: Mapping[str, Any], ranks: Ranks, batch_size: int, *, is_filtered: bool) -> Topology:
    workers = given["num_workers"]
    return arrange(
        num_ranks=ranks.num_ranks,
        rank=ranks.rank,
        num_workers=default_num_workers(ranks.num_ranks)
        if workers is None
        else arguments.require_count(workers, "num_workers", least=0),
        adopts_num_workers=workers is None,
        virtual_ranks=arguments.optional_count(given["virtual_ranks"], "virtual_ranks"),
        virtual_workers=arguments.optional_count(given["virtual_workers"], "virtual_workers"),
        batch_size=batch_size,
        uneven_ranks=arguments.require_choice(given["uneven_ranks"], "uneven_ranks", UNEVEN_RANKS),
        filtered=is_filtered,
    )


def _parse_plan(given: Mapping[str, Any], topology: Topology, batch_size: int, packing: Packing | None) -> PlanOptions:
    """Return what the plan depends on; it depends on the batch size only where ranks are balanced."""
    uneven_ranks = given["uneven_ranks"]
    return PlanOptions(
        split_bytes=arguments.parse_bytes(given["split_bytes"], "split_bytes"),
        split_rows=arguments.optional_count(given["split_rows"], "split_rows"),
        shuffle=arguments.require_flag(given["shuffle"], "shuffle"),
        shuffle_seed=arguments.require_count(given["shuffle_seed"], "shuffle_seed", least=None),
        shuffle_buffer_size=arguments.optional_count(given["shuffle_buffer_size"], "shuffle_buffer_size"),
        shuffle_interleave=arguments.require_count(given["shuffle_interleave"], "shuffle_interleave"),
        uneven_ranks=uneven_ranks,
        batch_size=None if uneven_ranks == "allow" else batch_size // topology.streams_per_turn,
        unit="sequences" if packing is not None else "rows" if given["transform"] is None else "transformed rows",
        is_open_ended=packing is not None or given["transform"] is not None,
        packing=None if packing is None else packing_text(packing),
    )


def _parse_progress(given: Mapping[str, Any], rank: int) -> float | None:
    """Return how often the progress bar is drawn, or None. Of all processes of a job, only the first shows one."""
    interval = arguments.require_seconds(given["progress_interval_sec"], "progress_interval_sec")
    if not arguments.require_flag(given["show_progress"], "show_progress"):
        return None
    require_tqdm()
    return interval if _is_first(rank) else None


def _is_first(rank: int) -> bool:
    """Whether this process is the first one of its job, and delivers the first rank."""
    _, process = world() or (1, 0)
    return rank == 0 and process == 0


def _parse_run_log(given: Mapping[str, Any]) -> RunLogFiles | None:
    """Return the directory of the run log. Storage options are for remote storages."""
    run_log = given["run_log"]
    if run_log is None:
        return None
    if not isinstance(run_log, (str, os.PathLike)):
        raise TypeError(f"run_log={run_log!r:.80} is {type(run_log).__name__}, expected the path or URL of a directory")
    options = given["storage_options"] if "://" in os.fspath(run_log) else None
    return RunLogFiles.at(run_log, options, arguments.require_timeout(given["storage_timeout"], "storage_timeout"))


def _try_torch_options(options: Mapping[str, Any], num_workers: int) -> None:
    """Let torch check its own options. A DataLoader of no data starts no process; one worker is enough to check."""
    arguments.refuse_torch_options(options, num_workers)
    arguments.require_callable(options.get("worker_init_fn"), "worker_init_fn")
    DataLoader((), batch_size=None, num_workers=min(1, num_workers), **options)  # type: ignore[arg-type]
