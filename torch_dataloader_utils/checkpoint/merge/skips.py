"""An elastic load of skipped steps: the skipped rows of all ranks' states, which are not left for the rest. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch_dataloader_utils.checkpoint.merge.claims import Claims, with_rows
from torch_dataloader_utils.checkpoint.saved_state import SavedState
from torch_dataloader_utils.planning.excluded import ExcludedRows
from torch_dataloader_utils.planning.manifest import Layout
from torch_dataloader_utils.planning.plan import DeliveredBaseline, SkippedRows
from torch_dataloader_utils.planning.row_ranges import Windows, merged


def with_skipped(
    baseline: DeliveredBaseline, states: Sequence[SavedState], layout: Layout, left_out: ExcludedRows
) -> DeliveredBaseline:
    """Return what was delivered with the rows that were skipped, or would have been.

    Raises:
        RankMismatchError: If two states skip the same row.
    """
    saved = [(state, state.skips) for state in states if state.skips is not None]
    before = None if states[0].baseline is None else states[0].baseline.skipped
    if not saved and before is None:
        return baseline
    claims = Claims(layout, left_out, is_open_ended=states[0].is_open_ended)
    restores = any(skips.restores for _, skips in saved)
    for state, skips in saved:
        claims.claim(f"rank {state.rank}", skips.rows.whole(layout), skips.rows.in_progress)
    if before is not None:
        rows, _, restored = before
        if not restores:  # else each rank records what it has left of them
            claims.claim("an earlier resume", rows.whole(layout), rows.in_progress)
        restores = restores or restored
    claims.require_apart("skipped")
    whole, partial = claims.united()
    skipped = SkippedRows(
        whole, partial, _steps_skipped(max(states, key=lambda state: state.batches_delivered)), restores
    )
    return replace(with_rows(baseline, whole, partial), skipped=skipped)


def _steps_skipped(state: SavedState) -> Windows:
    """Return the steps of the epoch that were skipped when a state was saved."""
    before = () if state.baseline is None or state.baseline.skipped is None else state.baseline.skipped[1]
    skips = [] if state.skips is None else state.skips.skips
    passed = [skip.steps for skip in skips if skip.end.step <= state.batches_delivered]
    return merged([*before, *((steps.start, steps.stop) for steps in passed)])
