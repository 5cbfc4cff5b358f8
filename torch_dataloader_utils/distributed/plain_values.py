"""The plain values in files of ``torch.save`` and of ``torch.distributed.checkpoint``; no class of them is loaded.

Both hold pickles, which can run any code where Python loads them. Here a class or a function that a pickle names is
never imported: a placeholder stands for it and for what it would have made, such as a tensor. So nothing runs, and of a
checkpoint of gigabytes only the pickle is read.
"""

from __future__ import annotations

import io
import pickle  # the classes that it names are not loaded: see `_PlainUnpickler`
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

from torch_dataloader_utils.errors import cut

MOST_BYTES = 1 << 31
"""The states of a thousand ranks have about half as many bytes. What is larger is something else."""

PICKLE = "/data.pkl"
"""How the name of the pickle in a file of ``torch.save`` ends."""


class Placeholder:
    """Stands for what a pickle would have made by a class or a function. Nothing that is done to it has an effect.

    Attributes:
        attributes: The attributes that the pickle gives it, if it does.
    """

    attributes: Mapping[Any, Any] = MappingProxyType({})

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        """Take what the class that it stands for would be called with."""

    def __call__(self, *_args: Any, **_kwargs: Any) -> Placeholder:
        """Return another one, in the place of a result."""
        return Placeholder()

    def __setstate__(self, state: Any) -> None:
        parts = state if isinstance(state, tuple) else (state,)
        self.attributes = {key: value for part in parts if isinstance(part, dict) for key, value in part.items()}

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """Do nothing, as `add` and `extend`."""

    extend = add = append


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return the placeholder in the place of every class and function but for a dictionary."""
        return OrderedDict if (module, name) == ("collections", "OrderedDict") else Placeholder

    def persistent_load(self, _number: Any) -> Any:
        """Return a placeholder for the memory of a tensor."""
        return Placeholder()


def unpickled(file: BinaryIO, name: str) -> Any:
    """Return what a pickle holds, with placeholders for all that is not plain.

    Raises:
        ValueError: If it is no pickle; the message has the name.
    """
    try:
        return _PlainUnpickler(file).load()
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - damaged pickles raise errors of any type
        raise ValueError(f"{name} is damaged: {type(error).__name__}: {cut(str(error))}") from None


def torch_saved(file: BinaryIO, name: str) -> Any:
    """Return what a file of ``torch.save`` holds, with placeholders for all that is not plain.

    Raises:
        ValueError: If it is another archive, or damaged; the message has the name.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            found = [info for info in archive.infolist() if info.filename.endswith(PICKLE)]
            is_torchs = len(found) == 1 and found[0].compress_type == zipfile.ZIP_STORED
            content = archive.read(found[0]) if is_torchs and found[0].file_size <= MOST_BYTES else b""
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - damaged archives raise errors of any type
        raise ValueError(f"{name} is damaged: {type(error).__name__}: {cut(str(error))}") from None
    if not content:
        raise ValueError(f"{name} is a zip archive, but not one that torch.save wrote")
    return unpickled(io.BytesIO(content), name)


class Entry(NamedTuple):
    """Where a value of a distributed checkpoint is: in which of its files, from which byte on, and how long."""

    name: str
    file: str
    start: int
    length: int


def entries_of(metadata: BinaryIO, name: str) -> Iterator[Entry]:
    """Yield where the values of a ``torch.distributed.checkpoint`` are, given its file ``.metadata``.

    Raises:
        ValueError: If it is another file; the message has the name.
    """
    value = unpickled(metadata, name)
    stored = _attributes(value).get("storage_data")
    for index, place in stored.items() if isinstance(stored, dict) else ((None, None),):
        described = {**_attributes(index), **_attributes(place)}
        found = [described.get(key) for key in ("fqn", "relative_path", "offset", "length")]
        if list(map(type, found)) != [str, str, int, int]:
            raise ValueError(
                f"{name} is not what torch.distributed.checkpoint writes: it does not say where values are"
            )
        if described.get("transform_descriptors"):
            continue  # compressed or encrypted by an extension; a loader's states are looked for in the others
        yield Entry(*found)  # type: ignore[arg-type] # their types were compared


def _attributes(value: Any) -> Mapping[Any, Any]:
    return value.attributes if isinstance(value, Placeholder) else {}
