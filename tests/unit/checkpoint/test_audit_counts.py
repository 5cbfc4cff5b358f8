"""What states record of each file is what was delivered of it: by one rank or all, and by earlier runs."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from deliveries import Delivery, stopped, through_json
from hypothesis import given
from hypothesis import strategies as st
from support import edited, examples, manifest_of, manifests, plan_options

from torch_dataloader_utils import RankMismatchError
from torch_dataloader_utils.checkpoint.audit import Today, audit_states
from torch_dataloader_utils.checkpoint.audit_result import Audit
from torch_dataloader_utils.checkpoint.merge.states import merge_states
from torch_dataloader_utils.checkpoint.parse.states import parse_states
from torch_dataloader_utils.checkpoint.row_counts import Axis, Depth
from torch_dataloader_utils.checkpoint.run import Run
from torch_dataloader_utils.planning.manifest import DataFile, Manifest
from torch_dataloader_utils.planning.plan import PlanOptions
from torch_dataloader_utils.planning.topology import Topology

NUMBERS = ("done", "under_way", "left", "missing", "unknown", "dropped", "skipped", "excluded", "ruled_out")
"""What the rows of a file are divided into."""

FILES = manifest_of([(50, 9), (30, 9)], [(20, 9)], [(70, 9), (10, 9)])
SHUFFLED = PlanOptions(2**27, shuffle=True, shuffle_buffer_size=60, split_rows=60)


def ranks_of(
    manifest: Manifest, options: PlanOptions, num_ranks: int, *, workers: int = 0, takes_every: int = 0, size: int = 4
) -> list[Delivery]:
    """All ranks of a run."""
    uneven = options.uneven_ranks
    options = replace(options, batch_size=None if uneven == "allow" else size)
    digest = f"every {takes_every}" if takes_every else None
    runs = [Run(manifest, options, digest, Topology(num_ranks, rank, workers)) for rank in range(num_ranks)]
    return [Delivery(run, 1, takes_every, size, drop_last=False, tells_ends_late=False) for run in runs]


def delivered(ranks: Sequence[Delivery], after: Sequence[int], earlier: Any = None) -> tuple[list[int], list[Any]]:
    """Let each rank deliver some batches: all rows, and the states."""
    rows, states = [], []
    for delivery, stop in zip(ranks, after, strict=True):
        batches, progress = stopped(delivery, delivery.fresh(earlier), stop)
        rows += [row for batch in batches for row in batch]
        states.append(through_json(delivery.state(progress)))
    return rows, states


def audited(states: Iterable[Any], today: Today | None = None) -> Audit:
    found = audit_states(parse_states(list(states)), today)
    for one in (found.total, *found.files):
        assert one.rows == sum(getattr(one, name) for name in NUMBERS), one
        assert min(getattr(one, name) for name in (*NUMBERS, "twice", "repeated")) >= 0
    for name in (*NUMBERS, "rows", "twice", "repeated"):
        assert getattr(found.total, name) == sum(getattr(file, name) for file in found.files)
    return found


def by_file(manifest: Manifest, rows: Iterable[int]) -> dict[str, int]:
    """How many rows are of each file."""
    starts = [*manifest.first_rows.values()]
    counts = Counter(manifest.files[bisect_right(starts, row) - 1].path for row in rows)
    # A file without rows begins where the next one does: no row is of it.
    return {file.path: counts[file.path] if file.rows else 0 for file in manifest.files}


class TestWhatWasDelivered:
    @given(st.data())
    @examples(160, part=8)
    def test_the_counts_of_each_file_are_the_rows_that_ranks_delivered_one_group_after_the_other(self, data):
        manifest = data.draw(manifests())
        options = replace(data.draw(plan_options()), shuffle_interleave=data.draw(st.integers(1, 4)))
        everything: list[int] = []
        earlier = None
        padding = 0
        for _ in range(data.draw(st.integers(1, 3))):
            uneven = data.draw(st.sampled_from(["allow", "drop", "pad"]))
            count, workers, size = (data.draw(st.integers(*bounds)) for bounds in ((1, 3), (0, 2), (1, 9)))
            group = ranks_of(manifest, replace(options, uneven_ranks=uneven), count, workers=workers, size=size)
            after = data.draw(st.lists(st.integers(0, 20), min_size=count, max_size=count))
            rows, states = delivered(group, after, earlier)
            everything += rows
            found = audited(states)
            counts = {file.path: file.done + file.under_way for file in found.files}
            padding += count - 1 if uneven == "pad" else 0
            missing = by_file(manifest, set(everything))
            missing = {path: rows_of_file - counts[path] for path, rows_of_file in missing.items()}
            # A row that only padding has delivered is of the rank to whose part it belongs, and left.
            assert min(missing.values(), default=0) >= 0
            assert sum(missing.values()) <= padding
            assert found.total.twice == found.total.unknown == found.total.missing == 0
            assert found.total.repeated == len(rows) - len(set(rows)) or uneven == "pad"
            assert found.batches == max(state["batches_delivered"] for state in states)
            assert found.is_fine
            earlier = merge_states(parse_states(states), group[0].run).baseline

    @given(manifests(), plan_options(), st.integers(1, 3), st.integers(0, 2))
    @examples(60)
    def test_at_the_end_of_a_balanced_epoch_what_is_left_over_is_dropped(self, manifest, options, count, workers):
        group = ranks_of(manifest, replace(options, uneven_ranks="drop"), count, workers=workers)
        rows, states = delivered(group, [10**6] * count)
        found = audited(states)
        assert found.total.left == 0
        assert found.total.dropped == manifest.rows % count == manifest.rows - len(set(rows))

    @given(manifests(), plan_options())
    @examples(60)
    def test_rows_repeated_by_padding_count_as_repeated_and_not_as_twice(self, manifest, options):
        group = ranks_of(manifest, replace(options, uneven_ranks="pad"), 2)
        rows, states = delivered(group, [10**6] * 2)
        found = audited(states)
        assert found.total.repeated == len(rows) - manifest.rows
        assert (found.total.twice, found.total.left) == (0, 0)

    @given(manifests(), plan_options(), st.integers(0, 12), st.sampled_from([2, 5]))
    @examples(60)
    def test_with_a_filter_the_counts_bound_what_was_delivered(self, manifest, options, stop, takes_every):
        group = ranks_of(manifest, options, 1, takes_every=takes_every)
        rows, states = delivered(group, [stop])
        found = audited(states)
        counts = by_file(manifest, rows)
        assert all(file.done + file.under_way >= counts[file.path] for file in found.files)
        assert "before the filter" in found.notes[0]


class TestSomeRanks:
    def test_one_rank_alone_tells_what_it_delivered_and_of_the_others_that_it_is_not_known(self):
        group = ranks_of(FILES, SHUFFLED, 3)
        _, states = delivered(group, [3, 4, 5])
        alone, _ = delivered(group[1:2], [4])
        found = audited([states[1]])
        assert {file.path: file.done + file.under_way for file in found.files} == by_file(FILES, alone)
        assert found.total.unknown == FILES.rows - len(alone)
        assert (found.total.left, found.total.missing) == (0, 0)
        assert [(rank.rank, rank.batches, rank.rows) for rank in found.ranks] == [(1, 4, len(alone))]
        assert "ranks [0, 2] are not given" in found.notes[0]
        assert found.is_fine
        assert audited(states).total.unknown == 0

    def test_two_states_of_a_rank_and_states_of_two_runs_are_told_in_words_and_by_rows_that_are_there_twice(self):
        group = ranks_of(FILES, SHUFFLED, 2)
        early, late = delivered(group, [2, 2])[1], delivered(group, [5, 5])[1]
        both = audited([early[0], late[0], late[1]])
        assert "states of ranks [0] are given more than once" in both.problems[0]
        assert both.total.twice == 8  # the two batches of the first state
        assert both.total.done + both.total.under_way == 40
        other = delivered(ranks_of(FILES, replace(SHUFFLED, shuffle_seed=3), 2), [5, 5])[1]
        mixed = audited([late[0], other[1]])
        assert "ranks [1] were saved under other settings than rank 0" in mixed.problems[0]
        assert not mixed.is_fine
        several = delivered(ranks_of(FILES, SHUFFLED, 3), [5, 5, 5])[1]
        assert "different numbers of ranks: [2, 3]" in audited([late[0], several[1]]).problems[0]

    def test_an_earlier_resume_that_not_all_ranks_share_is_told(self):
        group = ranks_of(FILES, SHUFFLED, 2)
        _, states = delivered(group, [2, 2])
        baseline = merge_states(parse_states(states), group[0].run).baseline
        _, later = delivered(group, [3, 3], baseline)
        found = audited([states[0], later[1]])
        assert "other earlier progress" in " ".join(found.problems)
        assert found.total.twice == 8  # rank 0 has two batches that the earlier progress has, too

    def test_states_of_two_epochs_or_of_two_lists_of_files_cannot_be_counted_together(self):
        [own] = delivered(ranks_of(FILES, SHUFFLED, 1), [3])[1]
        with pytest.raises(RankMismatchError, match="other epochs than"):
            audited([own, edited(own, epoch=2)])
        other = delivered(ranks_of(manifest_of([(10, 9)]), SHUFFLED, 1), [1])[1]
        with pytest.raises(RankMismatchError, match="other files than"):
            audited([own, *other])


class TestTodaysFiles:
    def changed(self, number: int, **changes: Any) -> Manifest:
        files = list(FILES.files)
        files[number] = files[number]._replace(**changes)
        return Manifest(FILES.root, tuple(files))

    def audited(self, manifest: Manifest) -> Audit:
        _, states = delivered(ranks_of(FILES, SHUFFLED, 2), [3, 3])
        return audited(states, Today(manifest))

    def test_the_same_files_match(self):
        found = self.audited(FILES)
        assert found.files_match is True
        assert found.differences == ()
        assert found.is_fine

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"size": 7}, "had 102 bytes, has 7"),
            ({"digest": "0123456789abcdef"}, "has the same size and other content"),
        ],
        ids=["size", "footer"],
    )
    def test_a_changed_file_is_told_in_words_and_what_was_left_of_it_is_missing(self, changes, words):
        found = self.audited(self.changed(0, **changes))
        first, *others = found.files
        assert (first.change, first.left) == (words, 0)
        assert first.missing == first.rows - first.done - first.under_way > 0
        assert not any(file.change or file.missing for file in others)
        assert found.files_match is False
        assert found.differences == (f"files changed since the checkpoint: {first.path}",)
        assert not found.is_fine

    def test_a_removed_file_and_an_added_one_are_told(self):
        files = [*FILES.files[1:], DataFile("z", 9, "0" * 16, ())]
        found = self.audited(Manifest(FILES.root, tuple(files)))
        assert found.files[0].change == "removed since the checkpoint"
        assert found.files[0].missing > 0
        assert (found.files[-1].path, found.files[-1].rows) == ("z", 0)
        assert found.files[-1].change == "added since the checkpoint"
        assert len(found.differences) == 2

    def test_of_one_rank_alone_what_a_changed_file_had_left_is_unknown(self):
        _, states = delivered(ranks_of(FILES, SHUFFLED, 2), [3, 3])
        found = audited([states[0]], Today(self.changed(0, size=7)))
        assert found.total.missing == 0
        assert found.files[0].unknown > 0

    def test_files_whose_footers_are_described_at_one_time_only_are_not_called_missing(self):
        described = self.changed(0, digest="_metadata:0123")
        found = self.audited(described)
        assert "cannot be compared" in str(found.files[0].change)
        assert found.total.missing == 0
        assert found.files_match is False

    def test_files_that_changed_during_the_epoch_are_missing_as_far_as_they_are_known(self):
        group = ranks_of(FILES, SHUFFLED, 2)
        _, states = delivered(group, [3, 3])
        now = self.changed(1, size=7, digest="0123456789abcdef")
        later = ranks_of(now, SHUFFLED, 2)
        baseline = merge_states(parse_states(states), later[0].run, on_changed_files="continue").baseline
        _, states = delivered(later, [10**6] * 2, baseline)
        found = audited(states)
        changed = found.files[1]
        assert changed.change == "removed or rewritten during the epoch"
        assert changed.missing == changed.rows > 0
        assert found.total.left == 0

    def test_row_groups_that_the_filter_rules_out_are_told_apart_with_the_dataset(self):
        [delivery] = ranks_of(FILES, PlanOptions(2**27), 1, takes_every=5)
        state = through_json(delivery.state(delivery.fresh()))
        found = audited([state], Today(FILES, selection=((0,), (0,), ())))
        assert [file.ruled_out for file in found.files] == [30, 0, 80]
        assert [file.left for file in found.files] == [50, 20, 0]


def many_files(count: int) -> Manifest:
    return Manifest("/data", tuple(FILES.files[1]._replace(path=f"{number:06d}") for number in range(count)))


class TestFilesThatAreNotListed:
    def test_above_ten_thousand_files_there_are_totals_and_with_the_files_numbers_for_each(self):
        manifest = many_files(10_001)
        [delivery] = ranks_of(manifest, replace(SHUFFLED, split_rows=2000, shuffle_buffer_size=2000), 1, size=3000)
        rows, [state] = delivered([delivery], [3])
        assert state["files"] is None
        found = audit_states(parse_states(state))
        assert found.files == ()
        assert found.total.rows == manifest.rows
        assert found.total.done + found.total.under_way == len(rows)
        assert found.total.left == manifest.rows - len(rows)
        assert "do not list more than 10,000 files" in found.notes[0]
        assert by_file(manifest, rows) == {
            file.path: file.done + file.under_way for file in audited([state], Today(manifest)).files
        }

    def test_above_ten_thousand_files_another_list_is_told_by_its_fingerprint(self):
        manifest = many_files(10_001)
        [delivery] = ranks_of(manifest, replace(SHUFFLED, split_rows=2000, shuffle_buffer_size=2000), 1, size=3000)
        _, [state] = delivered([delivery], [3])
        other = Manifest(manifest.root, (*manifest.files[:-1], manifest.files[-1]._replace(size=1)))
        found = audit_states(parse_states(state), Today(other))
        assert found.files_match is False
        assert "the file list changed" in found.differences[0]
        assert not found.is_fine


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=9), st.lists(st.integers(1, 9), min_size=1))
def test_ranges_are_counted_as_often_as_they_cover_a_row(ranges, lengths):
    axis = Axis([(f"{number}", length) for number, length in enumerate(lengths)])
    end = int(axis.bounds[-1])
    inside = [(start, min(start + length, end)) for start, length in ranges if start < end]
    times = Counter(row for start, stop in inside for row in range(start, stop))
    starts, stops = (np.array([pair[side] for pair in inside], dtype=np.int64) for side in (0, 1))
    depth = Depth(starts, stops)
    files = [range(*pair) for pair in zip(axis.bounds[:-1], axis.bounds[1:], strict=True)]
    assert depth.covered(axis.bounds).tolist() == [sum(times[row] > 0 for row in rows) for rows in files]
    assert depth.further(axis.bounds).tolist() == [sum(max(0, times[row] - 1) for row in rows) for rows in files]
