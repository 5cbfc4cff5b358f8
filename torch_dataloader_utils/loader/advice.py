"""One sentence from the metrics: whether the loader or the model is the bottleneck, and what to change. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch_dataloader_utils.loader.metrics import MetricsReading
from torch_dataloader_utils.reading.work import STAGES, Counters, Stage

EARLY_SEC = 5.0
EARLY_BATCHES = 10
"""Nothing is advised before so many seconds have passed since the first batch, and so many batches were delivered."""

SMALL_SHARE = 0.05
"""The part of the training loop's time up to which its waiting does not matter."""

HALF = 0.5

BUSY_SHARE = 0.8
"""The part of the CPUs that is busy where more workers would only share them."""

DOING: Mapping[Stage, str] = {
    "waiting_for_storage_sec": "waiting for the storage",
    "decoding_sec": "decoding",
    "converting_sec": "converting",
    "collating_sec": "in collate_fn",
    "packing_sec": "copying batches",
}

WITH_MORE_WORKERS: Mapping[Stage, str] = {
    "waiting_for_storage_sec": "a larger read_ahead_bytes or ",
    "collating_sec": "a faster collate_fn or ",
}
"""What else helps where CPUs are idle."""

WITHOUT_MORE_WORKERS: Mapping[Stage, str] = {
    "waiting_for_storage_sec": "a larger read_ahead_bytes or fewer columns",
    "decoding_sec": "fewer columns or a compression that is faster to decode",
    "converting_sec": "fewer columns or another output_format",
    "collating_sec": "a faster collate_fn",
    "packing_sec": "fewer columns",
}
"""What helps where no CPU is idle."""


def advise(metrics: MetricsReading, *, num_workers: int, cpus: int, threads: int) -> str:
    """Return whether the loader or the model is the bottleneck, with the figures that say so, and what to change.

    `num_workers` is 0 where the training process reads, in which so many threads decode. `cpus` are those of this rank.
    """
    waiting, working = metrics.seconds.waiting_sec, metrics.seconds.between_batches_sec
    passed, batches = waiting + working, metrics.counts["batches_delivered"]
    if passed < EARLY_SEC or batches < EARLY_BATCHES:
        taken = f"{batches} batch{'' if batches == 1 else 'es'}, {passed:.1f} s after the first came"
        return f"Too early to say what the bottleneck is: the training loop has taken {taken}."
    waited = f"the training loop waited {_percent(waiting / passed)} of the time for batches."
    if waiting < SMALL_SHARE * passed:
        return f"The model is the bottleneck: {waited} A faster loader would not help."
    counters = [worker.counters for worker in metrics.workers]
    if num_workers:
        reading = _about_workers(counters, num_workers, cpus)
    else:
        reading = _about_this_process(counters, cpus, threads)
    return f"The loader is the bottleneck: {waited} {reading}"


def _about_workers(workers: Sequence[Counters], num_workers: int, cpus: int) -> str:
    total, waited = (_seconds(workers, stages) for stages in (STAGES, STAGES[-1:]))
    if all(_seconds([worker], STAGES[-1:]) >= HALF * _seconds([worker], STAGES) for worker in workers):
        text = f"Workers waited {_percent(waited / (total or 1))} of theirs for it: batches take long on their way, so "
        return f"{text}larger batches or fewer columns would help (num_workers={num_workers})."
    stage = max(DOING, key=lambda stage: _seconds(workers, [stage]))
    busy = sum(worker.cpu_sec / (_seconds([worker], STAGES) or 1) for worker in workers)
    spent = f"Workers spent {_percent(_seconds(workers, [stage]) / total)} of theirs {DOING[stage]}"
    figures = f"num_workers={num_workers}, which kept {busy:.1f} of {cpus} CPU{'' if cpus == 1 else 's'} busy"
    return f"{spent}: {_remedy(stage, 'more workers', is_busy=busy >= BUSY_SHARE * cpus)} would help ({figures})."


def _about_this_process(counters: Sequence[Counters], cpus: int, threads: int) -> str:
    total = _seconds(counters, STAGES[:-1])
    stage = max(DOING, key=lambda stage: _seconds(counters, [stage]))
    busy = sum(one.cpu_sec for one in counters) / (_seconds(counters, STAGES) or 1)
    spent = f"{_percent(_seconds(counters, [stage]) / (total or 1))} of that was spent {DOING[stage]}"
    figures = f"num_workers=0; the process kept {busy:.1f} of {cpus} CPU{'' if cpus == 1 else 's'} busy"
    remedy = _remedy(stage, "worker processes", is_busy=busy >= BUSY_SHARE * cpus)
    if stage == "decoding_sec" and threads < cpus:
        remedy = f"more threads for Arrow (OMP_NUM_THREADS or pyarrow.set_cpu_count; it has {threads}) or {remedy}"
    return f"{spent}: {remedy} would help ({figures})."


def _remedy(stage: Stage, workers: str, *, is_busy: bool) -> str:
    return WITHOUT_MORE_WORKERS[stage] if is_busy else f"{WITH_MORE_WORKERS.get(stage, '')}{workers}"


def _seconds(counters: Iterable[Counters], stages: Iterable[Stage]) -> float:
    names = tuple(stages)
    return float(sum(getattr(one, name) for one in counters for name in names))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
