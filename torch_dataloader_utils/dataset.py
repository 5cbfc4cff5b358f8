"""StructuredDataset: the public face that ties the layers together and owns the progress."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from torch_dataloader_utils.convert import OUTPUT_FORMATS, OutputFormat, refuses_nulls
from torch_dataloader_utils.cutting import Batch, StreamEnd
from torch_dataloader_utils.errors import (
    ChangedFilesWarning,
    ProgressUnknownError,
    UnevenRanksWarning,
    warn_user,
)
from torch_dataloader_utils.formats.manifests import dump_manifest, load_manifest
from torch_dataloader_utils.formats.parquet import SUFFIXES, KnownFooters, ParquetSource, open_parquet
from torch_dataloader_utils.iteration import Handover, Iteration, take_turns
from torch_dataloader_utils.listing import list_files
from torch_dataloader_utils.loader import StructuredDataLoader
from torch_dataloader_utils.metrics import Metrics, ProgressLine
from torch_dataloader_utils.model import Assignment, Plan
from torch_dataloader_utils.options import (
    PathLike,
    default_num_workers,
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
from torch_dataloader_utils.planning import PlanOptions, make_plan
from torch_dataloader_utils.progress import Progress
from torch_dataloader_utils.reading import ReadOptions, check_columns
from torch_dataloader_utils.saved import parse_state
from torch_dataloader_utils.sharing import Copies, is_being_sent_to_a_process
from torch_dataloader_utils.state import Run, dump_state, restore_progress, shorten, touched_files
from torch_dataloader_utils.storage import Storage
from torch_dataloader_utils.streams import Stream
from torch_dataloader_utils.transport import Parcel, Post

__all__ = ["StructuredDataset"]


class StructuredDataset(IterableDataset[Any]):
    """Batches of a dataset's rows, for one rank, with progress that is exact to the row.

    `create_dataloader` makes it together with its loader, and takes and documents the same parameters. Iterating over
    the dataset itself, in this process, delivers the same batches as its loader does, counted alike. In a plain
    ``torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=n)`` it delivers each row of the rank once;
    with workers the progress is not known there, and `state_dict` says so.
    """

    def __init__(
        self,
        source: ParquetSource,
        plan_options: PlanOptions,
        read_options: ReadOptions,
        *,
        num_workers: int,
        adopts_num_workers: bool,
        num_ranks: int,
        rank: int,
        collate_fn: Callable[[Any], Any] | None,
        progress_interval_sec: float | None,
    ) -> None:
        super().__init__()
        self.num_ranks = num_ranks
        self.rank = rank
        self._source = source
        self._plan_options = plan_options
        self._read_options = read_options
        self._num_workers = num_workers
        self._adopts_num_workers = adopts_num_workers
        self._stream = Stream(source, read_options, collate_fn)
        self._progress_interval_sec = progress_interval_sec

        self._epoch = 0
        self._plan: Plan | None = None
        self._loaded: Progress | None = None
        self._iteration: Iteration | None = None
        self._iterations = 0
        self._post: Post | None = None
        self._is_lean = False
        self._copies = Copies()
        self._warned_of_uneven_ranks = False
        self._warn_of_uneven_ranks()

    @classmethod
    def create_dataloader(
        cls,
        path: PathLike | Sequence[PathLike],
        format: Literal["parquet"] = "parquet",  # noqa: A002 - the name that readers of data use
        *,
        batch_size: int = 1024,
        drop_last: bool = False,
        columns: Sequence[str] | None = None,
        filters: pc.Expression | None = None,
        shuffle: bool = False,
        shuffle_seed: int = 42,
        shuffle_buffer_size: int | None = None,
        split_bytes: int | str = "128MiB",
        split_rows: int | None = None,
        read_ahead_bytes: int | str = "128MiB",
        num_workers: int | None = None,
        num_ranks: int | None = None,
        rank: int | None = None,
        output_format: OutputFormat = "torch",
        collate_fn: Callable[[Any], Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        manifest: bytes | None = None,
        row_id_column: str | None = None,
        show_progress: bool = False,
        progress_interval_sec: float = 1.0,
        **dataloader_kwargs: Any,
    ) -> tuple[StructuredDataLoader, StructuredDataset]:
        """Open a dataset and make the loader of this rank's batches.

        Every footer is read once, here, or the file `_metadata` instead where a directory has one. Nothing calls
        ``torch.distributed``; an initialised process group is only asked for its size and rank.

        Args:
            path: A file, a directory (searched in depth), a glob, or a list of them; any URL that fsspec knows.
                In directories and globs hidden files, names that begin with an underscore and other endings than
                .parquet, .parq and .pq are passed over; a file named in full is taken as it is.
            format: The file format.
            batch_size: Rows in a batch. Batches span row groups, files and shards; only the last batch of a worker's
                stream is shorter.
            drop_last: Whether to leave that short batch out. The rows are counted as ``rows_dropped``.
            columns: Columns to deliver, in this order; None for all.
            filters: Which rows to deliver: row groups are ruled out by their statistics, then rows are looked at.
                May use columns outside `columns`. A filter that may keep NaN, such as ``pc.field("x") != 1`` of
                floats, rules out no row group by that column: statistics leave NaN out.
            shuffle: Whether shards come in an order drawn anew for each epoch.
            shuffle_seed: Seed of every random choice; seed and epoch together decide.
            shuffle_buffer_size: Number of rows, at most, that are read together and mixed, drawn from row groups all
                over the dataset; None shuffles shards and leaves rows in file order. Needs ``shuffle=True``. A stream
                (each worker, or this process) holds two such shards in memory.
            split_bytes: Uncompressed bytes of a shard, at most, unless a single row group has more: an integer or a
                text such as ``"128MiB"``. Lowered where streams would get too few shards.
            split_rows: Rows of a shard, at most, unless a single row group has more.
            read_ahead_bytes: Decoded bytes that a stream (each worker, or this process) holds at most, those of the
                batches that it is delivering included: an integer or a text. A row group that has more than half of
                that is read in pieces. A shard of mixed rows may have more; then the next one is not read ahead.
            num_workers: Number of worker processes; 0 reads in this process; None takes the CPUs of this rank's share
                less one, and a loaded state's number.
            num_ranks: Number of ranks; None asks the process group, else ``WORLD_SIZE``, else is 1.
            rank: This rank; None asks the process group, else ``RANK``, else is 0.
            output_format: What a batch is: ``"torch"`` or ``"numpy"``, a dictionary of column names to tensors or
                arrays of shape ``(rows,)``, or ``(rows, size)`` for fixed-size lists, in the column's own dtype, and
                to Python lists for every type that is not numeric; ``"dict"``, a dictionary of Python lists;
                ``"arrow"``, a ``pyarrow.Table``.
            collate_fn: Called with each batch, in the worker; what it returns is delivered.
            storage_options: fsspec's options for the storage, credentials included. They appear in no state,
                message or log.
            manifest: What `dump_manifest` of a dataset at the same path returned, so that nothing is listed and no
                footer is read: one rank does it for all, or one run for the next. A file that has changed since is an
                error when it is read.
            row_id_column: Name of an int64 column to add: a row's place among all rows of all files, sorted by path,
                from 0, filtered rows included.
            show_progress: Whether to write a line about the progress to standard error now and then.
            progress_interval_sec: Seconds between two such lines.
            **dataloader_kwargs: For ``torch.utils.data.DataLoader``: ``pin_memory``, ``prefetch_factor``,
                ``persistent_workers`` (here True unless told otherwise), ``multiprocessing_context``, ``timeout``,
                ``worker_init_fn``, ``generator``. What torch prefetches are parcels of up to 64 batches and about
                8 MiB.

        Returns:
            The loader and the dataset. Both have `state_dict` and `load_state_dict`.

        Raises:
            FileNotFoundError: If the path stands for no file.
            UnreadableFileError: If a footer cannot be read.
            ColumnError: If a column of `columns` or `filters` does not exist, differs between files, or is of
                integers or booleans with nulls, which tensors and arrays cannot hold.
            ValueError: If an argument's value makes no sense.
            TypeError: If an argument has the wrong type.
        """
        require_choice(format, "format", ("parquet",))
        require_choice(output_format, "output_format", OUTPUT_FORMATS)
        wanted = parse_columns(columns, row_id_column)
        urls = parse_paths(path)
        require_callable(collate_fn, "collate_fn")
        require_options(storage_options, "storage_options")
        if filters is not None and not isinstance(filters, pc.Expression):
            msg = f"filters={filters!r}: expected a pyarrow.compute.Expression such as pc.field('x') > 3"
            raise TypeError(msg)
        plan_options = PlanOptions(
            split_bytes=parse_bytes(split_bytes, "split_bytes"),
            split_rows=optional_count(split_rows, "split_rows"),
            shuffle=require_flag(shuffle, "shuffle"),
            shuffle_seed=require_count(shuffle_seed, "shuffle_seed", least=None),
            shuffle_buffer_size=optional_count(shuffle_buffer_size, "shuffle_buffer_size"),
        )
        if plan_options.mixes_rows and not shuffle:
            msg = f"shuffle_buffer_size={shuffle_buffer_size} has no meaning without shuffle=True"
            raise ValueError(msg)
        read_options = ReadOptions(
            batch_size=require_count(batch_size, "batch_size"),
            drop_last=require_flag(drop_last, "drop_last"),
            output_format=output_format,
            row_id_column=row_id_column,
            mixing_seed=plan_options.shuffle_seed if plan_options.mixes_rows else None,
            read_ahead_bytes=parse_bytes(read_ahead_bytes, "read_ahead_bytes"),
        )
        workers = default_num_workers() if num_workers is None else require_count(num_workers, "num_workers", least=0)
        interval = require_seconds(progress_interval_sec, "progress_interval_sec")
        num_ranks, rank = resolve_rank(num_ranks, rank, _process_group())
        storage, locations = Storage.for_urls(urls, storage_options)
        if manifest is None:
            listing, known = list_files(storage, locations, SUFFIXES), None
        else:
            listing, known = load_manifest(manifest, storage, locations)
        source = open_parquet(
            storage,
            listing,
            known=known,
            columns=wanted,
            filters=filters,
            refuses_nulls=partial(refuses_nulls, output_format=output_format),
        )
        check_columns(source, read_options)
        dataset = cls(
            source,
            plan_options,
            read_options,
            num_workers=workers,
            adopts_num_workers=num_workers is None,
            num_ranks=num_ranks,
            rank=rank,
            collate_fn=collate_fn,
            progress_interval_sec=interval if show_progress else None,
        )
        return StructuredDataLoader(dataset, **dataloader_kwargs), dataset

    # What users call -------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration delivers, or continues."""
        return self._epoch

    @property
    def num_workers(self) -> int:
        """Number of worker processes; 0 means this process."""
        return self._num_workers

    @property
    def schema(self) -> pa.Schema:
        """The columns of a batch and their Arrow types, the row id column apart."""
        return self._source.schema

    @property
    def num_batches(self) -> int:
        """The epoch's number of batches for this rank, also when it is continued from a state.

        Raises:
            TypeError: If a filter makes it unknowable.
        """
        if self._source.filter is not None:
            msg = "the number of batches is not known ahead: only reading tells how many rows the filter leaves"
            raise TypeError(msg)
        return self._batches(self._progress)

    @property
    def plan_digest(self) -> str:
        """Digest of this epoch's plan and all that decides its batches; equal on ranks with the same files and options.

        Beside the plan it covers the files' content (as far as footers tell), the filter, the seed and the batch size.
        """
        parts = (
            self._plan_of(self._epoch).digest,
            self._source.manifest.fingerprint,
            self._source.filter_digest,
            self._plan_options,
            self._read_options.batch_size,
            self._read_options.drop_last,
        )
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    def set_epoch(self, epoch: int) -> None:
        """Plan an epoch and forget the progress of the one before.

        A loaded state that still waits for its iteration is kept where it belongs to this very epoch, so that a
        training loop may call `set_epoch` at the top of every epoch, the resumed one included.

        Args:
            epoch: The epoch, from 0.
        """
        epoch = require_count(epoch, "epoch", least=0)
        if self._loaded is not None and epoch == self._epoch:
            return
        self._epoch = epoch
        self._take_over("set_epoch", None)
        self._warn_of_uneven_ranks()

    def state_dict(self) -> dict[str, Any]:
        """Return the progress as plain values: what has been handed over, to the row. Changes nothing.

        Returns:
            A dictionary of strings, numbers, lists and dictionaries; it survives JSON and
            ``torch.load(..., weights_only=True)`` and holds no credentials.

        Raises:
            ProgressUnknownError: If a plain DataLoader's workers delivered batches, which cannot be counted here.
        """
        if get_worker_info() is None and self._copies.have_delivered:
            msg = (
                "the progress is not known: worker processes of a plain DataLoader deliver batches without telling "
                "this process; use the loader that create_dataloader returns, or num_workers=0"
            )
            raise ProgressUnknownError(msg)
        return dump_state(self._run(), self._epoch, self._progress)

    def load_state_dict(self, state: Any) -> None:
        """Take over a state: its epoch and its progress. The next iteration continues there, once.

        Args:
            state: What `state_dict` returned, of this rank.

        Raises:
            CheckpointMismatchError: If the state was saved under another plan; nothing has changed then.
            ValueError: If it is no such state; nothing has changed then.
        """
        saved = parse_state(state)
        worker = get_worker_info()
        run = self._run()
        if worker is None and self._adopts_num_workers:
            run = replace(run, num_workers=saved.num_workers)
        progress = restore_progress(saved, run, lambda epoch: self._make_plan(epoch, run.num_workers))
        touched = touched_files(saved, self._source.manifest)
        if touched:
            text = "files have a new modification time since the checkpoint, with the same size and footer"
            advice = "if their rows were changed, begin the epoch without the state"
            warn_user(f"{text}: {shorten(touched)}; {advice}", ChangedFilesWarning)
        if worker is not None:  # a loader that loads states in its workers also knows whose turn it is
            progress = replace(progress, next_stream=0)
        self._num_workers = run.num_workers
        self._epoch = saved.epoch
        self._take_over("load_state_dict", progress)

    def dump_manifest(self) -> bytes:
        """Return the files and their footers, for `create_dataloader` of another rank or a later run.

        Returns:
            Bytes to keep in a file or to send (``broadcast_object_list``). They hold no credentials.

        Raises:
            ValueError: If a file's URL has a query, without which it would not be found.
        """
        source = self._source
        known = KnownFooters(source.footers, source.sidecar)
        return dump_manifest(source.manifest.root, tuple(source.files.values()), known)

    def get_metrics(self) -> dict[str, int]:
        """Return counters of the newest iteration in this process.

        Returns:
            ``epoch``; ``batches_delivered`` and ``rows_delivered`` since the iteration began; ``rows_dropped`` by
            `drop_last`; ``bytes_read``, the compressed bytes of the row groups read, and ``bytes_read_again``, those
            of them in row groups that hold rows delivered before a resume.
        """
        metrics = self._iteration.metrics if self._iteration else Metrics()
        return {"epoch": self._epoch, **asdict(metrics)}

    def __iter__(self) -> Iterator[Any]:
        """Begin the epoch anew, or continue from a loaded state, and deliver the batches in this process."""
        if self._post is not None:
            return self._answer(self._post, self._post.inbox.begin())
        worker = get_worker_info()
        if worker is not None:
            return self._deliver_in_plain_worker(worker.id, worker.num_workers, worker.seed - worker.id)
        iteration = self.begin_iteration()
        return Handover(iteration, take_turns(map(self.batches, iteration.assignments())))

    # What the loader calls -------------------------------------------------------------------------------------------

    def begin_iteration(self) -> Iteration:
        """Begin an iteration: the epoch anew, or what a state that was loaded since the last one left."""
        progress = self._loaded if self._loaded is not None else self._fresh_progress()
        self._take_over("iter", None)
        self._iterations += 1
        line = None
        if self._progress_interval_sec is not None:
            total = None if self._source.filter is not None else self._batches(progress)
            line = ProgressLine(self._progress_interval_sec, total)
        self._iteration = Iteration(self._iterations, self._epoch, progress, line)
        return self._iteration

    def batches(self, assignment: Assignment, *, pin: bool = False) -> Iterator[Batch | StreamEnd]:
        """Read one stream in this process."""
        return self._stream.batches(assignment, pin=pin)

    def attach_post(self, post: Post) -> None:
        """Make this copy, in a worker, answer the assignments that come by post."""
        self._post = post

    @contextmanager
    def lean(self) -> Iterator[None]:
        """Let copies that are sent to processes have nothing that assignments bring along."""
        self._is_lean = True
        try:
            yield
        finally:
            self._is_lean = False

    def equipped(self, assignment: Assignment, known: Collection[str]) -> Assignment:
        """Add to an assignment the footers that a lean copy needs for it and does not know."""
        footers = self._source.footers
        needed = {split.path for piece in assignment.pieces for split in piece.shard.splits}
        new = sorted(needed.difference(known).intersection(footers))
        return replace(assignment, footers={path: footers[path] for path in new})

    # Within ----------------------------------------------------------------------------------------------------------

    @property
    def _progress(self) -> Progress:
        """The progress as it stands: of the newest iteration, else loaded, else none."""
        if self._iteration is not None:
            return self._iteration.progress
        return self._loaded if self._loaded is not None else self._fresh_progress()

    def _fresh_progress(self) -> Progress:
        return Progress.fresh(self._plan_of(self._epoch).rank_streams(self.rank))

    def _take_over(self, by: str, loaded: Progress | None) -> None:
        """Let a call take the progress from the iteration that owned it."""
        if self._iteration is not None:
            self._iteration.replace(by)
        self._iteration = None
        self._loaded = loaded
        if get_worker_info() is None:
            self._copies.publish(self._epoch, waiting=loaded is not None)

    def _run(self) -> Run:
        worker = get_worker_info()
        return Run(
            manifest=self._source.manifest,
            options=self._plan_options,
            filter_digest=self._source.filter_digest,
            num_workers=self._num_workers if worker is None else worker.num_workers,
            num_ranks=self.num_ranks,
            rank=self.rank,
        )

    def _plan_of(self, epoch: int) -> Plan:
        plan = self._plan
        if plan is None or (plan.epoch, plan.num_workers) != (epoch, self._num_workers):
            plan = self._plan = self._make_plan(epoch, self._num_workers)
        return plan

    def _make_plan(self, epoch: int, num_workers: int) -> Plan:
        return make_plan(
            self._source.manifest,
            self._plan_options,
            epoch=epoch,
            num_ranks=self.num_ranks,
            num_workers=num_workers,
            selection=self._source.selection,
        )

    def _batches(self, progress: Progress) -> int:
        return progress.batches(self._read_options.batch_size, drop_last=self._read_options.drop_last)

    def _answer(self, post: Post, number: int) -> Iterator[Parcel]:
        """Read, in a worker of this package's own loader, what its assignment says."""
        yield from self._stream.parcels(post.inbox.receive(number), post)

    def _deliver_in_plain_worker(self, worker: int, num_workers: int, loader_seed: int) -> Iterator[Any]:
        """Deliver one stream, in a worker of a plain DataLoader; what is wrong is raised with the first batch."""
        saved = None if self._loaded is None else len(self._loaded.streams)
        self._epoch, continues = self._copies.join(self._epoch, saved, num_workers=num_workers, loader_seed=loader_seed)
        self._loaded = self._loaded if continues else None
        self._num_workers = num_workers
        iteration = self.begin_iteration()
        own = list(iteration.assignments())[worker]  # by turn: a plain loader asks its first worker first
        yield from Handover(iteration, self.batches(own), streams={own.stream})

    def _warn_of_uneven_ranks(self) -> None:
        if self._warned_of_uneven_ranks or self.num_ranks == 1:
            return
        if self._source.filter is not None:
            text = "a filter leaves each rank a number of batches that is not known ahead"
        else:
            streams = map(self._plan_of(self._epoch).rank_streams, range(self.num_ranks))
            ranks = list(map(Progress.fresh, streams))
            batches = [self._batches(rank) for rank in ranks]
            if len(set(batches)) == 1:
                return
            rows = [rank.rows_left for rank in ranks]
            text = f"ranks make different numbers of steps in epoch {self._epoch}: batches {batches}, rows {rows}"
        self._warned_of_uneven_ranks = True
        advice = "a DDP loop needs join(), or ranks that agree on a number of steps; else ranks wait for one another"
        warn_user(f"{text}; {advice}", UnevenRanksWarning)

    def __getstate__(self) -> dict[str, Any]:
        """Leave behind what belongs to this process: the iteration, and shared memory unless a process is started."""
        state = {**self.__dict__, "_iteration": None, "_plan": None}
        if self._is_lean:
            stream = self._stream.without_footers()
            state |= {"_stream": stream, "_source": stream.source, "_loaded": None}
        if not is_being_sent_to_a_process():
            del state["_copies"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "_copies" not in state:
            self._copies = Copies(self._epoch, waiting=self._loaded is not None)


def _process_group() -> tuple[int, int] | None:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return None
