"""Every error and warning of the package.

::

    Exception
    └── DatasetError
        ├── CheckpointMismatchError   (ValueError)    a state does not belong to this run
        ├── ColumnError               (ValueError)    a column is missing, or its type or nulls cannot be delivered
        ├── UnreadableFileError       (OSError)       a data file cannot be read, or changed since it was listed
        ├── IterationEndedError       (RuntimeError)  an iterator was asked for more after an error or a newer one
        ├── ProgressUnknownError      (RuntimeError)  progress was made where it cannot be seen
        └── RankMismatchError         (ValueError)    ranks disagree, or a rank's state is missing

Warning:
    └── UserWarning
        ├── UnevenRanksWarning        ranks make, or may make, different numbers of steps
        ├── ChangedFilesWarning       files carry a new modification time but the same content, as far as it shows
        ├── FooterMismatchWarning     a footer's total of rows disagrees with its row groups, which count
        ├── LostRowsWarning           rows cannot be delivered any more: their files are gone or were written anew
        └── MetadataFileWarning       a `_metadata` file does not describe the files beside it

A malformed argument or a malformed state is a plain ``ValueError`` or ``TypeError``; a path that matches nothing is a
``FileNotFoundError``.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = [
    "ChangedFilesWarning",
    "CheckpointMismatchError",
    "ColumnError",
    "DatasetError",
    "Difference",
    "FooterMismatchWarning",
    "IterationEndedError",
    "LostRowsWarning",
    "MetadataFileWarning",
    "ProgressUnknownError",
    "RankMismatchError",
    "UnevenRanksWarning",
    "UnreadableFileError",
    "nearest",
    "warn_user",
]


class DatasetError(Exception):
    """The root of this package's own errors."""


class ColumnError(DatasetError, ValueError):
    """A column is missing, or its type or its nulls cannot be delivered as asked."""


class UnreadableFileError(DatasetError, OSError):
    """A data file cannot be read, is not what its name says, or changed after it was listed."""


class IterationEndedError(DatasetError, RuntimeError):
    """An iterator was asked for more after an error, or a newer ``iter``, ``set_epoch`` or ``load_state_dict``."""


class ProgressUnknownError(DatasetError, RuntimeError):
    """The state was asked for, but batches were delivered in processes that do not report back."""


class RankMismatchError(DatasetError, ValueError):
    """Ranks planned different epochs, or the states of the ranks do not fit together."""


class UnevenRanksWarning(UserWarning):
    """Ranks make, or may make, different numbers of steps: a DDP loop would wait for ranks that have run out."""


class ChangedFilesWarning(UserWarning):
    """Files have a new modification time; their size and footer are as they were."""


class FooterMismatchWarning(UserWarning):
    """A Parquet footer's total of rows disagrees with its row groups. The row groups count, as they do for pyarrow."""


class LostRowsWarning(UserWarning):
    """An epoch goes on without rows of files that are gone, or were written anew, since the checkpoint."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that differs between a checkpoint and the run that loads it.

    Attributes:
        name: What differs, as the parameter of ``create_dataloader`` or the key of the state is called.
        checkpoint: The value in the checkpoint.
        current: The value in this run.
    """

    name: str
    checkpoint: Any
    current: Any

    def __str__(self) -> str:
        return f"{self.name} changed: checkpoint={self.checkpoint!r}, current={self.current!r}"


class CheckpointMismatchError(DatasetError, ValueError):
    """A checkpoint was taken under another plan than this run's; nothing was changed.

    Attributes:
        differences: What differs, with both values.
        files_added: Relative paths that the checkpoint does not know.
        files_removed: Relative paths that are gone since.
        files_changed: Relative paths whose size, footer or etag differ.
        shard: A shard of the checkpoint that today's plan does not hold, as a list of splits, if there is one.
    """

    def __init__(
        self,
        message: str,
        *,
        differences: tuple[Difference, ...] = (),
        files_added: tuple[str, ...] = (),
        files_removed: tuple[str, ...] = (),
        files_changed: tuple[str, ...] = (),
        shard: list[dict[str, Any]] | None = None,
    ) -> None:
        super().__init__(message)
        self.differences = differences
        self.files_added = files_added
        self.files_removed = files_removed
        self.files_changed = files_changed
        self.shard = shard

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with the attributes, so that the error crosses process borders whole."""
        return type(self), self.args, self.__dict__


class MetadataFileWarning(UserWarning):
    """A `_metadata` file does not describe the files beside it, and is not used."""


def warn_user(message: str, category: type[UserWarning]) -> None:
    """Warn at the line outside this package from which it was called, however deep within the cause was found."""
    package = __name__.partition(".")[0]
    depth = 1
    while sys._getframe(depth).f_globals.get("__name__", "").partition(".")[0] == package:  # noqa: SLF001
        depth += 1
    warnings.warn(message, category, stacklevel=depth + 1)


def nearest(name: object, known: Iterable[str]) -> str:
    """Return what a misspelled name may have meant, for the end of a message; or what there is."""
    names = list(known)
    close = difflib.get_close_matches(str(name), names, n=1)
    return f": did you mean {close[0]!r}?" if close else f"; there are {', '.join(names)}"
