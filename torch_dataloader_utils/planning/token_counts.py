"""The tokens of documents, counted ahead, and how many sequences a shard of them gives. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from torch_dataloader_utils.errors import CheckpointMismatchError, shown
from torch_dataloader_utils.planning.manifest import Split
from torch_dataloader_utils.planning.packing import WINDOW_DOCUMENTS, Numbers, Strategy, pack
from torch_dataloader_utils.planning.plan import TO_THE_END, Shard, ShardSlice
from torch_dataloader_utils.planning.shuffle import delivery_order

Lengths: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True)
class TokenCounts:
    """The tokens of the documents of files, separators not counted.

    Attributes:
        column: The column of the documents.
        length_column: The column that says how many tokens each document has, where it was asked; else None.
        rows: The documents of each row group, by path.
        sums: The tokens of each row group, by path.
        lengths: The tokens of each document of a file, by path; None where only their sums are known, or needed.
    """

    column: str
    length_column: str | None
    rows: Mapping[str, tuple[int, ...]] = field(repr=False)
    sums: Mapping[str, tuple[int, ...]] = field(repr=False)
    lengths: Mapping[str, Lengths] | None = field(default=None, repr=False)

    def without_lengths(self) -> TokenCounts:
        """Return the sums alone."""
        return replace(self, lengths=None)

    def tokens_of(self, split: Split) -> int:
        """Return the tokens of a range of whole row groups."""
        rows, tokens = self._bounds[split.path]
        first, stop = bisect_left(rows, split.row_offset), bisect_left(rows, split.row_offset + split.row_length)
        return tokens[stop] - tokens[first]

    def lengths_of(self, split: Split) -> Lengths:
        """Return the tokens of each document of a range."""
        assert self.lengths is not None  # noqa: S101 - who needs them has them
        return self.lengths[split.path][split.row_offset : split.row_offset + split.row_length]

    @cached_property
    def _bounds(self) -> dict[str, tuple[list[int], list[int]]]:
        """The rows, and the tokens, before each row group and at the end, by path."""
        return {
            path: ([*accumulate(rows, initial=0)], [*accumulate(self.sums[path], initial=0)])
            for path, rows in self.rows.items()
        }


@dataclass(frozen=True)
class SequenceCounts:
    """How many sequences shards of counted documents give.

    Attributes:
        tokens: The counted documents.
        length: Tokens of a sequence.
        strategy: How documents are packed.
        split_documents: Whether documents may be cut.
        has_separator: Whether each document has one token more.
    """

    tokens: TokenCounts
    length: int
    strategy: Strategy
    split_documents: bool
    has_separator: bool

    @property
    def needs_lengths(self) -> bool:
        """Whether the sums of tokens do not tell how many sequences there are."""
        return needs_lengths(self.strategy, split_documents=self.split_documents)

    def counted_slices(self, slices: Iterable[ShardSlice], *, seed: int | None, epoch: int) -> tuple[ShardSlice, ...]:
        """Return slices of shards of which it was not known how many sequences they give.

        The seed is that of a row-level shuffle, else None.

        Raises:
            CheckpointMismatchError: If more sequences of a shard were delivered before.
        """
        counted: dict[Shard, Shard] = {}
        made = []
        for part in slices:
            if part.shard not in counted:
                sequences = self.sequences(part.shard, seed=seed, epoch=epoch)
                counted[part.shard] = replace(part.shard, delivers=sequences)
            made.append(_counted(part, counted[part.shard]))
        return tuple(made)

    def sequences(self, shard: Shard, *, seed: int | None, epoch: int) -> int:
        """Return how many sequences a shard gives."""
        if not self.needs_lengths:
            tokens = sum(map(self.tokens.tokens_of, shard.present))
            tokens += self.has_separator * sum(split.row_length for split in shard.present)
            return -(-tokens // self.length)
        lengths = self._lengths(shard, seed=seed, epoch=epoch)
        strategy, split = self.strategy, self.split_documents
        return pack(lengths, length=self.length, strategy=strategy, split_documents=split).sequences

    def _lengths(self, shard: Shard, *, seed: int | None, epoch: int) -> Numbers:
        """Return the tokens of each document of a shard, in the order of delivery where that matters."""
        missing = frozenset(shard.missing)
        parts = [
            np.zeros(split.row_length, np.int64) if index in missing else self.tokens.lengths_of(split)
            for index, split in enumerate(shard.splits)
        ]
        lengths: Numbers = np.concatenate(parts).astype(np.int64) + self.has_separator
        if missing or (seed is not None and (self.strategy == "concat" or len(lengths) > WINDOW_DOCUMENTS)):
            rows = delivery_order(ShardSlice(replace(shard, delivers=None)), seed=seed, epoch=epoch)
            lengths = lengths[rows]
        return lengths


def needs_lengths(strategy: Strategy, *, split_documents: bool) -> bool:
    """Whether it takes the length of each document to know how many sequences they make, and not only their sum."""
    return strategy != "concat" or not split_documents


def _counted(part: ShardSlice, shard: Shard) -> ShardSlice:
    """Return a slice, given its shard as it is once its sequences are counted."""
    stop = shard.rows if part.stop == TO_THE_END else part.stop
    if max(part.start, stop) > shard.rows:
        first = shard.splits[0]
        msg = f"the state records {shown(max(part.start, stop))} sequences of the shard that begins with row "
        msg += f"{first.row_offset} of {first.path}, and by the counted tokens it gives {shown(shard.rows)}: its "
        raise CheckpointMismatchError(f"{msg}documents have changed, or the column of their lengths is wrong")
    return replace(part, shard=shard, stop=stop)
