"""The measure of `tdu mixing`, for orders of which the answer is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import manifest_of

from torch_dataloader_utils.planning.label_mixing import LabelMixing, label_mixing
from torch_dataloader_utils.planning.plan import PlanOptions
from torch_dataloader_utils.planning.planner import make_plan

ROWS, GROUP, BATCH, LABELS = 60_000, 1_000, 250, 12
MANIFEST = manifest_of(*[[(GROUP, 100 * GROUP)] * 20] * 3)
SORTED = (np.arange(ROWS) * LABELS // ROWS).astype(np.uint8)
RANDOM = np.random.default_rng(0).permutation(SORTED)


def mixed(codes, *, batch_size=BATCH, ranks=1, workers=0, epochs=1, **options: Any) -> LabelMixing:
    plan_options = PlanOptions(split_bytes=2**40, **options)
    plans = [
        make_plan(MANIFEST, plan_options, epoch=epoch, num_ranks=ranks, num_workers=workers) for epoch in range(epochs)
    ]
    seed = plan_options.row_shuffle_seed
    return label_mixing(plans, MANIFEST, codes, labels=LABELS, batch_size=batch_size, seed=seed)


def test_batches_of_one_label_each_have_an_intraclass_correlation_of_one_and_one_effective_row():
    found = mixed(SORTED)
    assert found.batches == ROWS / BATCH
    assert found.intraclass_correlation == pytest.approx(1)
    assert found.effective_rows == pytest.approx(1, rel=0.01)
    assert found.design_effect == pytest.approx(BATCH, rel=0.01)


def test_labels_in_random_order_have_a_design_effect_of_one():
    found = mixed(RANDOM)
    assert abs(found.design_effect - 1) < 4 * found.error
    assert abs(found.intraclass_correlation) < 4 * found.error / BATCH
    assert found.effective_rows == pytest.approx(BATCH, rel=4 * found.error)


def test_the_mean_over_many_uniform_shuffles_is_one_also_where_a_batch_is_a_large_part_of_all_rows():
    """Without the correction for drawing without replacement it would be 0.75 here."""
    random = np.random.default_rng(1)
    found = [mixed(random.permutation(SORTED), batch_size=15_000) for _ in range(200)]
    assert np.mean([one.design_effect for one in found]) == pytest.approx(1, abs=0.06)


def test_the_stated_error_is_the_spread_of_uniform_shuffles():
    random = np.random.default_rng(2)
    found = [mixed(random.permutation(SORTED)) for _ in range(100)]
    assert np.std([one.design_effect for one in found]) == pytest.approx(found[0].error, rel=0.25)


def test_rare_labels_do_not_distort_the_measure():
    codes = np.minimum(np.random.default_rng(3).geometric(0.5, ROWS) - 1, LABELS - 1).astype(np.uint8)
    random = np.random.default_rng(4)
    found = [mixed(random.permutation(codes)).design_effect for _ in range(50)]
    assert np.mean(found) == pytest.approx(1, abs=0.02)


def test_a_buffer_of_all_rows_is_a_uniform_shuffle_and_larger_buffers_mix_better():
    found = [mixed(SORTED, shuffle=True, shuffle_buffer_size=size, epochs=3) for size in (1_000, 5_000, 20_000, ROWS)]
    effects = [one.design_effect for one in found]
    assert effects == sorted(effects, reverse=True)
    assert effects[0] > 100
    assert abs(effects[-1] - 1) < 4 * found[-1].error


def test_random_shards_without_a_buffer_leave_one_label_in_each_batch():
    assert mixed(SORTED, shuffle=True, split_rows=1_000).intraclass_correlation == pytest.approx(1)


def test_workers_share_the_rows_so_that_a_batch_sees_fewer_of_them():
    alone = mixed(SORTED, shuffle=True, shuffle_buffer_size=ROWS, epochs=3)
    shared = mixed(SORTED, shuffle=True, shuffle_buffer_size=ROWS, epochs=3, ranks=2, workers=4)
    assert shared.design_effect > 2 > alone.design_effect


def test_short_last_batches_of_streams_count_as_what_they_are():
    found = mixed(RANDOM, batch_size=700, ranks=3, workers=2)
    assert found.batches == 6 * 15  # 14 of 700 and one of 200 in each stream of 10,000 rows
    assert abs(found.design_effect - 1) < 4 * found.error


def test_one_batch_alone_cannot_be_mixed_better_or_worse():
    with pytest.raises(ValueError, match="all 60,000 rows are in one batch"):
        mixed(RANDOM, batch_size=ROWS)


@pytest.mark.parametrize("buffer", [1_000, 5_000])
def test_a_part_of_very_many_rows_tells_about_the_same_as_all(buffer, monkeypatch):
    options = {"batch_size": 50, "shuffle": True, "shuffle_buffer_size": buffer, "epochs": 3, "workers": 2}
    whole = mixed(SORTED, **options)
    monkeypatch.setattr("torch_dataloader_utils.planning.label_mixing.MOST_DRAWN", 3 * ROWS // 4)
    part = mixed(SORTED, **options)
    assert whole.batches / 5 < part.batches < whole.batches / 3
    assert part.design_effect == pytest.approx(whole.design_effect, rel=0.15)
    assert part.intraclass_correlation == pytest.approx(whole.intraclass_correlation, rel=0.15)
    in_order = mixed(SORTED, batch_size=50)
    assert in_order.batches == ROWS / 50, "nothing is drawn, so nothing is left out"
