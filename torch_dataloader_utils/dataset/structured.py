"""`StructuredDataset`: how users make a dataset and its loader, and what they call on it."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import pyarrow as pa
from torch.utils.data import get_worker_info

from torch_dataloader_utils.checkpoint.merge.states import ON_CHANGED_FILES
from torch_dataloader_utils.checkpoint.parse.states import MOST_EPOCHS
from torch_dataloader_utils.columns.convert import OutputFormat
from torch_dataloader_utils.columns.options import ColumnFormat, Packing
from torch_dataloader_utils.dataset.discovery import check_columns
from torch_dataloader_utils.dataset.excluding import ExcludingDataset
from torch_dataloader_utils.dataset.file_set import FileSet
from torch_dataloader_utils.dataset.manifest_file import dump_opened
from torch_dataloader_utils.dataset.options import Filters, LoaderOptions
from torch_dataloader_utils.dataset.partitions import Partitioning
from torch_dataloader_utils.dataset.ranks import Mesh
from torch_dataloader_utils.errors import ProgressUnknownError
from torch_dataloader_utils.formats.opened_files import files_of
from torch_dataloader_utils.formats.registry import FormatName
from torch_dataloader_utils.formats.row_transform import Transform
from torch_dataloader_utils.loader.arguments import PathLike, require_choice, require_count, require_flag
from torch_dataloader_utils.loader.data_loader import DIVIDED_AGAIN, StructuredDataLoader
from torch_dataloader_utils.loader.epoch import EpochState
from torch_dataloader_utils.loader.events import Hook, Hooks
from torch_dataloader_utils.planning.plan import UnevenRanks
from torch_dataloader_utils.planning.strategy import SplitStrategy
from torch_dataloader_utils.planning.token_budget import TokenBudget
from torch_dataloader_utils.storage.attempts import DEFAULT_TIMEOUT_SEC


class StructuredDataset(ExcludingDataset):
    """Batches of a dataset's rows, for one rank. Its progress is exact to the row.

    `create_dataloader` makes the dataset together with its loader, and documents all parameters. Iterating over the
    dataset itself reads in this process. It delivers the same batches as the loader, and counts them in the same way.
    In a plain ``torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=n)`` the dataset delivers each row of
    the rank once. With workers the training process cannot count those batches, and `state_dict` raises an error.

    ``len(dataset)`` is the number of batches, as `num_batches` is.
    """

    @classmethod
    def create_dataloader(
        cls,
        path: PathLike | Sequence[PathLike] | FileSet,
        format: FormatName = "parquet",  # noqa: A002 - the name that pyarrow, polars and Spark use
        *,
        format_options: Mapping[str, Any] | None = None,
        count_rows: bool = False,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        drop_last: bool = False,
        columns: Sequence[str] | None = None,
        filters: Filters | None = None,
        transform: Transform | None = None,
        transform_id: str | None = None,
        shuffle: bool = False,
        shuffle_seed: int = 42,
        shuffle_buffer_size: int | None = None,
        shuffle_interleave: int = 8,
        split_bytes: int | str = "128MiB",
        split_rows: int | None = None,
        split_strategy: SplitStrategy | None = None,
        read_ahead_bytes: int | str = "128MiB",
        memory_map: bool | None = None,
        num_workers: int | None = None,
        num_ranks: int | None = None,
        rank: int | None = None,
        mesh: Mesh | None = None,
        output_format: OutputFormat = "torch",
        column_formats: Mapping[str, ColumnFormat] | None = None,
        fill_nulls: Mapping[str, Any] | None = None,
        mask_nulls: Sequence[str] | None = None,
        packing: Packing | None = None,
        count_tokens: bool | str = False,
        batching: TokenBudget | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        storage_timeout: float = DEFAULT_TIMEOUT_SEC,
        partitioning: Partitioning | None = None,
        manifest: bytes | None = None,
        row_id_column: str | None = None,
        fingerprint: bool = False,
        uneven_ranks: UnevenRanks = "allow",
        virtual_ranks: int | None = None,
        virtual_workers: int | None = None,
        show_progress: bool = False,
        progress_interval_sec: float = 1.0,
        run_log: str | os.PathLike[str] | None = None,
        hooks: Sequence[Hook] = (),
        **dataloader_kwargs: Any,
    ) -> tuple[StructuredDataLoader, StructuredDataset]:
        """Open a dataset and make the loader of this rank's batches.

        All arguments are checked first. Then every footer is read once, or the file `_metadata` instead where a
        directory has one. This method communicates with no other rank: of an initialised process group it only reads
        the size and the rank.

        Args:
            path: A file, a directory (searched in depth), a glob, or a list of them; any URL that fsspec supports.
                In directories and globs, hidden files, names that begin with an underscore and files without a suffix
                of the format are skipped. A file whose full path is given is always read.
            format: The file format: ``"parquet"`` (.parquet, .parq, .pq); ``"orc"`` (.orc); ``"csv"`` (.csv);
                ``"jsonl"`` or ``"json"``, both of which mean one object per line (.jsonl, .ndjson, .json). Text may be
                compressed with gzip or zstd (another suffix, .gz or .zst).
            format_options: Options of pyarrow's parser, by pyarrow's names. For ``"csv"``: those of
                ``pyarrow.csv.ReadOptions``, ``ParseOptions`` and ``ConvertOptions``, such as ``delimiter`` or
                ``column_types``. For ``"jsonl"``: those of ``pyarrow.json.ReadOptions`` and ``ParseOptions``, such as
                ``explicit_schema``. For ``"parquet"``: ``page_checksum_verification``, True by default; pages that have
                no checksum are not verified.
            count_rows: Whether to read all text files once, in this call, and count their rows: text has no footer
                with that number. Without it ``len(loader)``, `row_id_column`, `uneven_ranks`, `virtual_ranks` and
                `fingerprint` are refused, and a resumed run reads an unfinished shard again from its beginning.
            batch_size: Rows in a batch; None for 1024. Batches span row groups, files and shards; only the last batch
                of a worker's stream is shorter.
            global_batch_size: Rows in the batches of all ranks together, a multiple of the number of ranks, in place of
                `batch_size`. It stays the same where a state is loaded by another number of ranks.
            drop_last: Whether to leave out that short batch. Its rows are counted as ``rows_dropped``.
            columns: Columns to deliver, in this order; None for all.
            filters: Which rows to deliver: a ``pyarrow.compute.Expression``, or pyarrow's lists of tuples such as
                ``[("x", ">", 3), ("y", "in", ["a", "b"])]`` (every condition holds) or a list of such lists (all
                conditions of one list hold), with the operators of ``pyarrow.parquet.read_table``. Partition columns
                rule out files, statistics rule out row groups, and then each remaining row is tested. A filter may use
                columns outside `columns`. A filter that may keep NaN, such as ``pc.field("x") != 1`` of floats, rules
                out no row group by that column, because statistics leave out NaN.
            transform: A function that is called with rows as a ``pyarrow.Table``, in the worker, and returns the table
                that is delivered in their place: changed rows, fewer or more. The rows are what the filter leaves of a
                row group, or of any part of one, so it has to make the same rows in the same order however these are
                cut, and each time.
                Its table has the columns of `columns`, and last that of `row_id_column`. It is called once in this
                call, with no rows, to learn the columns that it returns: `column_formats`, `fill_nulls` and
                `mask_nulls` name those. As with a filter, only reading tells how many rows there are, so ``len``,
                `uneven_ranks`, a virtual topology, `fingerprint`, `exclude` and the ledger are refused, and a resumed
                run reads an unfinished shard again from its beginning. It may run in another thread than this one.
                Workers that are not forked (`multiprocessing_context`) get it pickled, as they get `collate_fn`.
            transform_id: What you call this transform, such as ``"tokenise, vocabulary 3"``. States record it, and load
                only where it is the same: change it with what the function does.
            shuffle: Whether to shuffle the order of shards, differently in each epoch.
            shuffle_seed: Seed of every random choice; seed and epoch together determine the order.
            shuffle_buffer_size: Number of rows, at most, that are read together and shuffled. They come from row groups
                of the whole dataset. None shuffles shards and leaves rows in file order. Needs ``shuffle=True``. A
                stream (each worker, or this process) holds two such shards in memory.
            shuffle_interleave: Where row groups are larger than the buffer (or than `split_bytes`), the number of row
                groups, at most, that are read at the same time. The buffer is filled with the next rows of each.
            split_bytes: Uncompressed bytes of a shard, at most, unless a single row group has more: an integer or a
                string such as ``"128MiB"``. A smaller size is used where streams would get too few shards.
            split_rows: Rows of a shard, at most, unless a single row group has more.
            split_strategy: An object whose method ``shards(manifest, epoch)`` returns the epoch's shards, in order: see
                `SplitStrategy`. Its result is checked: every row is in exactly one shard. With `shuffle_buffer_size`
                the rows within each shard are shuffled.
            read_ahead_bytes: Decoded bytes that a stream (each worker, or this process) holds, at most, including the
                batches that it is delivering: an integer or a string. A row group of more than four ninths of it is
                read in parts. While text is decoded, it takes up to a quarter more. A shard of shuffled rows may be
                larger; then the next one is not read ahead.
            memory_map: Whether local files are mapped into memory, which is fastest, or read. A mapped file that is cut
                short, or that a network file system fails to read, kills the process that reads it; a file that is
                read raises an `UnreadableFileError`. None maps files on a file system of this machine, such as ext4,
                xfs or tmpfs, and reads all others, such as NFS, Lustre or FUSE. Other storages are never mapped.
            num_workers: Number of worker processes; 0 reads in this process. None uses the CPUs less one on a single
                rank, and 1 on several, whose machines may differ; it adopts the number of a loaded state.
            num_ranks: Number of ranks; None uses the process group's, else ``WORLD_SIZE`` if ``RANK`` is set too, else
                1. Then each iteration makes sure that there are not several processes by now.
            rank: This rank; None uses the process group's, else ``RANK`` if ``WORLD_SIZE`` is set too, else 0.
            mesh: The part of a ``torch.distributed.device_mesh.DeviceMesh`` whose processes share the rows, such as
                ``mesh["dp"]`` or ``mesh["dp_replicate", "dp_shard"]``, in place of `num_ranks` and `rank`. The ranks
                are its processes in row-major order. Processes that differ in other dimensions only, such as those of
                tensor parallelism, deliver the same batches.
            output_format: What a batch is. ``"torch"`` or ``"numpy"``: a dictionary of column names to tensors or
                arrays of shape ``(rows,)``, or ``(rows, size, ...)`` for fixed-size lists, in the column's own dtype.
                Dates and times are int64 in the column's unit, or NumPy's types. Lists of numbers are jagged nested
                tensors, or lists of arrays. All other columns are Python lists. ``"dict"``: a dictionary of Python
                lists. ``"arrow"``: a ``pyarrow.Table``. The guide to types has a table of all types.
            column_formats: How to deliver columns differently from their type's default: ``"list"``, Python lists;
                ``"padded"`` or ``Padded(value, length)``, lists padded to one length; ``"packed"``, strings and
                binary as `PackedBytes`; ``"float64"`` or ``"int64"`` (the unscaled digits), decimals;
                ``Codes(vocabulary)``, strings and integers as their positions in a vocabulary.
            fill_nulls: Values that replace nulls, by column. In a list column the value replaces each null element, and
                a null list becomes empty.
            mask_nulls: Columns after each of which a boolean column ``<column>_is_null`` is delivered. Where it is
                True, integers are 0, booleans are False, and lists and packed bytes are empty.
            packing: How documents, which are lists of tokens, become sequences of one length: see `Packing`. A batch
                then has `batch_size` sequences of shape ``(batch_size, length)``, and as asked their ``document_ids``,
                ``position_ids``, ``cu_seqlens`` and ``max_seqlen``. What is made of each shard is a function of its
                rows alone, so resumes are exact. `row_id_column` and `fingerprint` are refused; so are
                ``len(loader)``, `uneven_ranks` and `virtual_ranks` unless `count_tokens` counts the sequences ahead.
            count_tokens: Whether to count the tokens of the documents that `packing` packs, in this call: True, or the
                name of a column of integers that says how many tokens each document has. The sums of tokens of row
                groups are taken from footers where these tell them exactly; else that column is read, or without one
                the documents, once: `dump_manifest` keeps what was counted. ``"best_fit"``, and documents that are not
                split, need the length of each document: 4 bytes of memory for each. `filters` and `transform` are
                refused beside it.
            batching: Batches by tokens in place of rows: see `TokenBudget`. A batch has as many whole rows as fit. That
                depends on where it begins and on the rows behind it, so resumes are exact. How many batches there are
                is known when all is read: ``len(loader)``, `uneven_ranks` and `virtual_ranks` are refused. So are
                `batch_size`, `global_batch_size`, `drop_last` and `packing` beside it.
            collate_fn: Called with each batch, in the worker. Its result is delivered.
            storage_options: fsspec's options for the storage, credentials included. They appear in no state,
                message or log.
            storage_timeout: Seconds that each operation of the storage may take, with all its attempts: listing a
                directory, opening a file, reading a footer or a range. An operation that fails is tried again after
                growing pauses; one without an answer is given up and tried again after half of the time. After 10
                seconds of failure a `StorageRetryWarning` names the file and the cause. Local files, too, are tried
                again where the system reports an error that may pass, such as ESTALE; waiting for them is not bounded.
            partitioning: Which directories become columns: ``"hive"`` for names such as ``day=2024-02-29``, or a
                ``pyarrow.dataset.Partitioning``; None for none. With ``"hive"``, as in pyarrow and polars, the
                directories below a given directory become columns, and not those in its own path; of a given file or
                glob all directories in the given path do. A column's type is integer or date if all its values in the
                dataset fit, else string. Names and values are URL-decoded, and ``__HIVE_DEFAULT_PARTITION__`` is null.
            manifest: The result of `dump_manifest` of a dataset with the same path. Then nothing is listed and no
                footer is read: one rank does it for all, or one run for the next. A file that has changed since raises
                an error when it is read. A file is not accessed if a filter rules it out by what the manifest holds.
            row_id_column: Name of an int64 column to add: a row's number among all rows of all files, sorted by path,
                from 0, filtered rows included.
            fingerprint: Whether to hash which rows were delivered, and in which order: `get_metrics` and `state_dict`
                then have ``delivered_hash``. Two runs that delivered the same rows of the same files in the same order
                have the same one, whatever their batch sizes are. With `virtual_ranks` there is one for each virtual
                rank, which is the same under every number of ranks.
            uneven_ranks: How to handle rows that do not divide evenly over ranks. ``"allow"``: ranks may make different
                numbers of steps. ``"drop"`` and ``"pad"``: every rank makes the same steps with the same batch sizes,
                and only the last step is shorter. Fewer rows than there are ranks are left out, or delivered twice.
                `get_metrics` and the log (``torch_dataloader_utils``, INFO) name them.
            virtual_ranks: The ranks of a virtual topology, which the epoch is planned for whatever the real topology
                is: a multiple of the real ranks. Needs `virtual_workers`. The rows of a step, over all ranks in order,
                are then the same under every number of ranks and workers that divides the virtual ones, if `batch_size`
                times ranks stays the same. Needs `uneven_ranks` of ``"drop"`` or ``"pad"``, whose counts then refer to
                virtual ranks.
            virtual_workers: The workers of each virtual rank: a multiple of the real workers.
            show_progress: Whether to show a progress bar for the epoch on standard error, in the first process of a
                job alone, and only if that is a terminal. Needs tqdm: the extra ``progress``.
            progress_interval_sec: Seconds after which the bar is drawn again.
            run_log: A directory, as a path or as a URL of any storage that fsspec opens, into which the first process
                of a job writes which plan delivers which steps: a small file wherever an epoch begins or a state is
                loaded. With it `rows_at` and `step_of` also know the steps before an elastic load and in earlier runs;
                `RunLog.read` reads it. Each training has a directory of its own. `storage_options` are used unless it
                is a local path. None for no log.
            hooks: Functions that are called with each `Event` of an epoch, in the training process: see `Hook`. Copies
                of the loader and the dataset have none.
            **dataloader_kwargs: For ``torch.utils.data.DataLoader``: ``pin_memory``, ``prefetch_factor``,
                ``persistent_workers`` (True by default here), ``multiprocessing_context``, ``timeout``,
                ``worker_init_fn``, ``generator``. What torch prefetches are messages of up to 64 batches and about
                8 MiB.

        Returns:
            The loader and the dataset. Both have `state_dict` and `load_state_dict`.

        Raises:
            TypeError: If there is no such parameter, or an argument has the wrong type.
            ValueError: If an argument's value makes no sense; or if this process is not in the mesh.
            ImportError: If `show_progress` is True and tqdm is missing.
            FileNotFoundError: If the path matches no file.
            UnreadableFileError: If a footer cannot be read.
            TransformError: If the transform fails for a table without rows, or returns something else than a table.
            ColumnError: If a column of `columns`, `filters` or another parameter does not exist; if its types in
                different files cannot be unified; if its type does not fit the filter or what was chosen for it; or if
                it has nulls that tensors and arrays cannot hold. Nulls that no footer announces raise it when they are
                read.
        """
        options = LoaderOptions.parse(locals(), _parameters_of(cls))  # no other name is bound yet: the parameters alone
        opened_files = options.open_files()
        read_options = options.read_options(opened_files.delivered_schema)
        check_columns(opened_files, read_options)
        epoch_state = EpochState(
            opened_files,
            options.files.planner(opened_files, options.plan, options.strategy, drop_last=options.drop_last),
            read_options,
            topology=options.topology,
            adopts_num_workers=options.adopts_num_workers,
            progress_interval_sec=options.progress_interval_sec,
            run_log=options.run_log,
            writes_run_log=options.writes_run_log,
            hooks=Hooks(options.hooks, options.topology.rank),
        )
        dataset = cls(
            opened_files,
            epoch_state,
            read_options,
            options.collate_fn,
            options.plan.shuffle_seed,
            process_group=options.process_group,
            ranks_are_assumed=options.ranks_are_assumed,
        )
        return StructuredDataLoader(dataset, **options.torch_options), dataset

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
    def process_group(self) -> Any:
        """The process group of the ranks of `mesh`; with several dimensions a tuple, the group along each.

        None without a mesh, and in copies. The helpers in `torch_dataloader_utils.distributed` use it.
        """
        return self._process_group

    @property
    def schema(self) -> pa.Schema:
        """The columns of a batch and their Arrow types, without the row id column unless a transform returns it."""
        return self._schema

    @property
    def num_batches(self) -> int:
        """The epoch's number of batches for this rank, also when it is continued from a state, without skipped steps.

        Raises:
            TypeError: If it is not known before the rows are read: with a filter; with a transform, a token budget or
                packing whose rows or tokens were not counted; and for text whose rows were not counted.
        """
        return self._epoch_state.num_batches

    @property
    def is_finished(self) -> bool:
        """Whether this rank has no row of the epoch left to deliver, as far as a progress or a loaded state shows."""
        return self._epoch_state.progress.rows_left == 0

    @property
    def plan_digest(self) -> str:
        """Digest of all that determines this epoch's batches; equal on ranks with the same files and options.

        It covers the plan, the files' content (as far as footers show it), the filter, the seed and the batch size.
        """
        return self._epoch_state.plan_digest

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: later iterations deliver it, and the progress of the epoch before is cleared.

        If it is the current epoch and no batch of it was delivered since it began, nothing changes: a loaded state
        still waits for its iteration, and an iterator that has begun goes on. So a training loop may call `set_epoch`
        at the top of every epoch, including the resumed one. Otherwise the epoch begins again.

        Args:
            epoch: The epoch, from 0.

        Raises:
            TypeError: If Accelerate calls it on several ranks: see `StructuredDataLoader`.
        """
        if self.num_ranks > 1 and sys._getframe(1).f_globals.get("__name__") == "accelerate.data_loader":  # noqa: SLF001
            raise TypeError(DIVIDED_AGAIN.format("Accelerate's loader around this dataset"))
        epoch = require_count(epoch, "epoch", least=0)
        if epoch > MOST_EPOCHS:
            raise ValueError(f"epoch={epoch}: at most {MOST_EPOCHS} is possible")
        self._epoch_state.set_epoch(epoch)

    def skip_steps(self, start: int, stop: int) -> None:
        """Skip steps of the current epoch from the next iteration on. All ranks make the same call.

        All other steps keep their batches, their numbers and their order. Row groups whose rows are all skipped are not
        read. Where only reading tells which rows a step has (filters, text that is not counted), the batches are read
        and thrown away. States record the skipped rows, and no resume delivers them, unless `restore_skipped` is
        called. ``len`` does not count skipped steps. They hold for every pass over this epoch.

        Args:
            start: The first step to skip. Steps of a rank are counted from 0 in the epoch, with skipped ones: a state's
                ``batches_delivered`` is the number of the next one.
            stop: The step after the last one to skip. Steps that this rank does not have are left out.

        Raises:
            ValueError: If a step is in the past, or the range is empty or begins after the last step.
        """
        start, stop = require_count(start, "start", least=0), require_count(stop, "stop", least=0)
        self._epoch_state.skip_steps(start, stop)

    def restore_skipped(self) -> None:
        """Deliver all skipped steps of the current epoch after its last one. All ranks make the same call.

        Their batches are those that were skipped. After an elastic load, the rows that were skipped before it come
        first, in batches of today's size. It can be called before the last step or after it: if the pass has ended,
        the next iteration delivers the skipped steps alone. Steps that are skipped later in this epoch are restored,
        too; restored ones cannot be skipped again.
        """
        self._epoch_state.restore_skipped()

    def state_dict(self) -> dict[str, Any]:
        """Return the progress as plain values: what was delivered, to the row. Changes nothing.

        Returns:
            A dictionary of strings, numbers, lists and dictionaries; it survives JSON and
            ``torch.load(..., weights_only=True)`` and holds no credentials.

        Raises:
            ProgressUnknownError: If workers of a plain DataLoader delivered batches: this process cannot count them.
        """
        if get_worker_info() is None and self._epoch_state.owner.copies.have_delivered:
            msg = (
                "the progress is not known: worker processes of a plain DataLoader deliver batches, which this process "
                "cannot count; use the loader that create_dataloader returns, or num_workers=0"
            )
            raise ProgressUnknownError(msg)
        return self._epoch_state.state_dict()

    def load_state_dict(
        self, state_dict: Any, *, strict: bool = True, on_changed_files: Literal["error", "continue"] = "error"
    ) -> None:
        """Load a state: its epoch and its progress. The next iteration continues from it, once.

        Args:
            state_dict: A result of `state_dict`, of this rank; or a list of all ranks' states, in any order.
            strict: Whether the run must be the one that saved the state; then the same batches follow that would have
                followed there. If False, the ranks, the workers, the virtual topology, `uneven_ranks` and `batch_size`
                may differ: all ranks' states are merged, and the rest of the epoch is planned again. Each remaining row
                is delivered once. All ranks have to load the same states.
            on_changed_files: How to handle files that have changed, where `strict` is False. ``"error"`` refuses the
                state. With ``"continue"`` unchanged files keep their progress and new files are added. Nothing more is
                delivered in this epoch of files that were removed or rewritten; a `LostRowsWarning` names them and the
                number of rows that are lost.

        Raises:
            CheckpointMismatchError: If the state was saved under another plan. Then nothing has changed.
            RankMismatchError: If states of several ranks are needed, and some are missing or do not fit together.
            ValueError: If it is not a state. Then nothing has changed.
        """
        require_choice(on_changed_files, "on_changed_files", ON_CHANGED_FILES)
        strict = require_flag(strict, "strict")
        self._epoch_state.load_state_dict(state_dict, strict=strict, on_changed_files=on_changed_files)

    def dump_manifest(self) -> bytes:
        """Return the files and their footers, for `create_dataloader` of another rank or a later run.

        Tokens that `count_tokens` has counted are kept, too.

        Returns:
            Bytes to keep in a file or to send (``broadcast_object_list``). They hold no credentials.

        Raises:
            ValueError: If a file's URL has a query or a user name, which may be secret and without which the file
                would not be found; or if the dataset is a table, whose metadata a manifest does not hold.
        """
        opened_files = files_of(self._opened_files, "one manifest")
        if opened_files.pin:
            pinned = ", ".join(f"{name}={value}" for name, value in opened_files.pin.items())
            raise ValueError(f"a manifest cannot describe a table: open the table with {pinned} instead")
        return dump_opened(opened_files, tokens=opened_files.tokens)

    def get_metrics(self) -> dict[str, Any]:
        """Return what the newest iteration in this process has done, where time went, and what the bottleneck is.

        Returns:
            ``epoch``; ``batches_delivered`` and ``rows_delivered`` since the iteration began; ``rows_excluded``, how
            many of these rows batches lost since `exclude` names them; ``batches_skipped`` and ``rows_skipped`` by
            `skip_steps`; ``rows_dropped`` by `drop_last`; ``row_groups_pruned`` and ``bytes_pruned``, for all ranks:
            the row groups that the filter ruled out before anything was read, and their uncompressed bytes over all
            columns; ``row_groups_read`` and ``bytes_read``, the row groups that were read and their compressed bytes;
            ``row_groups_read_again`` and ``bytes_read_again``, those of them that hold rows delivered before a resume;
            ``retries``, the attempts of the storage that failed and were followed by others; ``stalls``, how often the
            training loop waited longer than a second for a batch; ``first_batch_sec``, ``waiting_sec`` and
            ``between_batches_sec``, the seconds in which it waited for the first batch, waited for others, and worked;
            ``workers``, a list of dictionaries with what each worker did, and its seconds; ``advice``, a sentence that
            says whether the loader or the model is the bottleneck, and what to change. With `uneven_ranks` also
            ``uneven_rows_dropped`` and ``uneven_rows_repeated``, of all ranks: a list of rows, each as its file's path
            relative to the root and its number there, from 0. With `fingerprint` also ``delivered_hash``: for this
            rank, or for each virtual rank that it delivers, ``rank``, ``rows`` and ``hash``, of what was delivered in
            this epoch, before a resume too; None if the epoch was continued from a state without it. With `packing`
            also ``tokens_packed``, ``tokens_separators`` among them, ``tokens_padding`` and ``tokens_dropped`` of the
            sequences that were made, and ``fill_rate``, the share of tokens in them; None before there are any. With
            `uneven_ranks` and `packing`, in place of the rows, the numbers ``uneven_sequences_dropped`` and
            ``uneven_sequences_repeated``, of all ranks.
        """
        counters: dict[str, Any] = {"epoch": self.epoch, **self._epoch_state.metrics()}
        counters |= dict(zip(("row_groups_pruned", "bytes_pruned"), self._opened_files.pruned, strict=True))
        counters |= self._epoch_state.delivered_hash()
        packing = self._stream.options.packing
        if packing is not None:
            places = counters["tokens_packed"] + counters["tokens_padding"]
            counters["fill_rate"] = counters["tokens_packed"] / places if places else None
        counters |= {
            f"uneven_sequences_{verb}": count for verb, count in self._epoch_state.balanced_sequences().items()
        }
        return counters | {f"uneven_rows_{verb}": rows for verb, rows in self._epoch_state.balanced_rows().items()}

    def get_total_metrics(self) -> dict[str, Any]:
        """Return the counters of all iterations of this dataset in this process together: none ever gets smaller.

        Any thread may call it at any moment. A wait of the training loop counts while it goes on.

        Returns:
            What `get_metrics` returns, without ``epoch``, ``advice``, and what it says of pruned and uneven rows.
        """
        return self._epoch_state.monitor.total_metrics()

    def __repr__(self) -> str:
        """Describe the dataset in one line, without secrets: its files and rows, and who reads which epoch."""
        opened_files, topology = self._opened_files, self._epoch_state.topology
        files = opened_files.manifest.files
        rows = "rows not counted"
        if opened_files.manifest.counts_rows:
            rows = _counted(sum(file.rows for file in files), "row")
            rows += "" if opened_files.filter is None else " before the filter"
        parts = [
            repr(opened_files.manifest.root),
            opened_files.format_name,
            *(f"{name} {value}" for name, value in opened_files.pin.items()),
            _counted(len(files), "file"),
            rows,
            f"rank {topology.rank} of {topology.num_ranks}",
            _counted(topology.num_workers, "worker"),
            f"epoch {self.epoch}",
        ]
        return f"{type(self).__name__}({', '.join(parts)})"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _parameters_of(cls: type[StructuredDataset]) -> Iterator[str]:
    """Yield the names that users may have meant: the parameters of `create_dataloader` of a class and its bases."""
    makers = (vars(base)["create_dataloader"].__func__ for base in cls.__mro__ if "create_dataloader" in vars(base))
    parameters = (parameter for maker in makers for parameter in inspect.signature(maker).parameters.values())
    yield from {one.name for one in parameters if one.kind is not one.VAR_KEYWORD} - {"cls"}
