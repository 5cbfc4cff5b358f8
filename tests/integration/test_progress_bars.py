"""Progress bars: the loader's own on a real terminal, and tqdm's around the loader. They end at 100 %."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
from pairwise import pairwise
from support import batches_of, open_loader, rows_of, write_dataset
from terminals import terminal
from tqdm import tqdm

pytestmark = [
    pytest.mark.usefixtures("leaves_nothing_behind"),
    pytest.mark.filterwarnings("ignore::torch_dataloader_utils.UnevenRanksWarning"),
]

FILTER = pc.field("value") < 300


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    write_dataset(directory)
    return directory


def show(path: Path, **options: Any) -> Any:
    return open_loader(path, show_progress=True, progress_interval_sec=0, **options)[0]


def take(batches: Iterator[Any], count: int) -> list[list[int]]:
    return [rows_of(next(batches)) for _ in range(count)]


def partly_delivered(path: Path, num_ranks: int, count: int, **options: Any) -> list[dict[str, Any]]:
    """Return the states of all ranks, of which rank r has delivered so many batches and r more."""
    states = []
    for rank in range(num_ranks):
        loader, _ = open_loader(path, num_ranks=num_ranks, rank=rank, **options)
        take(iter(loader), count + rank)
        states.append(loader.state_dict())
    return states


# The loader's own bar -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_the_bar_of_an_epoch_ends_at_100_percent_and_each_epoch_has_its_own(path, workers):
    with terminal() as screen:
        loader = show(path, num_workers=workers)
        counts = []
        for epoch in range(2):
            loader.set_epoch(epoch)
            counts.append(len(batches_of(loader)))
    assert screen.ends() == [("100%", f"{count}/{count}") for count in counts]
    assert [bar.split(":")[0] for bar in screen.lines()] == ["epoch 0", "epoch 1"]


def test_the_bar_of_a_strict_resume_begins_where_the_state_was_saved_and_ends_at_100_percent(path):
    with terminal() as screen:
        before, _ = open_loader(path)
        take(iter(before), 5)
        loader = show(path)
        loader.load_state_dict(before.state_dict())
        batches_of(loader)
    assert screen.ends() == [("100%", "28/28")]
    [drawn] = screen.frames()
    assert " 5/28" in drawn[0]


def test_the_bar_of_an_elastic_resume_ends_at_100_percent(path):
    with terminal() as screen:
        states = partly_delivered(path, 3, 2)
        loader = show(path, num_ranks=2, rank=0)
        loader.load_state_dict(states, strict=False)
        steps = 4 + len(batches_of(loader))  # the rank with most batches had delivered four
    assert screen.ends() == [("100%", f"{steps}/{steps}")]


def test_the_bar_of_an_epoch_of_unknown_length_ends_at_100_percent(path):
    with terminal() as screen:
        count = len(batches_of(show(path, filters=FILTER)))
    assert screen.ends() == [("100%", f"{count}/{count}")]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_bar_is_closed_by_a_break_and_the_next_epoch_draws_another(path, workers):
    with terminal() as screen:
        loader = show(path, num_workers=workers)
        for number, _ in enumerate(loader, 1):
            if number == 3:
                break
        print("after the break", file=sys.stderr)  # noqa: T201 - on a line of its own, if the bar is closed
        batches_of(loader)
    lines = screen.lines()
    assert lines[0].startswith("epoch 0:")
    assert " 3/" in lines[0]
    assert lines[1] == "after the break"
    assert "100%" in lines[2]


def fail_at_the_third(batch: Any) -> Any:
    if rows_of(batch)[0] >= 32:
        raise ValueError("made up")
    return batch


@pytest.mark.parametrize("workers", [0, 1])
def test_the_bar_is_closed_by_an_error(path, workers):
    with terminal() as screen:
        loader = show(path, num_workers=workers, collate_fn=fail_at_the_third)
        iterator = iter(loader)
        with pytest.raises(ValueError, match="made up"):
            list(iterator)
        print("after the error", file=sys.stderr)  # noqa: T201 - on a line of its own, if the bar is closed
    assert [("2/28" in bar, bar == "after the error") for bar in screen.lines()] == [(True, False), (False, True)]


def test_the_bar_of_an_iterator_that_is_left_is_closed_before_the_next_is_drawn(path):
    with terminal() as screen:
        loader = show(path)
        left = iter(loader)
        take(left, 2)
        batches_of(loader)
    assert [count for _, count in screen.ends()] == ["2/28", "28/28"]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_terminal_that_hangs_up_costs_no_batch(path, workers):
    with terminal() as screen:
        loader = show(path, num_workers=workers)
        iterator = iter(loader)
        seen = take(iterator, 3)
        screen.hang_up()
        assert seen + batches_of(iterator) == batches_of(open_loader(path, num_workers=workers)[0])


def test_without_a_terminal_nothing_is_written(path, capfd):
    batches_of(show(path))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("ranks", "process"), [((2, 1), 0), ((1, 0), 1)], ids=["another rank", "a peer of the first rank"]
)
def test_no_bar_is_shown_but_in_the_first_process(path, monkeypatch, ranks, process):
    with terminal() as screen:
        monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
        monkeypatch.setattr("torch.distributed.get_rank", lambda: process)
        num_ranks, rank = ranks
        monkeypatch.setattr("torch.distributed.get_world_size", lambda: num_ranks)
        batches_of(show(path, num_ranks=num_ranks, rank=rank))
    assert screen.lines() == []


def test_without_tqdm_an_error_says_what_to_install(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)  # as if it were not there
    with pytest.raises(ImportError, match="needs tqdm: pip install tqdm"):
        show(path)
    batches_of(open_loader(path)[0])


# tqdm around the loader -----------------------------------------------------------------------------------------------


def bar_around(loader: Any, batches: Any = None, **options: Any) -> Any:
    """Iterate with tqdm's bar, and return the bar."""
    bar = tqdm(loader if batches is None else batches, file=io.StringIO(), **loader.progress(**options))
    batches_of(bar)
    return bar


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bar_around_the_loader_ends_at_100_percent_in_every_epoch(path, workers):
    loader, _ = open_loader(path, num_workers=workers)
    take(iter(loader), 3)  # an iterator that is left
    for epoch in (0, 0, 1, 2):  # one epoch twice, without set_epoch
        if epoch:
            loader.set_epoch(epoch)
        bar = bar_around(loader)
        assert (bar.initial, bar.n, bar.total) == (0, len(loader), len(loader))


def test_a_bar_around_an_iterator_that_has_begun_ends_at_100_percent(path):
    loader, _ = open_loader(path)
    iterator = iter(loader)
    take(iterator, 3)
    bar = bar_around(loader, iterator)
    assert (bar.initial, bar.n, bar.total) == (3, 28, 28)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bar_after_a_strict_resume_ends_at_100_percent(path, workers):
    [state] = partly_delivered(path, 1, 5, num_workers=workers)
    loader, _ = open_loader(path, num_workers=workers)
    loader.load_state_dict(state)
    bar = bar_around(loader)
    assert (bar.initial, bar.n, bar.total) == (5, len(loader), len(loader))


@pairwise(most=3, num_ranks=[1, 2, 4], uneven_ranks=["allow", "drop"])
def test_a_bar_of_every_rank_after_an_elastic_resume_ends_at_100_percent(path, num_ranks, uneven_ranks):
    states = partly_delivered(path, 3, 2, uneven_ranks=uneven_ranks)
    steps = []
    for rank in range(num_ranks):
        loader, _ = open_loader(path, num_ranks=num_ranks, rank=rank, uneven_ranks=uneven_ranks)
        loader.load_state_dict(states, strict=False)
        bar = bar_around(loader)
        assert (bar.initial, bar.n) == (4, bar.total)
        steps.append(bar.n)
        loader.load_state_dict(states, strict=False)
        taken = iter(loader)
        take(taken, 1)
        again, _ = open_loader(path, num_ranks=num_ranks, rank=rank, uneven_ranks=uneven_ranks)
        again.load_state_dict(loader.state_dict())
        bar = bar_around(again)
        assert (bar.initial, bar.n, bar.total) == (5, steps[-1], steps[-1])
    assert uneven_ranks == "allow" or len(set(steps)) == 1


def test_the_length_of_an_epoch_that_only_reading_tells_is_none(path):
    loader, _ = open_loader(path, filters=FILTER)
    bar = bar_around(loader)
    assert (bar.initial, bar.total) == (0, None)
    [state] = partly_delivered(path, 1, 5, filters=FILTER)
    loader.load_state_dict(state)
    assert loader.progress() == {"initial": 5, "total": None}


@pytest.mark.parametrize("resumed", [False, True])
def test_ranks_in_step_have_the_total_of_the_rank_with_fewest_or_most_batches(path, resumed):
    loaders = [open_loader(path, num_ranks=3, rank=rank, split_rows=60)[0] for rank in range(3)]
    if resumed:
        states = partly_delivered(path, 2, 2, split_rows=60)
        for loader in loaders:
            loader.load_state_dict(states, strict=False)
    lengths = list(map(len, loaders))
    assert len(set(lengths)) > 1
    assert [loader.progress()["total"] for loader in loaders] == lengths
    assert [loader.progress("drop")["total"] for loader in loaders] == [min(lengths)] * 3
    assert [loader.progress("pad")["total"] for loader in loaders] == [max(lengths)] * 3
    with pytest.raises(ValueError, match="uneven='both'"):
        loaders[0].progress("both")


@pytest.mark.parametrize("is_missing", [True, False])
def test_no_bar_is_shown_where_standard_error_is_closed(path, monkeypatch, is_missing):
    expected = batches_of(open_loader(path)[0])
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr("sys.stderr", None if is_missing else closed)
    assert batches_of(show(path)) == expected
