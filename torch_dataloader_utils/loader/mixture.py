"""A mixture's part of runs and states: where its sources stand in an epoch."""

from __future__ import annotations

from torch_dataloader_utils.checkpoint.mixture_run import MixtureRun, SourcePosition, SourceRun
from torch_dataloader_utils.checkpoint.saved_state import SavedState
from torch_dataloader_utils.formats.base import Opened, OpenedSources
from torch_dataloader_utils.planning.mixture_planner import MixturePlanner, Start
from torch_dataloader_utils.planning.planner import EpochPlanner
from torch_dataloader_utils.planning.topology import Topology


def mixture_of(opened: Opened, planner: EpochPlanner, epoch: int, topology: Topology) -> MixtureRun | None:
    """Return what a run of a mixture has in addition to a single dataset's; None for a single dataset."""
    if not isinstance(planner, MixturePlanner) or not isinstance(opened, OpenedSources):
        return None
    starts = planner.starts(epoch, topology)
    passes = planner.passes(epoch, topology)
    sources = tuple(
        SourceRun(
            name=name,
            manifest=files.manifest,
            weight=planner.weights[number],
            position=SourcePosition(
                starts[number].number, starts[number].row, (planner.buffer_of(number),) * len(passes[number])
            ),
            filter_digest=files.filter_digest,
            filter_binding=files.filter_binding,
            filter_bindings=files.filter_bindings,
            format=files.format_name,
            format_options=files.options_digest,
            **files.pin,
        )
        for number, (name, files) in enumerate(opened.sources.items())
    )
    return MixtureRun(sources, planner.rows_per_epoch, planner.rows_before(epoch, topology))


def placed(planner: EpochPlanner, saved: SavedState) -> EpochPlanner:
    """Return the planner of a run that continues a state: its sources stand where the state's do."""
    if not isinstance(planner, MixturePlanner) or saved.mixture is None:
        return planner
    known = {source.name: source.position for source in saved.mixture.sources}
    positions = [known.get(source.name, SourcePosition(0, 0, (None,))) for source in planner.sources]
    starts = [Start(position.number, position.row) for position in positions]
    least = [position.number + len(position.buffers) for position in positions]
    return planner.begun_at(saved.epoch, starts, least, saved.mixture.rows_before)
