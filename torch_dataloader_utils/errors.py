"""Every error and warning of the package.

::

    Exception
    └── DatasetError
        ├── CheckpointMismatchError   (ValueError)    a state does not belong to this run
        ├── CheckpointStoreError      (OSError)       a stored checkpoint is incomplete, damaged or foreign
        ├── ColumnError               (ValueError)    a column is missing, or its type or nulls cannot be delivered
        ├── UnreadableFileError       (OSError)       a data file cannot be read, or changed since it was listed
        ├── IterationEndedError       (RuntimeError)  an iterator was used after an error, or after a newer one
        ├── LedgerUnknownError        (RuntimeError)  which rows a step has is not known without reading, or at all
        ├── ProgressUnknownError      (RuntimeError)  batches were delivered in processes that do not report progress
        ├── RankMismatchError         (ValueError)    ranks disagree, or a rank's state is missing
        ├── TransformError            (ValueError)    the user's transform fails, or returns what cannot be delivered
        └── WorkerError               (RuntimeError)  a worker process died, or sent nothing within `timeout`

Warning:
    └── UserWarning
        ├── UnevenRanksWarning        ranks make, or may make, different numbers of steps
        ├── ChangedFilesWarning       files have a new modification time, but the same size and footer
        ├── FooterMismatchWarning     a footer's total of rows disagrees with its row groups, which count
        ├── LostRowsWarning           rows can no longer be delivered: their files were removed or rewritten
        ├── MetadataFileWarning       a `_metadata` file does not describe the files of its directory
        ├── SilentWorkerWarning       a worker process that is waited for has sent nothing for half a minute
        ├── SkippedStepsWarning       steps to be skipped come all the same, or skipped steps to be restored do not
        ├── SmallWeightWarning        a source of a mixture has too small a weight for a single row of an epoch
        ├── SlowTransportWarning      the system lacks what makes it cheap to send batches from worker processes
        ├── StorageRetryWarning       a storage has failed for 10 seconds, and is tried again
        └── UnusedStateWarning        a loaded state is given up before an iteration continued from it

A malformed argument or a malformed state is a plain ``ValueError`` or ``TypeError``; a path that matches nothing is a
``FileNotFoundError``.
"""

from __future__ import annotations

import difflib
import re
import reprlib
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters by which a file name could change what a terminal shows: escapes, and changes of the writing direction."""


def printable(text: str) -> str:
    """Return a text with control characters escaped; lines and tabs stay."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class DatasetError(Exception):
    """The base class of this package's errors."""

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message))


class ColumnError(DatasetError, ValueError):
    """A column is missing, or its type or its nulls cannot be delivered as requested."""


class UnreadableFileError(DatasetError, OSError):
    """A data file cannot be read, is not what its name says, or changed after it was listed."""


class CheckpointStoreError(DatasetError, OSError):
    """A checkpoint of a `CheckpointStore` is incomplete, damaged or foreign, or it could not be saved."""


class IterationEndedError(DatasetError, RuntimeError):
    """An iterator was used after an error, a newer ``iter``, ``set_epoch`` or ``load_state_dict``, or a fork."""


class LedgerUnknownError(DatasetError, RuntimeError):
    """Which rows a step has, or which step has a row, is not known without reading data, or without the run log."""


class ProgressUnknownError(DatasetError, RuntimeError):
    """The state was requested, but batches were delivered in processes that do not report progress."""


class RankMismatchError(DatasetError, ValueError):
    """Ranks planned different epochs, or the states of the ranks do not fit together."""


class TransformError(DatasetError, ValueError):
    """The function passed as `transform` failed, or returned no table, other columns, or fewer rows than it did before.

    In a mixture, whose rows are counted, also where it returned more. The message names the file and the row group. The
    function's own error is the cause (``__cause__``), but where it comes from a worker process: then its traceback is
    in the message.
    """


class WorkerError(DatasetError, RuntimeError):
    """A worker process died, or sent nothing within the loader's ``timeout``. The message says what it was reading."""


class UnevenRanksWarning(UserWarning):
    """Ranks make, or may make, different numbers of steps: a DDP loop would wait for ranks that have no batch left."""


class ChangedFilesWarning(UserWarning):
    """Files have a new modification time; their size and footer are unchanged."""


class FooterMismatchWarning(UserWarning):
    """A Parquet footer's total of rows disagrees with its row groups. The row groups count, as they do for pyarrow."""


class LostRowsWarning(UserWarning):
    """An epoch continues without the rows of files that were removed or rewritten since the checkpoint."""


class StorageRetryWarning(UserWarning):
    """A listing, an opening or a read has failed for 10 seconds, and is tried again until `storage_timeout` is over."""


class SlowTransportWarning(UserWarning):
    """The system has no ``memfd_create``: worker processes send batches in a slower way."""


class SkippedStepsWarning(UserWarning):
    """A load forgets which steps were to be skipped, or a framework ends an epoch before skipped steps are restored."""


class SmallWeightWarning(UserWarning):
    """A source of a mixture has a weight, and it is too small for a single row of an epoch: none is delivered."""


class SilentWorkerWarning(UserWarning):
    """A worker process that is waited for has sent nothing for half a minute. The message says what it is reading."""


class HookWarning(UserWarning):
    """A hook raised an error. The loader goes on; the message names the hook, the event and the error."""


class UnusedStateWarning(UserWarning):
    """`set_epoch` begins another epoch than that of a loaded state, from which no iteration has continued."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between a checkpoint and the run that loads it.

    Attributes:
        name: The parameter of ``create_dataloader``, or the key of the state.
        checkpoint: Its value in the checkpoint.
        current: Its value in this run.
    """

    name: str
    checkpoint: Any
    current: Any

    def __str__(self) -> str:
        return f"{self.name} changed: checkpoint={shown(self.checkpoint)}, current={shown(self.current)}"


class CheckpointMismatchError(DatasetError, ValueError):
    """A checkpoint was saved under another plan than this run's. Loading it has changed nothing.

    Attributes:
        differences: Each difference, with both values.
        files_added: Relative paths of files that were added since the checkpoint.
        files_removed: Relative paths of files that were removed since.
        files_changed: Relative paths of files whose size, footer or etag differ.
        shard: A shard of the checkpoint that this run's plan does not have, as a list of splits; or None.
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
        """Pickle the attributes too: the error may be raised in a worker process."""
        return type(self), self.args, self.__dict__


class MetadataFileWarning(UserWarning):
    """A `_metadata` file does not describe the files of its directory, and is not used."""


SHOWN = reprlib.Repr()
SHOWN.maxstring = SHOWN.maxother = 300
SHOWN.maxlist = SHOWN.maxtuple = SHOWN.maxdict = 20
SHOWN.maxlevel = 3


def shown(value: object) -> str:
    """Return a value as a message shows it: as Python writes it, without what would make the message long."""
    try:
        return SHOWN.repr(value)
    except ValueError:  # Python writes no integer of thousands of digits
        return f"a {type(value).__name__} that is too long to show"


def cut(text: str, most: int = SHOWN.maxstring) -> str:
    """Return a text as a message shows it: both ends if it is long, and in one line."""
    half = most // 2
    short = text if len(text) <= most else f"{text[:half]}...{text[-half:]}"
    return printable(short).replace("\n", "\\n")


def warn_user(message: str, category: type[UserWarning]) -> None:
    """Warn at the line of the user's code that called this package, however deep in the package the cause was found."""
    between = (f"{__name__.partition('.')[0]}.", "torch.utils.data.")  # torch's loader calls this package back
    depth = 1
    while f"{sys._getframe(depth).f_globals.get('__name__', '')}.".startswith(between):  # noqa: SLF001
        depth += 1
    warnings.warn(printable(message), category, stacklevel=depth + 1)


def nearest(name: object, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the end of a message about an unknown name: the known name that it is most like, or all known names.

    `cutoff` is how similar two names have to be, from 0 to 1; a name that differs only in case is always similar.
    """
    names = list(known)
    same = [other for other in names if other.lower() == str(name).lower()]
    close = same or difflib.get_close_matches(str(name), names, n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(names)}"
