"""Sources of a mixture that change between stops: new ones, ones that are gone, other files. Each row once a pass."""

from __future__ import annotations

import json
from collections import Counter
from itertools import count
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from torch_dataloader_utils import CheckpointMismatchError, LostRowsWarning, MixedDataset, Source, audit

WEIGHTS = {"web": 0.6, "code": 0.3, "math": 0.1}


class Disk:
    """Sources on disk whose files change. Each row has a number of its own, whatever becomes of its file."""

    def __init__(self, root, names) -> None:
        self.root = root
        self.numbers = count()
        self.rows: dict[str, dict[str, range]] = {}
        self.filtered: dict[str, Any] = {}
        for name in names:
            self.rows[name] = {}
            (root / name).mkdir()
            for part in range(3):
                self.write(name, f"part-{part}", 60 + 10 * part)

    def write(self, name, part, rows, group=20):
        first = next(self.numbers)
        self.numbers = count(first + rows)
        self.rows[name][part] = range(first, first + rows)
        values = np.arange(first, first + rows)
        table = pa.table({"x": values, "third": values % 3})
        pq.write_table(table, self.root / name / f"{part}.parquet", row_group_size=group)

    def remove(self, name, part):
        (self.root / name / f"{part}.parquet").unlink()
        return self.rows[name].pop(part)

    def of(self, name):
        return {row for rows in self.rows[name].values() for row in rows}

    def open(self, weights: Any = WEIGHTS, ranks=1, **options: Any):
        sources = {name: Source(self.root / name, columns=["x"], **self.filtered) for name in weights}
        given = {"rows_per_epoch": 240, "batch_size": 12, "num_workers": 0, "shuffle": True, "shuffle_buffer_size": 60}
        return [
            MixedDataset.create_dataloader(sources, weights, num_ranks=ranks, rank=rank, **{**given, **options})[0]
            for rank in range(ranks)
        ]


@pytest.fixture
def disk(tmp_path):
    return Disk(tmp_path, WEIGHTS)


def deliver(loaders, taken, steps=None):
    """Deliver so many steps of each rank, or all that are left; return the states."""
    states = []
    for loader in loaders:
        for made, batch in enumerate(loader, start=1):
            taken.update(batch["x"].tolist())
            if made == steps:
                break
        states.append(json.loads(json.dumps(loader.state_dict())))
    return states


def deliver_epochs(loaders, taken, epochs):
    for epoch in epochs:
        for loader in loaders:
            loader.set_epoch(epoch)
        deliver(loaders, taken)


def load(loaders, states, **options: Any):
    for loader in loaders:
        loader.load_state_dict(states, strict=False, **options)
    return loaders


def require_once_a_pass(taken, rows):
    counts = {taken[row] for row in rows}
    assert max(counts) - min(counts) <= 1, sorted((row, taken[row]) for row in rows)


def test_a_source_is_added_on_an_elastic_load_and_no_other_begins_anew(disk):
    taken = Counter()
    states = deliver(disk.open({"web": 1, "math": 1}, ranks=2, num_workers=1), taken, 5)
    with pytest.raises(CheckpointMismatchError, match=r"sources.*web.*math.*code"):
        disk.open(WEIGHTS)[0].load_state_dict(states[0])
    loaders = load(disk.open(WEIGHTS, ranks=3, batch_size=4, num_workers=1), states)
    first = Counter()
    states = deliver(loaders, first, 5)
    for name, rows in {"web": 36, "code": 18, "math": 6}.items():
        assert abs(sum(first[row] for row in disk.of(name)) - rows) < 3  # less than one row off on each rank
    taken += first
    loader = disk.open(WEIGHTS)
    deliver(load(loader, states), taken)
    assert taken.total() == 240
    deliver_epochs(loader, taken, range(1, 6))
    for name in WEIGHTS:
        require_once_a_pass(taken, disk.of(name))
    assert sum(taken[row] for row in disk.of("code")) > 5 * 0.3 * 240


def test_a_source_that_is_gone_needs_permission_and_the_others_go_on(disk):
    taken = Counter()
    states = deliver(disk.open(WEIGHTS, ranks=2), taken, 5)
    left = {"web": 1, "math": 1}
    with pytest.raises(CheckpointMismatchError, match=r"sources.*web.*code.*math(.|\n)*on_changed_files='continue'"):
        disk.open(left)[0].load_state_dict(states, strict=False)
    [loader] = disk.open(left)
    with pytest.warns(LostRowsWarning, match=r"code@0/part-0"):
        loader.load_state_dict(states, strict=False, on_changed_files="continue")
    rest = Counter()
    kept = deliver([loader], rest, 4)
    assert not {*rest} & disk.of("code")
    [again] = disk.open(left)
    again.load_state_dict(kept[0])
    other = Counter()
    deliver([again], other)
    [loader] = load(disk.open(left), kept)
    deliver([loader], rest)
    taken += rest
    assert taken.total() == 240  # what was delivered of the source that is gone counts as rows of the epoch
    deliver_epochs([loader], taken, range(1, 6))
    for name in left:
        require_once_a_pass(taken, disk.of(name))
    assert all(taken[row] <= 1 for row in disk.of("code"))


def test_other_orders_of_sources_are_named(disk):
    states = deliver(disk.open(WEIGHTS), Counter(), 3)
    turned = {"code": 0.3, "web": 0.6, "math": 0.1}
    for options in ({}, {"strict": False}):
        with pytest.raises(CheckpointMismatchError, match=r"order of sources changed: checkpoint=\('web', 'code'"):
            disk.open(turned)[0].load_state_dict(states, **options)


@pytest.mark.parametrize("begun", [0, 3], ids=["in the first epoch", "in a later epoch"])
def test_files_of_one_source_that_change_are_refused_or_exact(disk, begun):
    taken = Counter()
    loaders = disk.open(WEIGHTS, ranks=2, batch_size=6)
    deliver_epochs(loaders, taken, range(begun))
    for loader in loaders:
        loader.set_epoch(begun)
    states = deliver(loaders, taken, 7)
    place = states[0]["mixture"]["sources"][1]["position"][0]
    removed = disk.remove("code", "part-1")
    rewritten = disk.rows["code"]["part-2"]
    disk.write("code", "part-2", 85)
    disk.write("code", "part-9", 50)
    with pytest.raises(CheckpointMismatchError) as refused:
        disk.open(WEIGHTS)[0].load_state_dict(states, strict=False)
    assert refused.value.files_added == ("code/part-9.parquet",)
    assert refused.value.files_removed == ("code/part-1.parquet",)
    assert refused.value.files_changed == ("code/part-2.parquet",)
    before = taken.copy()
    loaders = disk.open(WEIGHTS, ranks=3, batch_size=4)
    with pytest.warns(LostRowsWarning) as warned:
        load(loaders, states, on_changed_files="continue")
    lost = [row for row in (*removed, *rewritten) if before[row] == place]
    assert f"{len(lost)} rows can no longer be delivered" in str(warned[0].message)
    states = deliver(loaders, taken, 3)
    [loader] = load(disk.open(WEIGHTS), states)
    deliver([loader], taken)
    assert taken.total() == 240 * (begun + 1)
    deliver_epochs([loader], taken, range(begun + 1, begun + 8))
    for name in ("web", "math"):
        require_once_a_pass(taken, disk.of(name))
    assert all(taken[row] == before[row] for row in (*removed, *rewritten))
    stable, added, renewed = (disk.rows["code"][part] for part in ("part-0", "part-9", "part-2"))
    require_once_a_pass(taken, stable)
    passes = min(taken[row] for row in stable)
    assert {taken[row] for row in added} <= {passes - place, passes + 1 - place}
    assert {taken[row] for row in renewed} <= {passes - place - 1, passes - place}


def test_a_shard_in_which_an_epoch_begins_and_has_rows_ahead_is_recorded_once(tmp_path):
    disk = Disk(tmp_path, ())
    disk.rows["web"] = {}
    (tmp_path / "web").mkdir()
    disk.write("web", "part-0", 40, group=40)
    options = {"batch_size": 5, "shuffle": False, "shuffle_buffer_size": None}
    taken: Counter[int] = Counter()
    three = disk.open({"web": 1}, 3, rows_per_epoch=30, **options)
    states = [deliver([loader], taken, steps)[0] for loader, steps in zip(three[1:], (1, 1), strict=True)]
    states.insert(0, json.loads(json.dumps(three[0].state_dict())))
    [one] = load(disk.open({"web": 1}, rows_per_epoch=20, **options), states)
    deliver_epochs([one], taken, [0])
    one.set_epoch(1)  # it begins at row 15, and rows 20 to 24 of the same shard are delivered
    states = deliver([one], taken, 1)
    disk.write("web", "part-1", 10)
    [again] = load(disk.open({"web": 1}, rows_per_epoch=20, **options), states, on_changed_files="continue")
    states = deliver([again], taken, 1)
    [last] = disk.open({"web": 1}, rows_per_epoch=20, **options)
    last.load_state_dict(states[0])
    deliver([last], taken)
    assert audit(states).total.twice == 0
    assert [taken[row] for row in range(35)] == [1] * 35
    deliver_epochs([last], taken, [2, 3])
    require_once_a_pass(taken, disk.of("web"))


def test_rows_of_a_removed_file_of_a_source_that_rests_are_counted(tmp_path):
    disk = Disk(tmp_path, ())
    for name, parts in {"web": 2, "code": 1}.items():
        disk.rows[name] = {}
        (tmp_path / name).mkdir()
        for part in range(parts):
            disk.write(name, f"part-{part}", 50, group=1)

    def opened(weight):
        return disk.open({"web": weight, "code": 1}, rows_per_epoch=30, batch_size=5, shuffle_buffer_size=100)

    [loader] = opened(1)
    loader.set_epoch(1)  # it begins within the only shard of the source's first pass
    state = json.loads(json.dumps(loader.state_dict()))
    removed = disk.remove("web", "part-0")
    with pytest.warns(LostRowsWarning):
        [loader] = load(opened(0), [state], on_changed_files="continue")
    total = audit([json.loads(json.dumps(loader.state_dict()))]).total
    assert 0 < total.missing <= len(removed)
    assert 15 <= total.done + total.under_way < 30  # each source gave 15 rows: those of the removed file do not count


@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.soak)])
def test_strict_resumes_after_files_have_changed_deliver_equal_batches(disk, every):
    loaders = disk.open(WEIGHTS, ranks=2, batch_size=6)
    states = deliver(loaders, Counter(), 7)
    disk.remove("code", "part-1")
    disk.write("web", "part-9", 50)
    [loader] = disk.open(WEIGHTS)
    with pytest.warns(LostRowsWarning):
        loader.load_state_dict(states, strict=False, on_changed_files="continue")
    for epoch in range(4):
        loader.set_epoch(epoch)
        kept = [json.loads(json.dumps(loader.state_dict()))]
        whole = []
        for batch in loader:
            whole.append(batch["x"].tolist())
            kept.append(json.loads(json.dumps(loader.state_dict())))
        loader.set_epoch(epoch + 1)
        following = next(iter(loader))["x"].tolist()
        for step in range(epoch % every, len(kept), every):
            [resumed] = disk.open(WEIGHTS)
            resumed.load_state_dict(kept[step])
            assert [batch["x"].tolist() for batch in resumed] == whole[step:]
            resumed.set_epoch(epoch + 1)
            assert next(iter(resumed))["x"].tolist() == following
        loader.set_epoch(epoch + 1)


class Change:
    """A file that was written while a run was under way, and the first pass that has its rows."""

    def __init__(self, rows, first) -> None:
        self.rows, self.first = rows, first


class Walk:
    """A run whose files change at random between its stops."""

    def __init__(self, root, seed) -> None:
        self.random = Random(seed)
        self.names = [f"source {number}" for number in range(self.random.randint(1, 3))]
        self.disk = Disk(root, self.names)
        if self.random.random() < 0.3:
            self.disk.filtered = {"filters": pc.field("third") > 0, "count_rows": True}
        shuffles = self.random.random() < 0.7
        self.options: dict[str, Any] = {
            "rows_per_epoch": self.random.randint(20, 300),
            "shuffle": shuffles,
            "shuffle_buffer_size": self.random.choice([10, 60, 400]) if shuffles else None,
            "uneven_ranks": self.random.choice(["drop", "pad"]),
        }
        self.taken = Counter()
        self.changes: dict[str, list[Change]] = {name: [] for name in self.names}

    def change(self):
        """Add, remove and rewrite files, never a source's first; return those written, and whether each is new."""
        written = []
        for name in self.names:
            if self.random.random() < 0.5:
                continue
            parts = [part for part in self.disk.rows[name] if part != "part-0"]
            kind = self.random.choice(["add", "remove", "rewrite"])
            part = self.random.choice(parts) if parts else None
            gone = self.disk.rows[name].get(part) if kind != "add" and part else None
            self.changes[name] = [change for change in self.changes[name] if change.rows != gone]
            if kind == "remove" and part:
                self.disk.remove(name, part)
            elif kind == "rewrite" and part:
                self.disk.write(name, part, self.random.randint(1, 70), self.random.randint(5, 30))
                written.append((name, part, False))
            else:
                part = f"part-{self.random.randint(100, 10**6)}"
                self.disk.write(name, part, self.random.randint(1, 70), self.random.randint(5, 30))
                written.append((name, part, True))
        return written

    def note(self, written, loader):
        """Note from which pass on the rows of written files come."""
        sources = {source["name"]: source for source in loader.state_dict()["mixture"]["sources"]}
        for name, part, is_new in written:
            first = sources[name]["position"][0]
            if not is_new:
                left_out = [
                    number for number, paths in sources[name]["changed"] if f"{name}@{number}/{part}.parquet" in paths
                ]
                first = max([first - 1, *left_out]) + 1
            self.changes[name].append(Change(self.disk.rows[name][part], first))

    def walk(self):
        states, epoch, written = None, 0, []
        weights = {name: self.random.choice([1, 2, 0.3]) for name in self.names}
        for _ in range(self.random.randint(3, 6)):
            ranks = self.random.randint(1, 3)
            loaders = self.disk.open(weights, ranks, batch_size=self.random.randint(1, 20), **self.options)
            if states:
                load(loaders, states, on_changed_files="continue")
                self.note(written, loaders[0])
            last = epoch + self.random.randint(0, 2)
            for whole in range(epoch, last + 1):
                for loader in loaders:
                    loader.set_epoch(whole)
                steps = None if whole < last else self.random.choice([None, 1, 3, 7])
                states = deliver(loaders, self.taken, steps)
            epoch = last
            written = self.change()
        [loader] = load(self.disk.open(weights, **self.options), states, on_changed_files="continue")
        self.note(written, loader)
        for whole in range(epoch, epoch + 40):
            loader.set_epoch(whole)
            deliver([loader], self.taken)
        loader.set_epoch(epoch + 40)  # by now nothing is carried
        finished = {of["name"]: of["position"][0] for of in loader.state_dict()["mixture"]["sources"]}
        for name in self.names:
            for change in (Change(self.disk.rows[name]["part-0"], 0), *self.changes[name]):
                passes = finished[name] - change.first
                rows = [row for row in change.rows if row % 3 or not self.disk.filtered]
                assert {self.taken[row] for row in rows} <= {passes, passes + 1}, (name, change.first)


@pytest.mark.filterwarnings("ignore::torch_dataloader_utils.LostRowsWarning")
@pytest.mark.parametrize(
    "seed",
    # Two sources without a filter, and one source with a filter.
    [pytest.param(seed, marks=[] if seed in (0, 2) else pytest.mark.soak) for seed in range(6)],
)
def test_rows_come_once_a_pass_however_files_change(tmp_path, seed):
    Walk(tmp_path, seed).walk()


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::torch_dataloader_utils.LostRowsWarning")
@pytest.mark.parametrize("seed", range(100, 250))
def test_rows_come_once_a_pass_in_many_walks_with_changing_files(tmp_path, seed):
    Walk(tmp_path, seed).walk()
