"""What an audit of states has found: numbers of rows for each file and each rank, and findings in words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Numbers of rows, or of bytes for text whose rows are not counted.

    ``rows`` is the sum of all others but `twice` and `repeated`.

    Attributes:
        rows: All rows of the epoch.
        done: Delivered, with all other rows of their shard.
        under_way: Delivered, of shards that are not finished. With a filter, with a transform, and for text whose rows
            are not counted, all rows of such shards: which of them were delivered only reading tells.
        left: Not delivered yet.
        missing: Not delivered, and they cannot be any more in this epoch: their file was removed or rewritten.
        unknown: Not recorded, where states of some ranks are not given: those ranks may have delivered them.
        dropped: Left over where all ranks have ended: ``uneven_ranks="drop"`` gives all of them equally many rows.
        skipped: Skipped with their steps, or to be skipped, and not delivered.
        excluded: Excluded in an earlier epoch, or in this one and not delivered before.
        ruled_out: In row groups that the filter rules out, which are never read. Known only with a dataset that has the
            filter; else such rows are `left`.
        twice: How often rows are recorded as delivered once more than they should be.
        repeated: How often rows were delivered once more by ``uneven_ranks="pad"``.
    """

    rows: int = 0
    done: int = 0
    under_way: int = 0
    left: int = 0
    missing: int = 0
    unknown: int = 0
    dropped: int = 0
    skipped: int = 0
    excluded: int = 0
    ruled_out: int = 0
    twice: int = 0
    repeated: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FileAudit(Counts):
    """What states record of a file. A file that was added since has no rows in the epoch.

    Attributes:
        path: Its path, relative to the root.
        change: How the file differs today from the one in the states, in words; None where it does not, or nothing was
            compared.
    """

    path: str
    change: str | None = None


@dataclass(frozen=True, slots=True)
class RankAudit:
    """What a rank's state records.

    Attributes:
        rank: The rank.
        batches: Batches of the epoch that were delivered, those before an elastic load included.
        rows: Rows that it delivered since the epoch began, or since an elastic load. With a filter, the finished shards
            among them count all rows. With a transform, they count the rows that it was made of. Where the audit's unit
            is bytes, all bytes of the shards that it has begun, also of one that others had begun before the load.
    """

    rank: int
    batches: int
    rows: int


@dataclass(frozen=True, slots=True)
class Audit:
    """What states record of an epoch.

    Attributes:
        epoch: The epoch.
        batches: The largest number of batches that a rank has delivered.
        num_ranks: How many ranks saved states.
        ranks: Those whose states are given.
        unit: What is counted: ``"rows"``, or ``"bytes"`` of uncompressed text where rows are not counted.
        root: The directory to which paths are relative, when the states were saved.
        total: The sums over all files.
        files: Each file, sorted by path. Empty where states do not list files, because there are more than 10,000, and
            no files were given that have the same fingerprint.
        files_match: Whether today's files are those of the states; None if no files were given.
        differences: How today's files and settings differ from those of the states, in words.
        problems: How the states do not fit together, in words.
        notes: What could not be known, in words.
    """

    epoch: int
    batches: int
    num_ranks: int
    ranks: tuple[RankAudit, ...]
    unit: str
    root: str
    total: Counts
    files: tuple[FileAudit, ...]
    files_match: bool | None
    differences: tuple[str, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def is_fine(self) -> bool:
        """Whether nothing is missing or recorded twice, the states fit together, and no file differs from today's."""
        is_whole = not (self.total.missing or self.total.twice or self.problems)
        return is_whole and self.files_match is not False and not self.differences
