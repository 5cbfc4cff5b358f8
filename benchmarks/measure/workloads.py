"""The workloads: the data set of each, its contenders, and the baseline that they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contenders.harness import Job
from benchmarks.data.dataset import Data, make
from benchmarks.data.recipes import LABELS
from benchmarks.measure import s3
from benchmarks.measure.memory_bound import memory_bound
from benchmarks.measure.rounds import Contender, Hooks, measure
from benchmarks.paths import SCRATCH

__all__ = [
    "HALF_A_GROUP",
    "IN_PROCESS",
    "OTHER",
    "PACKED",
    "RAW_ARROW",
    "SOURCES",
    "TWO_WORKERS",
    "WORKLOADS",
    "Settings",
    "run_workload",
]

RAW_ARROW = "raw Arrow"
IN_PROCESS = "torch_dataloader_utils, in process"
TWO_WORKERS = "torch_dataloader_utils, 2 workers"
ARROW_READER = "Arrow's reader, file by file"
COUNTED = "torch_dataloader_utils, in process, rows counted first"
ARROW_FILES = "Arrow's S3 reader, file by file"
ARROW_DIRECTORY = "Arrow's S3 reader, whole directory at once"
ARROW_SCANNER = "Arrow's dataset scanner"
OBSTORE = "obstore, Arrow's decoder"
FOOTERS_ON_S3 = "obstore, 32 footers at once"
HALF_A_GROUP = "rows shuffled, row groups twice as large as the buffer"
AS_PACKED = "torch_dataloader_utils, in process, packed"
AS_ARROW = "torch_dataloader_utils, in process, as Arrow"
GRID = {"no grid": {}, "one rank for four": {"virtual_ranks": 4, "virtual_workers": 1}}
"""Options of the loader, by the name of the contender."""

BATCH = {"tokens": 256, "labels_small": 250, "labels_large": 250}
INTERLEAVED = (1, 2, 4, 8, 16)
SOURCES = (2, 4, 8)
"""How many sources the mixtures have that are compared with one dataset."""

PACKED = {
    "packed with cu_seqlens": ["cu_seqlens"],
    "packed with all outputs": ["document_ids", "position_ids", "cu_seqlens", "max_seqlen"],
}
"""What is delivered beside sequences, by the name of the contender."""

SHARES = {"10 %": 0.1, "50 %": 0.5, "99 %": 0.99}
OTHER = " (other checkout)"
"""What the names of another checkout's contenders end with."""

OURS = "ours/loader.py"
SHUFFLE_BUFFER = 100_000

Results = dict[str, Any]
Maker = Callable[..., Sequence[Contender]]


@dataclass(frozen=True, slots=True)
class Settings:
    """How much to measure.

    Attributes:
        rounds: Timed rounds.
        scale: The share of the data to read; less than 1 for a trial run.
        peers: Makes the peers' contenders for a data set; without it, none take part.
        against: The root of another checkout, whose loader is measured in turn with this one's.
        tell: Called with each line of progress.
    """

    rounds: int = 5
    scale: float = 1.0
    peers: Maker = lambda _data, _s3, **_options: ()
    against: Path | None = None
    tell: Callable[[str], None] = print

    def with_other(self, contenders: Sequence[Contender]) -> list[Contender]:
        """Return contenders with those of the other checkout, if there is one, each after its counterpart."""
        found = []
        for contender in contenders:
            found.append(contender)
            if contender.is_ours and self.against is not None:
                job = replace(contender.job, scratch=str(SCRATCH / "other"))
                found.append(replace(contender, name=contender.name + OTHER, job=job, checkout=self.against))
        return found


def ours(data: Data, workers: int, name: str | None = None, **options: Any) -> Contender:
    """Return this library's loader as a contender."""
    name = name or (TWO_WORKERS if workers else IN_PROCESS)
    return Contender(name, OURS, job_of(data, workers, **options), checksum=data.checksum, rows=data.rows)


def job_of(data: Data, workers: int = 0, **options: Any) -> Job:
    """Return the job to read a data set once."""
    batch = BATCH.get(data.name, 1024)
    return Job(data.directory, list(data.files), batch, workers, options=options)


def raw_arrow(data: Data) -> Contender:
    """Return raw Arrow as a contender."""
    return Contender(RAW_ARROW, "baselines/raw_arrow.py", job_of(data), checksum=data.checksum, rows=data.rows)


def run_workload(name: str, settings: Settings) -> Results:
    """Run a workload and return what goes into the JSON."""
    settings.tell(name)
    return WORKLOADS[name](settings)


def _compare(
    settings: Settings,
    data: Data,
    contenders: Sequence[Contender],
    *,
    baseline: str | None = RAW_ARROW,
    hooks: Hooks | None = None,
    **facts: Any,
) -> Results:
    measured = measure(
        settings.with_other(contenders),
        rounds=settings.rounds,
        baseline=None if settings.against else baseline,  # the baseline may be each checkout's own
        hooks=hooks,
        verify=data.verify,
        tell=settings.tell,
    )
    return {"data": _described(data), "baseline": baseline, "contenders": measured, "facts": facts}


def _described(data: Data) -> dict[str, Any]:
    return {
        "rows": data.rows,
        "files": len(data.files),
        "file_bytes": data.file_bytes,
        "row_group_bytes": data.row_group_bytes,
        "batch_size": BATCH.get(data.name, 1024),
        "note": data.note,
    }


def _plain(name: str) -> Callable[[Settings], Results]:
    """Return the workload that reads a whole data set with raw Arrow, this library, and peers if there are any."""

    def run(settings: Settings) -> Results:
        data = make(name, settings.scale)
        own = [raw_arrow(data), ours(data, 0), ours(data, 2)]
        return _compare(settings, data, [*own, *settings.peers(data, None)])

    return run


def _format(name: str) -> Callable[[Settings], Results]:
    """Return the workload that compares files of another format with Arrow's own reader of it."""

    def run(settings: Settings) -> Results:
        data = make(name, settings.scale)
        contenders = [
            Contender(ARROW_READER, "baselines/arrow_files.py", job_of(data), checksum=data.checksum, rows=data.rows),
            ours(data, 0, format=name),
            ours(data, 2, format=name),
        ]
        if name != "orc":
            contenders.append(ours(data, 0, COUNTED, format=name, count_rows=True))
        return _compare(settings, data, contenders, baseline=ARROW_READER)

    return run


def _strings(settings: Settings) -> Results:
    data = make("strings", settings.scale)
    packed = ours(data, 0, AS_PACKED, column_formats={"text": "packed", "category": "packed"})
    own = [
        raw_arrow(data),
        ours(data, 0),
        ours(data, 2),
        replace(packed, job=replace(packed.job, columns=["id", "text", "category"])),  # rows are counted by the first
        ours(data, 0, AS_ARROW, output_format="arrow"),
    ]
    return _compare(settings, data, [*own, *settings.peers(data, None)])


def _values(settings: Settings) -> Results:
    data = make("values", settings.scale)
    formats = {"when": "list", "day": "list"}
    own = [raw_arrow(data), *(ours(data, workers, column_formats=formats) for workers in (0, 2))]
    return _compare(settings, data, own)


def _categories(settings: Settings) -> Results:
    data = make("categories", settings.scale)
    shuffled = ours(data, 0, "torch_dataloader_utils, rows shuffled", shuffle=True, shuffle_buffer_size=20_000)
    return _compare(settings, data, [raw_arrow(data), ours(data, 0), ours(data, 2), shuffled])


def _grid(settings: Settings) -> Results:
    data = make("numeric", settings.scale)
    contenders = [ours(data, 0, name, uneven_ranks="drop", **options) for name, options in GRID.items()]
    return _compare(settings, data, contenders, baseline="no grid")


def _wide(settings: Settings) -> Results:
    data = make("wide", settings.scale)
    columns = ["f500", "id"]
    contenders = [
        replace(contender, job=replace(contender.job, columns=columns))
        for contender in (raw_arrow(data), ours(data, 0), ours(data, 2))
    ]
    peers = settings.peers(data, None, columns=columns)
    return _compare(settings, data, [*contenders, *peers], columns=columns)


def _shuffle(settings: Settings) -> Results:
    data = make("numeric", settings.scale)
    buffer = max(1024, int(SHUFFLE_BUFFER * min(1.0, settings.scale * 4)))
    contenders = [
        ours(data, 0, "unshuffled"),
        ours(data, 0, "shards shuffled", shuffle=True),
        ours(data, 0, "rows shuffled", shuffle=True, shuffle_buffer_size=buffer),
        ours(data, 0, HALF_A_GROUP, shuffle=True, shuffle_buffer_size=buffer // 2),
    ]
    return _compare(settings, data, contenders, baseline="unshuffled", shuffle_buffer_size=buffer)


def _rows_shuffled(settings: Settings) -> Results:
    """Shuffle rows with peers too, in a buffer of as many rows where they have one."""
    data = make("numeric", settings.scale)
    buffer = max(1024, int(SHUFFLE_BUFFER * min(1.0, settings.scale * 4)))
    options = {"shuffle": True, "shuffle_buffer_size": buffer}
    contenders = [raw_arrow(data), ours(data, 0, **options), ours(data, 2, **options)]
    peers = settings.peers(data, None, shuffle_buffer=buffer)
    return _compare(settings, data, [*contenders, *peers], shuffle_buffer_size=buffer)


def _small_groups_shuffled(settings: Settings) -> Results:
    """Read small row groups in file order, and with shuffled rows."""
    data = make("groups_of_2k", settings.scale)
    buffer = max(1024, int(SHUFFLE_BUFFER * min(1.0, settings.scale * 4)))
    options = {"shuffle": True, "shuffle_buffer_size": buffer}
    contenders = [ours(data, 0, "in file order"), ours(data, 0, "rows shuffled", **options)]
    return _compare(settings, data, contenders, baseline="in file order", shuffle_buffer_size=buffer)


def _mixture(settings: Settings) -> Results:
    """Read the same files with shuffled rows: as one dataset, and as the sources of a mixture."""
    data = make("sources", settings.scale)
    options = {"shuffle": True, "shuffle_buffer_size": max(1024, int(SHUFFLE_BUFFER * min(1.0, settings.scale * 4)))}
    contenders = []
    for workers, how in ((0, "in process"), (2, "2 workers")):
        contenders.append(ours(data, workers, f"one dataset, {how}", **options))
        contenders += [
            replace(ours(data, workers, f"{count} sources, {how}", sources=count, **options), script="ours/mixture.py")
            for count in SOURCES
        ]
    return _compare(settings, data, contenders, baseline=None, **options)


def _packing(settings: Settings) -> Results:
    """Read documents as jagged batches, and packed into sequences. Rates are of tokens."""
    data = make("documents", settings.scale)
    ways: dict[str, dict[str, Any]] = {"jagged": {}}
    ways |= {name: {"outputs": outputs} for name, outputs in PACKED.items()}
    ways["best fit, with cu_seqlens"] = {"outputs": ["cu_seqlens"], "strategy": "best_fit"}
    contenders = [
        replace(
            ours(data, workers, f"{name}, {how}", **options),
            script="ours/packing.py",
            job=replace(job_of(data, workers, **options), batch_size=16 if options else 128),
            rows=None,
        )
        for workers, how in ((0, "in process"), (2, "2 workers"))
        for name, options in ways.items()
    ]
    return _compare(settings, data, contenders, baseline=None, unit="tokens")


def _mixing(name: str, group: int, ways: Sequence[tuple[str, int, int]]) -> Callable[[Settings], Results]:
    """Return the workload that shuffles rows of files sorted by label, and measures how well they are mixed.

    Args:
        name: The data set.
        group: Rows of its row groups.
        ways: For each contender its name, `shuffle_buffer_size` and `shuffle_interleave`.
    """

    def run(settings: Settings) -> Results:
        data = make(name, settings.scale)
        unshuffled = mixing_contender(data, "unshuffled")
        contenders = [
            mixing_contender(data, way, shuffle=True, shuffle_buffer_size=buffer, shuffle_interleave=interleave)
            for way, buffer, interleave in ways
        ]
        windows = {buffer: perfect_window(data.rows, group, buffer) for _, buffer, _ in ways}
        perfect = {way: windows[buffer] for way, buffer, _ in ways}
        return _compare(settings, data, [unshuffled, *contenders], baseline="unshuffled", perfect=perfect)

    return run


def mixing_contender(data: Data, name: str, **options: Any) -> Contender:
    """Return this library's loader with a count of the labels in each batch."""
    return Contender(name, "ours/mixing.py", job_of(data, 0, **options), checksum=data.checksum, rows=data.rows)


def perfect_window(rows: int, group: int, buffer: int) -> float:
    """Return the chi-square of row groups in random order whose rows are shuffled in windows of a buffer's size."""
    random = np.random.default_rng(0)
    order = random.permutation(rows // group)
    rows_in_order = (order[:, None] * group + np.arange(group)).ravel()
    windows = [random.permutation(rows_in_order[first : first + buffer]) for first in range(0, rows, buffer)]
    size = BATCH["labels_small"]
    labels = (np.concatenate(windows) * LABELS // rows)[: rows // size * size].reshape(-1, size)
    counts = np.stack([np.bincount(batch, minlength=LABELS) for batch in labels])
    return float((((counts - size / LABELS) ** 2) / (size / LABELS)).sum(axis=1).mean() / (LABELS - 1))


def _steps(settings: Settings) -> Results:
    data = make("numeric", settings.scale)
    contenders = [Contender("torch_dataloader_utils", "ours/steps.py", job_of(data), timeout_s=400)]
    return _compare(replace(settings, rounds=1), data, contenders, baseline=None)


def _collate(settings: Settings) -> Results:
    data = make("numeric", settings.scale / 4)
    contenders = [ours(data, workers, f"{workers} workers", burn=True) for workers in (0, 1, 2)]
    return _compare(settings, data, contenders, baseline="0 workers")


def _memory(settings: Settings) -> Results:
    """Measure peak memory: all runs are sampled, none is timed."""
    data = make("numeric", settings.scale)
    contenders = [
        raw_arrow(data),
        ours(data, 0),
        ours(data, 2),
        ours(data, 0, "rows shuffled, in process", shuffle=True, shuffle_buffer_size=SHUFFLE_BUFFER),
        ours(data, 2, "rows shuffled, 2 workers", shuffle=True, shuffle_buffer_size=SHUFFLE_BUFFER),
    ]
    found = _compare(replace(settings, rounds=0), data, contenders, baseline=None)
    own = [contender for contender in contenders if contender.script == OURS]
    return found | {"facts": {"bound_bytes": {each.name: memory_bound(data, each.job) for each in own}}}


def _many_files(settings: Settings) -> Results:
    data = make("many_files", settings.scale)
    contenders = [
        Contender("plain loop of pq.read_metadata", "baselines/footers.py", job_of(data, threads=0), rows=data.rows),
        Contender("pq.read_metadata in 16 threads", "baselines/footers.py", job_of(data, threads=16), rows=data.rows),
        Contender("torch_dataloader_utils", "ours/many_files.py", job_of(data), rows=data.rows),
    ]
    return _compare(settings, data, contenders, baseline=None)


def _resume(settings: Settings) -> Results:
    data = make("numeric", settings.scale)
    contenders = []
    for workers, how in ((0, "in process"), (2, "2 workers")):
        contenders.append(_resuming(data, workers, "fresh", 0.0, f"fresh start, {how}"))
        for percent, share in SHARES.items():
            save = _resuming(data, workers, "save", share, f"save at {percent}, {how}")
            saved = measure(settings.with_other([save]), rounds=0, tell=settings.tell)
            if any(found["error"] for found in saved.values()):
                return {"data": _described(data), "baseline": None, "contenders": saved, "facts": {}}
            contenders += [
                _resuming(data, workers, way, share, f"{words} at {percent}, {how}")
                for way, words in (("resume", "resume"), ("forward", "fast-forward"))
            ]
    return _compare(settings, data, contenders, baseline=None, shares=SHARES)


def _resuming(data: Data, workers: int, way: str, share: float, name: str) -> Contender:
    saved = f"state-{workers}-{share:g}.json"
    return Contender(name, "ours/resume.py", job_of(data, workers, way=way, share=share, saved=saved))


def _epochs(count: int, rounds: int) -> Callable[[Settings], Results]:
    """Return the workload that reads a number of epochs in one process, and looks at it after each.

    The fewer epochs, the more rounds it takes to tell a slope from what memory varies by.
    """

    def run(settings: Settings) -> Results:
        data = make("small", settings.scale)
        ways: list[tuple[str, int, dict[str, Any]]] = [
            ("in process", 0, {}),
            ("2 persistent workers", 2, {"persistent_workers": True}),
            ("2 new workers each epoch", 2, {"persistent_workers": False}),
        ]
        contenders = [
            Contender(
                name,
                "ours/epochs.py",
                job_of(data, workers, epochs=count, loader=loader),
                rows=count * data.rows,
                timeout_s=20 * count,
            )
            for name, workers, loader in ways
        ]
        found = _compare(replace(settings, rounds=rounds), data, contenders, baseline=None, epochs=count)
        return found | {"rounds": rounds}

    return run


def _s3(name: str, columns: list[str] | None) -> Callable[[Settings], Results]:
    """Return the workload that reads a data set from S3, and counts requests and bytes."""

    def run(settings: Settings) -> Results:
        data = make(name, settings.scale)
        with s3.serve(data) as server:
            own = [
                Contender(
                    ARROW_FILES,
                    "baselines/arrow_s3.py",
                    job_of(data, read="files"),
                    checksum=data.checksum,
                    rows=data.rows,
                ),
                Contender(ARROW_DIRECTORY, "baselines/arrow_s3.py", job_of(data, read="directory"), rows=data.rows),
                Contender(
                    ARROW_SCANNER,
                    "baselines/arrow_s3.py",
                    job_of(data, read="scan"),
                    checksum=data.checksum,
                    rows=data.rows,
                ),
                Contender(OBSTORE, "baselines/obstore_s3.py", job_of(data), checksum=data.checksum, rows=data.rows),
                ours(data, 0),
                ours(data, 2, persistent_workers=True),
            ]
            url = s3.url_of(data)
            contenders = [
                replace(
                    contender,
                    job=replace(contender.job, path=url, columns=columns, reads_twice=True, s3=server.access),
                )
                for contender in own
            ]
            peers = settings.peers(data, server.access, columns=columns)
            return _compare(
                settings,
                data,
                [*contenders, *peers],
                baseline=ARROW_FILES,
                hooks=server.hooks(data),
                delay_ms=s3.DELAY_MS,
                columns=columns,
                **s3.column_runs(data, columns),
            )

    return run


def _s3_many_files(settings: Settings) -> Results:
    """Open many small files on S3: list them and read their footers, as a plain loop in threads does."""
    data = make("many_files", settings.scale)
    with s3.serve(data) as server:
        own = [
            Contender(FOOTERS_ON_S3, "baselines/footers_s3.py", job_of(data), rows=data.rows),
            Contender(IN_PROCESS, "ours/opening.py", job_of(data)),
            Contender(TWO_WORKERS, "ours/opening.py", job_of(data, 2)),
        ]
        contenders = [
            replace(contender, job=replace(contender.job, path=s3.url_of(data), s3=server.access)) for contender in own
        ]
        return _compare(settings, data, contenders, baseline=None, hooks=server.hooks(data), delay_ms=s3.DELAY_MS)


def _s3_clients(settings: Settings) -> Results:
    """Read with each of three S3 clients behind the loader: the measurement that the choice of a client is based on."""
    data = make("s3", settings.scale)
    with s3.serve(data) as server:
        contenders = [
            Contender(
                f"{client}, {how}",
                "ours/s3_clients.py",
                replace(job_of(data, workers, client=client), path=s3.url_of(data), s3=server.access),
                checksum=data.checksum,
                rows=data.rows,
            )
            for workers, how in ((0, "in process"), (2, "2 workers"))
            for client in ("s3fs", "pyarrow", "obstore")
        ]
        hooks = server.hooks(data)
        return _compare(settings, data, contenders, baseline="s3fs, in process", hooks=hooks, delay_ms=s3.DELAY_MS)


WORKLOADS: dict[str, Callable[[Settings], Results]] = {
    "numeric": _plain("numeric"),
    "tokens": _plain("tokens"),
    "groups_of_50k": _plain("groups_of_50k"),
    "groups_of_100k": _plain("groups_of_100k"),
    "small_files": _plain("small_files"),
    "small_files_of_strings": _plain("small_files_of_strings"),
    "strings": _strings,
    "values": _values,
    "categories": _categories,
    "wide": _wide,
    "uneven": _plain("uneven"),
    "orc": _format("orc"),
    "csv": _format("csv"),
    "jsonl": _format("jsonl"),
    "many_files": _many_files,
    "s3": _s3("s3", None),
    "s3_few": _s3("s3_few", None),
    "s3_large": _s3("s3_large", None),
    "s3_projected": _s3("s3_projected", ["f03", "f04", "f30", "f32", "f70", "id"]),
    "s3_many_files": _s3_many_files,
    "s3_clients": _s3_clients,
    "collate_1ms": _collate,
    "shuffle": _shuffle,
    "rows_shuffled": _rows_shuffled,
    "small_groups_shuffled": _small_groups_shuffled,
    "mixture": _mixture,
    "packing": _packing,
    "mixing_small": _mixing("labels_small", 500, [(f"buffer of {size:,} rows", size, 8) for size in (5_000, 50_000)]),
    "mixing_large": _mixing(
        "labels_large", 50_000, [(f"{count} side by side", 10_000, count) for count in INTERLEAVED]
    ),
    "grid": _grid,
    "steps": _steps,
    "resume": _resume,
    "epochs": _epochs(20, rounds=20),
    "epochs_200": _epochs(200, rounds=1),
    "memory": _memory,
}
