"""StructuredDataset: the public face that ties the layers together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import torch.distributed as dist  # noqa: TID251 - asked for size and rank, nothing else
from torch.utils.data import get_worker_info

from torch_dataloader_utils.checkpoint.merge import ON_CHANGED_FILES
from torch_dataloader_utils.columns.convert import OUTPUT_FORMATS, OutputFormat
from torch_dataloader_utils.columns.options import ColumnFormat, parse_column_options
from torch_dataloader_utils.columns.transform import ColumnTransform, refuses_announced_nulls
from torch_dataloader_utils.dataset.base import BatchDataset
from torch_dataloader_utils.dataset.discovery import check_columns
from torch_dataloader_utils.dataset.file_set import FileSet, PathSet
from torch_dataloader_utils.dataset.manifest_file import dump_manifest
from torch_dataloader_utils.dataset.partitions import Partitioning, require_partitioning
from torch_dataloader_utils.errors import ProgressUnknownError
from torch_dataloader_utils.formats.base import KnownFooters
from torch_dataloader_utils.formats.registry import FORMATS, FormatName, choose_format, require_known_rows
from torch_dataloader_utils.formats.text.footer import Cutting
from torch_dataloader_utils.loader.arguments import (
    PathLike,
    optional_count,
    parse_bytes,
    parse_columns,
    parse_paths,
    require_callable,
    require_choice,
    require_count,
    require_flag,
    require_options,
    require_seconds,
    resolve_rank,
)
from torch_dataloader_utils.loader.data_loader import StructuredDataLoader
from torch_dataloader_utils.loader.epoch import EpochState
from torch_dataloader_utils.loader.metrics import Metrics
from torch_dataloader_utils.planning.plan import UNEVEN_RANKS, PlanOptions, UnevenRanks
from torch_dataloader_utils.planning.strategy import SplitStrategy, require_strategy
from torch_dataloader_utils.planning.topology import arrange
from torch_dataloader_utils.reading.scan import ReadOptions
from torch_dataloader_utils.workers.cpus import default_num_workers

__all__ = ["StructuredDataset"]


class StructuredDataset(BatchDataset):
    """Batches of a dataset's rows, for one rank, with progress that is exact to the row.

    `create_dataloader` makes it together with its loader, and takes and documents the same parameters. Iterating over
    the dataset itself, in this process, delivers the same batches as its loader does, counted alike. In a plain
    ``torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=n)`` it delivers each row of the rank once;
    with workers the progress is not known there, and `state_dict` says so.
    """

    @classmethod
    def create_dataloader(
        cls,
        path: PathLike | Sequence[PathLike] | FileSet,
        format: FormatName = "parquet",  # noqa: A002 - the name that readers of data use
        *,
        format_options: Mapping[str, Any] | None = None,
        count_rows: bool = False,
        batch_size: int = 1024,
        drop_last: bool = False,
        columns: Sequence[str] | None = None,
        filters: pc.Expression | None = None,
        shuffle: bool = False,
        shuffle_seed: int = 42,
        shuffle_buffer_size: int | None = None,
        shuffle_interleave: int = 8,
        split_bytes: int | str = "128MiB",
        split_rows: int | None = None,
        split_strategy: SplitStrategy | None = None,
        read_ahead_bytes: int | str = "128MiB",
        num_workers: int | None = None,
        num_ranks: int | None = None,
        rank: int | None = None,
        output_format: OutputFormat = "torch",
        column_formats: Mapping[str, ColumnFormat] | None = None,
        fill_nulls: Mapping[str, Any] | None = None,
        mask_nulls: Sequence[str] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        partitioning: Partitioning | None = None,
        manifest: bytes | None = None,
        row_id_column: str | None = None,
        uneven_ranks: UnevenRanks = "allow",
        virtual_ranks: int | None = None,
        virtual_workers: int | None = None,
        show_progress: bool = False,
        progress_interval_sec: float = 1.0,
        **dataloader_kwargs: Any,
    ) -> tuple[StructuredDataLoader, StructuredDataset]:
        """Open a dataset and make the loader of this rank's batches.

        Every footer is read once, here, or the file `_metadata` instead where a directory has one. Nothing calls
        ``torch.distributed``; an initialised process group is only asked for its size and rank.

        Args:
            path: A file, a directory (searched in depth), a glob, or a list of them; any URL that fsspec knows.
                In directories and globs hidden files, names that begin with an underscore and other endings than the
                format's are passed over; a file named in full is taken as it is.
            format: The file format: ``"parquet"`` (.parquet, .parq, .pq); ``"orc"`` (.orc); ``"csv"`` (.csv);
                ``"jsonl"`` or ``"json"``, which is an object a line either way (.jsonl, .ndjson, .json). Text may be
                compressed by gzip or zstd (.gz, .zst behind that).
            format_options: What pyarrow's parser is told, by the names of its options: for ``"csv"`` those of
                ``pyarrow.csv.ReadOptions``, ``ParseOptions`` and ``ConvertOptions``, such as ``delimiter`` or
                ``column_types``; for ``"jsonl"`` those of ``pyarrow.json.ReadOptions`` and ``ParseOptions``, such as
                ``explicit_schema``.
            count_rows: Whether to read text files through once, here, and count their rows. They do not tell: without
                it ``len(loader)``, `row_id_column`, `uneven_ranks` and `virtual_ranks` are refused, and a shard under
                way is read from its beginning when a state is resumed.
            batch_size: Rows in a batch. Batches span row groups, files and shards; only the last batch of a worker's
                stream is shorter.
            drop_last: Whether to leave that short batch out. The rows are counted as ``rows_dropped``.
            columns: Columns to deliver, in this order; None for all.
            filters: Which rows to deliver: files are ruled out by their partition columns, row groups by their
                statistics, then rows are looked at. May use columns outside `columns`. A filter that may keep NaN, such
                as ``pc.field("x") != 1`` of floats, rules out no row group by that column: statistics leave NaN out.
            shuffle: Whether shards come in an order drawn anew for each epoch.
            shuffle_seed: Seed of every random choice; seed and epoch together decide.
            shuffle_buffer_size: Number of rows, at most, that are read together and mixed, drawn from row groups all
                over the dataset; None shuffles shards and leaves rows in file order. Needs ``shuffle=True``. A stream
                (each worker, or this process) holds two such shards in memory.
            shuffle_interleave: Where row groups are larger than that (or than `split_bytes`), how many of them, at
                most, are read side by side: the buffer is filled with the next rows of each.
            split_bytes: Uncompressed bytes of a shard, at most, unless a single row group has more: an integer or a
                text such as ``"128MiB"``. Lowered where streams would get too few shards.
            split_rows: Rows of a shard, at most, unless a single row group has more.
            split_strategy: An object whose method ``shards(manifest, epoch)`` returns the epoch's shards, in order: see
                `SplitStrategy`. Checked before use: every row is in exactly one shard. It decides what shards there are
                and their order; with `shuffle_buffer_size` the rows within each are mixed.
            read_ahead_bytes: Decoded bytes that a stream (each worker, or this process) holds at most, those of the
                batches that it is delivering included: an integer or a text. A row group that has more than half of
                that is read in slices. A shard of mixed rows may have more; then the next one is not read ahead.
            num_workers: Number of worker processes; 0 reads in this process; None takes the CPUs of this rank's share
                less one, and a loaded state's number.
            num_ranks: Number of ranks; None asks the process group, else ``WORLD_SIZE``, else is 1.
            rank: This rank; None asks the process group, else ``RANK``, else is 0.
            output_format: What a batch is: ``"torch"`` or ``"numpy"``, a dictionary of column names to tensors or
                arrays of shape ``(rows,)``, or ``(rows, size, ...)`` for fixed-size lists, in the column's own dtype;
                dates and times as int64 in the column's unit or as NumPy's; lists of numbers as jagged nested tensors
                or as lists of arrays; and all else as Python lists. ``"dict"``, a dictionary of Python lists;
                ``"arrow"``, a ``pyarrow.Table``. The guide to types has a table of them.
            column_formats: How columns are delivered that are wanted otherwise than their type says: ``"list"``, Python
                lists; ``"padded"`` or ``Padded(value, length)``, lists padded to one length; ``"packed"``, strings and
                binary as `PackedBytes`; ``"float64"`` or ``"int64"`` (the digits without the point), decimals;
                ``Codes(vocabulary)``, strings and integers as their places in a vocabulary.
            fill_nulls: What stands for null in columns, by name; in lists, for each null value inside, and a null list
                becomes empty.
            mask_nulls: Columns that are followed by one of booleans, named ``<column>_is_null``, True where a null is.
                Integers and booleans are then 0 and False there, lists and packed bytes empty.
            collate_fn: Called with each batch, in the worker; what it returns is delivered.
            storage_options: fsspec's options for the storage, credentials included. They appear in no state,
                message or log.
            partitioning: How the directories below the path stand for columns: ``"hive"`` for names such as
                ``day=2024-02-29``, or a ``pyarrow.dataset.Partitioning``. With ``"hive"`` a column is of integers,
                dates or texts, whichever all its values in the dataset fit; names and values are URL-decoded, and
                ``__HIVE_DEFAULT_PARTITION__`` is null. None takes no columns from paths.
            manifest: What `dump_manifest` of a dataset at the same path returned, so that nothing is listed and no
                footer is read: one rank does it for all, or one run for the next. A file that has changed since is an
                error when it is read; one of which a filter rules out all, by what the manifest says, is not looked at.
            row_id_column: Name of an int64 column to add: a row's place among all rows of all files, sorted by path,
                from 0, filtered rows included.
            uneven_ranks: What becomes of rows that do not divide evenly over ranks. ``"allow"``: ranks may make
                different numbers of steps. ``"drop"`` and ``"pad"``: every rank makes the same steps with the same
                batch sizes, short only at its end; fewer rows than there are ranks are left out, or delivered twice.
                `get_metrics` and the log (``torch_dataloader_utils``, INFO) say which.
            virtual_ranks: Together with `virtual_workers` a grid that the epoch is planned for, whatever ranks and
                workers there are: a multiple of the ranks. The rows of a step, over all ranks in order, are then the
                same under every number of ranks and workers that divides the grid, as long as `batch_size` times
                ranks is. Needs `uneven_ranks` of ``"drop"`` or ``"pad"``, whose counts refer to the grid's ranks.
            virtual_workers: The grid's workers for each of its ranks: a multiple of the workers.
            show_progress: Whether to write a line about the progress to standard error now and then.
            progress_interval_sec: Seconds between two such lines.
            **dataloader_kwargs: For ``torch.utils.data.DataLoader``: ``pin_memory``, ``prefetch_factor``,
                ``persistent_workers`` (here True unless told otherwise), ``multiprocessing_context``, ``timeout``,
                ``worker_init_fn``, ``generator``. What torch prefetches are messages of up to 64 batches and about
                8 MiB.

        Returns:
            The loader and the dataset. Both have `state_dict` and `load_state_dict`.

        Raises:
            FileNotFoundError: If the path stands for no file.
            UnreadableFileError: If a footer cannot be read.
            ColumnError: If a column of `columns`, `filters` or another parameter does not exist, has types in different
                files that cannot be unified, does not fit the filter or what was chosen for it, or has nulls that
                tensors and arrays cannot hold, as far as footers tell; else it is raised where they are read.
            ValueError: If an argument's value makes no sense.
            TypeError: If an argument has the wrong type.
        """
        require_choice(format, "format", FORMATS)
        require_choice(output_format, "output_format", OUTPUT_FORMATS)
        wanted = parse_columns(columns, row_id_column)
        choices = parse_column_options(output_format, column_formats, fill_nulls, mask_nulls)
        require_callable(collate_fn, "collate_fn")
        require_options(storage_options, "storage_options")
        if isinstance(path, FileSet):
            files = path
        else:
            file_format = choose_format(
                format,
                format_options,
                count_rows=require_flag(count_rows, "count_rows"),
                cutting=Cutting(
                    parse_bytes(split_bytes, "split_bytes"), optional_count(shuffle_buffer_size, "shuffle_buffer_size")
                ),
                names_columns=columns is not None,
            )
            needing = {
                "row_id_column": row_id_column,
                "uneven_ranks": None if uneven_ranks == "allow" else uneven_ranks,
                "virtual_ranks": virtual_ranks,
                "virtual_workers": virtual_workers,
                "split_strategy with shuffle_buffer_size": None if split_strategy is None else shuffle_buffer_size,
            }
            require_known_rows(file_format, needing)
            files = PathSet(
                parse_paths(path), file_format, storage_options, require_partitioning(partitioning), manifest
            )
        if filters is not None and not isinstance(filters, pc.Expression):
            msg = f"filters={filters!r}: expected a pyarrow.compute.Expression such as pc.field('x') > 3"
            raise TypeError(msg)
        batch_size = require_count(batch_size, "batch_size")
        num_ranks, rank = resolve_rank(num_ranks, rank, _process_group())
        topology = arrange(
            num_ranks=num_ranks,
            rank=rank,
            num_workers=default_num_workers()
            if num_workers is None
            else require_count(num_workers, "num_workers", least=0),
            adopts_num_workers=num_workers is None,
            virtual_ranks=optional_count(virtual_ranks, "virtual_ranks"),
            virtual_workers=optional_count(virtual_workers, "virtual_workers"),
            batch_size=batch_size,
            uneven_ranks=require_choice(uneven_ranks, "uneven_ranks", UNEVEN_RANKS),
            filtered=filters is not None,
        )
        plan_options = PlanOptions(
            split_bytes=parse_bytes(split_bytes, "split_bytes"),
            split_rows=optional_count(split_rows, "split_rows"),
            shuffle=require_flag(shuffle, "shuffle"),
            shuffle_seed=require_count(shuffle_seed, "shuffle_seed", least=None),
            shuffle_buffer_size=optional_count(shuffle_buffer_size, "shuffle_buffer_size"),
            shuffle_interleave=require_count(shuffle_interleave, "shuffle_interleave"),
            uneven_ranks=uneven_ranks,
            batch_size=None if uneven_ranks == "allow" else batch_size // topology.streams_per_turn,
        )
        drop_last, read_ahead = require_flag(drop_last, "drop_last"), parse_bytes(read_ahead_bytes, "read_ahead_bytes")
        if split_strategy is not None:
            require_strategy(split_strategy, plan_options)
        interval = require_seconds(progress_interval_sec, "progress_interval_sec")
        opened_files = files.open(
            columns=wanted,
            filters=filters,
            refuses_nulls=partial(refuses_announced_nulls, options=choices),
        )
        read_options = ReadOptions(
            batch_size=batch_size,
            drop_last=drop_last,
            transform=ColumnTransform.of(opened_files.schema, choices, row_id_column),
            row_id_column=row_id_column,
            row_shuffle_seed=plan_options.row_shuffle_seed,
            read_ahead_bytes=read_ahead,
        )
        check_columns(opened_files, read_options)
        epoch_state = EpochState(
            opened_files,
            plan_options,
            read_options,
            strategy=split_strategy,
            topology=topology,
            adopts_num_workers=num_workers is None,
            progress_interval_sec=interval if show_progress else None,
        )
        dataset = cls(opened_files, epoch_state, read_options, collate_fn, plan_options.shuffle_seed)
        return StructuredDataLoader(dataset, **dataloader_kwargs), dataset

    # What users call -------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration delivers, or continues."""
        return self._epoch_state.epoch

    @property
    def num_workers(self) -> int:
        """Number of worker processes; 0 means this process."""
        return self._epoch_state.topology.num_workers

    @property
    def num_ranks(self) -> int:
        """Number of ranks that share the rows."""
        return self._epoch_state.topology.num_ranks

    @property
    def rank(self) -> int:
        """This rank."""
        return self._epoch_state.topology.rank

    @property
    def schema(self) -> pa.Schema:
        """The columns of a batch and their Arrow types, the row id column apart."""
        return self._schema

    @property
    def num_batches(self) -> int:
        """The epoch's number of batches for this rank, also when it is continued from a state.

        Raises:
            TypeError: If a filter makes it unknowable.
        """
        return self._epoch_state.num_batches

    @property
    def plan_digest(self) -> str:
        """Digest of this epoch's plan and all that decides its batches; equal on ranks with the same files and options.

        Beside the plan it covers the files' content (as far as footers tell), the filter, the seed and the batch size.
        """
        return self._epoch_state.plan_digest

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: later iterations deliver it, and the progress of the epoch before is cleared.

        If it is the current epoch and no batch of it was delivered since it began, nothing changes: a loaded state
        still waits for its iteration, and an iterator that has begun goes on. So a training loop may call `set_epoch`
        at the top of every epoch, including the resumed one. Otherwise the epoch begins again.

        Args:
            epoch: The epoch, from 0.
        """
        self._epoch_state.set_epoch(require_count(epoch, "epoch", least=0))

    def state_dict(self) -> dict[str, Any]:
        """Return the progress as plain values: what has been handed over, to the row. Changes nothing.

        Returns:
            A dictionary of strings, numbers, lists and dictionaries; it survives JSON and
            ``torch.load(..., weights_only=True)`` and holds no credentials.

        Raises:
            ProgressUnknownError: If a plain DataLoader's workers delivered batches, which cannot be counted here.
        """
        if get_worker_info() is None and self._epoch_state.copies.have_delivered:
            msg = (
                "the progress is not known: worker processes of a plain DataLoader deliver batches without telling "
                "this process; use the loader that create_dataloader returns, or num_workers=0"
            )
            raise ProgressUnknownError(msg)
        return self._epoch_state.state_dict()

    def load_state_dict(
        self, state: Any, *, strict: bool = True, on_changed_files: Literal["error", "continue"] = "error"
    ) -> None:
        """Take over a state: its epoch and its progress. The next iteration continues there, once.

        Args:
            state: What `state_dict` returned, of this rank; or a list of all ranks' states, in any order.
            strict: Whether the run must be the one that saved the state, so that the very batches follow that were to
                come. If not, ranks, workers, grid, `uneven_ranks` and `batch_size` may be others: all ranks' states
                are merged, and what is left of the epoch is planned anew, each row of it once. All ranks have to load
                the same states.
            on_changed_files: What becomes of files that have changed, where `strict` is False. ``"error"`` refuses
                the state. With ``"continue"`` files that are as they were keep their progress, new ones are added to
                what is left, and of those that are gone or were written anew nothing more is delivered in this epoch;
                a `LostRowsWarning` names them and how many rows of them are lost.

        Raises:
            CheckpointMismatchError: If the state was saved under another plan; nothing has changed then.
            RankMismatchError: If states of several ranks are needed and are not there, or do not fit together.
            ValueError: If it is no such state; nothing has changed then.
        """
        require_choice(on_changed_files, "on_changed_files", ON_CHANGED_FILES)
        strict = require_flag(strict, "strict")
        self._epoch_state.load_state_dict(state, strict=strict, on_changed_files=on_changed_files)

    def dump_manifest(self) -> bytes:
        """Return the files and their footers, for `create_dataloader` of another rank or a later run.

        Returns:
            Bytes to keep in a file or to send (``broadcast_object_list``). They hold no credentials.

        Raises:
            ValueError: If a file's URL has a query or a user's name in it, without which it would not be found; or if
                the dataset is a table, which says more of its files than they do themselves.
        """
        opened_files = self._opened_files
        if opened_files.pin:
            pinned = ", ".join(f"{name}={value}" for name, value in opened_files.pin.items())
            msg = f"a table's files are no dataset without the table: open it with {pinned} instead of a manifest"
            raise ValueError(msg)
        known = KnownFooters(opened_files.footers, opened_files.metadata_file)
        return dump_manifest(opened_files.manifest.root, tuple(opened_files.files.values()), known)

    def get_metrics(self) -> dict[str, Any]:
        """Return counters of the newest iteration in this process.

        Returns:
            ``epoch``; ``batches_delivered`` and ``rows_delivered`` since the iteration began; ``rows_dropped`` by
            `drop_last`; ``row_groups_pruned`` and ``bytes_pruned``, for all ranks: what the filter ruled out before
            anything was read, in row groups and their uncompressed bytes over all columns; ``bytes_read``, the
            compressed bytes of the row groups read, and ``bytes_read_again``, those of them in row groups that hold
            rows delivered before a resume. With `uneven_ranks` also
            ``uneven_rows_dropped`` and ``uneven_rows_repeated``, of all ranks: a list of rows, each as the path of its
            file under the root and its place there, from 0.
        """
        iteration = self._epoch_state.iteration
        counters: dict[str, Any] = {"epoch": self.epoch, **asdict(iteration.metrics if iteration else Metrics())}
        counters |= dict(zip(("row_groups_pruned", "bytes_pruned"), self._opened_files.pruned, strict=True))
        return counters | {f"uneven_rows_{verb}": rows for verb, rows in self._epoch_state.balanced_rows().items()}


def _process_group() -> tuple[int, int] | None:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return None
