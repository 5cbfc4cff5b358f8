"""Row ranges, each function compared with the same on sets of row numbers."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import examples, manifests

from torch_dataloader_utils.planning.manifest import Manifest, Split
from torch_dataloader_utils.planning.row_ranges import (
    Coverage,
    RowRange,
    first_overlap,
    gaps,
    merged,
    merged_row_numbers,
    merged_splits,
    row_numbers,
    size_of,
    splits_of_rows,
    without,
)

windows = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)).map(lambda pair: (pair[0], sum(pair))), max_size=9)
splits = st.lists(st.builds(Split, st.sampled_from(["a", "b", "c"]), st.integers(0, 30), st.integers(1, 8)), max_size=9)


def rows_in(ranges: object) -> set[int]:
    return {row for start, stop in ranges for row in range(start, stop)}


def rows_of_files(parts: object) -> set[tuple[str, int]]:
    return {(s.path, row) for s in parts for row in range(s.row_offset, s.row_offset + s.row_length)}


@given(windows)
def test_merged_windows_hold_the_same_rows_rise_and_do_not_touch(ranges):
    result = merged(ranges)
    assert rows_in(result) == rows_in(ranges)
    assert size_of(result) == len(rows_in(ranges))
    bounds = list(chain.from_iterable(result))
    assert bounds == sorted(set(bounds))
    assert merged(result) == result


@given(windows, st.integers(40, 50))
def test_gaps_are_the_rows_that_windows_leave(ranges, rows):
    assert rows_in(gaps(merged(ranges), rows)) == set(range(rows)) - rows_in(ranges)


@given(windows, windows)
def test_windows_without_others_are_the_rows_of_these_alone(ranges, others):
    left = without(merged(ranges), merged(others))
    assert rows_in(left) == rows_in(ranges) - rows_in(others)
    assert merged(left) == left


@given(splits)
def test_an_overlap_is_found_if_and_only_if_a_row_is_in_two_ranges(parts):
    pair = first_overlap(RowRange.of(part, str(index)) for index, part in enumerate(parts))
    assert (pair is None) == (len(rows_of_files(parts)) == sum(part.row_length for part in parts))
    if pair is not None:
        first, second = pair
        assert first.path == second.path
        assert rows_in([(first.start, first.stop)]) & rows_in([(second.start, second.stop)])
        assert first.recorded_by != second.recorded_by


@given(splits)
def test_merged_splits_hold_the_same_rows_in_order(parts):
    result = list(merged_splits(parts))
    assert rows_of_files(result) == rows_of_files(parts)
    assert result == sorted(result)
    assert first_overlap(map(RowRange.of, result)) is None


@given(splits, splits)
def test_a_split_is_covered_if_and_only_if_all_its_rows_are(parts, others):
    coverage = Coverage(parts)
    for other in others:
        assert coverage.covers(other) == (rows_of_files([other]) <= rows_of_files(parts))


@st.composite
def parts_of_manifests(draw: st.DrawFn) -> tuple[Manifest, list[Split]]:
    manifest = draw(manifests())
    groups = [group.split for groups in manifest.row_group_splits for group in groups if group.split.row_length]
    return manifest, draw(st.permutations([group for group in groups if draw(st.booleans())]))


@examples(60)
@given(parts_of_manifests())
def test_row_numbers_lead_back_to_the_same_rows(case):
    manifest, parts = case
    files = manifest.rows_by_file
    assert rows_of_files(splits_of_rows(files, row_numbers(manifest, parts))) == rows_of_files(parts)
    numbers = merged_row_numbers(manifest, parts)
    assert numbers == sorted(set(numbers))
    assert rows_of_files(splits_of_rows(files, numbers)) == rows_of_files(parts)


@given(manifests())
def test_a_manifest_finds_each_file_by_its_path_and_no_other(manifest):
    assert [manifest.file(file.path) for file in manifest.files] == list(manifest.files)
    others = {"", "\U0010ffff", *(f"{file.path}x" for file in manifest.files)}
    for path in others.difference(file.path for file in manifest.files):
        with pytest.raises(KeyError):
            manifest.file(path)
