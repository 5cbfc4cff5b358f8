"""Excluded rows as ranges against sets of rows, and plans and orders of delivery without them."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support import examples, manifest_of, manifests, plan_options, row_ids

from torch_dataloader_utils.planning.excluded import NONE_EXCLUDED, ExcludedRows, Exclusions
from torch_dataloader_utils.planning.manifest import Manifest, Split
from torch_dataloader_utils.planning.plan import PlanOptions, Shard, ShardSlice
from torch_dataloader_utils.planning.planner import make_plan
from torch_dataloader_utils.planning.shuffle import delivered_rows, delivery_order, rows_of_splits

PATHS = st.sampled_from(["a", "b", "c/d"])
ROWS = st.dictionaries(PATHS, st.sets(st.integers(0, 60), max_size=30), max_size=3)


def as_set(rows: ExcludedRows) -> set[tuple[str, int]]:
    pairs = ((path, zip(bounds[::2], bounds[1::2], strict=True)) for path, bounds in rows.bounds.items())
    return {(path, row) for path, ranges in pairs for start, stop in ranges for row in range(start, stop)}


def all_of(rows: dict[str, set[int]]) -> set[tuple[str, int]]:
    return {(path, row) for path, of_file in rows.items() for row in of_file}


def excluded(rows: dict[str, set[int]]) -> ExcludedRows:
    return ExcludedRows.of({path: list(of_file) for path, of_file in rows.items()})


@given(rows=ROWS, others=ROWS)
@examples(400, part=16)
def test_ranges_are_what_sets_of_rows_are(rows, others):
    own, other = excluded(rows), excluded(others)
    assert as_set(own) == all_of(rows)
    assert own.rows == len(all_of(rows))
    assert bool(own) == bool(all_of(rows))
    assert as_set(own.union(other)) == all_of(rows) | all_of(others)
    assert as_set(own.minus(other)) == all_of(rows) - all_of(others)
    assert (own == other) == (all_of(rows) == all_of(others))
    assert own.union(other) == other.union(own)
    for bounds in own.union(other).bounds.values():
        assert len(bounds)
        assert (np.diff(bounds) > 0).all()


@given(rows=ROWS, path=PATHS, start=st.integers(0, 70), length=st.integers(0, 40))
@examples(400, part=16)
def test_rows_of_a_range_are_counted_and_marked(rows, path, start, length):
    own, inside = excluded(rows), [row in rows.get(path, ()) for row in range(start, start + length)]
    assert own.before(path, start) == sum(row < start for row in rows.get(path, ()))
    assert own.within(Split(path, start, length)) == sum(inside)
    assert own.left(Split(path, start, length)) == length - sum(inside)
    assert own.flags(path, start, start + length).tolist() == inside


@given(rows=ROWS, lengths=st.lists(st.integers(0, 25), min_size=3, max_size=3))
@examples(300, part=12)
def test_row_numbers_of_the_manifest_are_the_same_rows(rows, lengths):
    names = ("a", "b", "c/d")
    manifest = manifest_of(*([(length, 1)] for length in lengths))
    files = [(file.path, file.rows) for file in manifest.files]
    known = {files[names.index(path)]: of_file for path, of_file in rows.items()}
    own = ExcludedRows.of({path: [row for row in of_file if row < rows] for (path, rows), of_file in known.items()})
    numbers = own.row_numbers(manifest)
    assert (np.diff(numbers) > 0).all()
    assert ExcludedRows.of_row_numbers(numbers, files) == own


@given(st.lists(st.tuples(st.integers(0, 3), ROWS), max_size=5))
def test_rows_are_removed_in_their_epoch_and_left_out_of_later_ones(calls):
    exclusions, known = Exclusions(), dict[tuple[str, int], int]()
    for epoch, rows in calls:
        exclusions = exclusions.with_rows(excluded(rows), epoch)
        known = dict.fromkeys(all_of(rows), epoch) | known
    assert as_set(exclusions.all_rows) == known.keys()
    for epoch in range(5):
        found = exclusions.in_epoch(epoch)
        assert as_set(found.left_out) == {row for row, since in known.items() if since < epoch}
        assert as_set(found.removed) == {row for row, since in known.items() if since >= epoch}
    assert (exclusions.digest is None) == (not known)
    gone = exclusions.without_files(["b"])
    assert as_set(gone.all_rows) == {row for row in known if row[0] != "b"}


def some_rows(draw: st.DrawFn, manifest: Manifest) -> ExcludedRows:
    """Any rows of a manifest: few, many, whole row groups and files."""
    rows = {}
    for file in manifest.files:
        kind = draw(st.sampled_from(["none", "some", "most", "all"]))
        if file.rows and kind != "none":
            some = draw(st.sets(st.integers(0, file.rows - 1), max_size=40))
            rows[file.path] = {"some": some, "most": {*range(file.rows)} - some, "all": {*range(file.rows)}}[kind]
    return excluded(rows)


@st.composite
def manifests_with_rows(draw: st.DrawFn) -> tuple[Manifest, ExcludedRows]:
    manifest = draw(manifests())
    return manifest, some_rows(draw, manifest)


def ids(manifest: Manifest, rows: ExcludedRows) -> set[int]:
    return {manifest.first_rows[path] + row for path, row in as_set(rows)}


@given(
    manifests_with_rows(),
    plan_options(),
    st.integers(1, 4),
    st.integers(0, 3),
    st.sampled_from(["allow", "drop", "pad"]),
)
@examples(400, part=16)
def test_plan_without_excluded_rows_has_each_other_row_once(given_rows, options, num_ranks, num_workers, uneven):
    manifest, left_out = given_rows
    options = PlanOptions(
        options.split_bytes,
        options.split_rows,
        options.shuffle,
        options.shuffle_seed,
        options.shuffle_buffer_size,
        uneven_ranks=uneven,
        batch_size=None if uneven == "allow" else 5,
    )
    plan = make_plan(manifest, options, epoch=1, num_ranks=num_ranks, num_workers=num_workers, left_out=left_out)
    whole = make_plan(manifest, options, epoch=1, num_ranks=num_ranks, num_workers=num_workers)
    assert {part.shard for part in plan.slices} <= {part.shard for part in whole.slices}  # no shard changed
    seed, first = options.row_shuffle_seed, manifest.first_rows
    seen = [
        first[path] + row
        for rank in range(num_ranks)
        for stream in plan.rank_streams(rank)
        for path, row in delivered_rows(stream, seed=seed, epoch=1)
    ]
    balanced = plan.balanced
    parts = ([], []) if balanced is None else (balanced.dropped, balanced.repeated)
    dropped, repeated = (
        Counter(first[path] + row for path, row in delivered_rows(slices, seed=seed, epoch=1)) for slices in parts
    )
    wanted = set(range(manifest.rows)) - ids(manifest, left_out)
    assert Counter(seen) + dropped - repeated == Counter(wanted)
    if balanced is not None and wanted:
        assert (
            len({sum(part.rows for stream in plan.rank_streams(rank) for part in stream) for rank in range(num_ranks)})
            == 1
        )


@given(
    manifests_with_rows(),
    st.integers(1, 9),
    st.one_of(st.none(), st.integers(-3, 3)),
    st.lists(st.integers(0, 400), max_size=4),
)
@examples(400, part=16)
def test_order_of_delivery_and_counts_of_splits_agree(given_rows, rounds, seed, positions):
    manifest, left_out = given_rows
    splits = tuple(group.split for groups in manifest.row_group_splits for group in groups if group.split.row_length)
    if not splits:
        return
    rounds = 1 if seed is None else min(rounds, sum(split.row_length for split in splits))
    shard = Shard(splits, rounds, excluded=left_out)
    everything = row_ids(manifest, shard)
    order = [everything[row] for row in delivery_order(ShardSlice(shard), seed=seed, epoch=2)]
    assert len(order) == shard.rows
    assert set(order) == set(everything) - ids(manifest, left_out)
    stops = sorted({min(position, shard.rows) for position in positions})
    windows = [ShardSlice(shard, start, stop) for start, stop in zip([0, *stops], [*stops, shard.rows], strict=True)]
    cut = [delivery_order(window, seed=seed, epoch=2) for window in windows]
    assert [everything[row] for row in chain(*cut)] == order
    home = dict(zip(everything, np.repeat(range(len(splits)), [split.row_length for split in splits]), strict=True))
    for stop, counts in zip(stops, rows_of_splits(shard, stops, seed=seed, epoch=2), strict=True):
        assert counts.tolist() == np.bincount([home[row] for row in order[:stop]], minlength=len(splits)).tolist()
    if not left_out:
        assert shard.excluded == NONE_EXCLUDED
