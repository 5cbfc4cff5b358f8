"""Where the real ranks of a virtual topology begin whose number has changed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch_dataloader_utils.planning.ledger.segment import RankStart
from torch_dataloader_utils.planning.topology import Topology


def regrouped(stands: Sequence[RankStart], then: Topology, now: Topology) -> dict[int, RankStart]:
    """Return by rank where today's ranks begin, given where all ranks stood.

    Streams of a real rank are those of its planned ranks, turn by turn; a planned rank may be another one's now.
    """
    turns = range(len(stands[0].streams) // then.streams_per_turn)
    planned = {
        (turn, rank * then.streams_per_turn + number): stand.streams[turn * then.streams_per_turn + number]
        for rank, stand in enumerate(stands)
        for turn in turns
        for number in range(then.streams_per_turn)
    }
    starts = {}
    for rank in range(now.num_ranks):
        of_rank = replace(now, rank=rank).own_ranks
        streams = tuple(planned[turn, number] for turn in turns for number in of_rank)
        starts[rank] = replace(stands[of_rank.start // then.streams_per_turn], streams=streams)
    return starts
