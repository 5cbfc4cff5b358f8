"""What messages, logs and states may show of places and options: everything but secrets."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch_dataloader_utils.errors import UnreadableFileError

__all__ = ["HTTP", "Redactor", "without_query"]

SECRET_NAMES = re.compile(r"secret|token|password|passwd|credential|sas|(^|_)key", re.IGNORECASE)
"""Names of storage options whose values are kept out of every message."""

USER_IS_CONTAINER = frozenset({"abfs", "abfss", "wasb", "wasbs"})
"""Protocols in whose URLs the part before the @ names a container, not a user."""

HTTP = frozenset({"http", "https"})
"""Protocols whose URLs carry a query, which may be a signature."""

_URL = re.compile(r"(?P<protocol>[a-zA-Z][a-zA-Z0-9+.-]*)://(?P<host>[^\s'\"<>/]*)(?P<path>[^\s'\"<>]*)")


class Redactor:
    """Takes secrets out of texts and errors.

    Args:
        options: fsspec's storage options.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._secrets = sorted(set(_secrets(options)), key=len, reverse=True)

    def clean(self, text: str) -> str:
        """Take the values of secret options, and userinfo and query of URLs, out of a text."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return _URL.sub(_clean_url, text)

    @contextlib.contextmanager
    def errors(self, place: str, *kept: type[Exception]) -> Iterator[None]:
        """Turn whatever is raised within into an error that names the place and holds no secret.

        Args:
            place: What is being read, for people.
            *kept: Kinds of errors that stay what they are, beside FileNotFoundError and PermissionError; every other
                becomes an UnreadableFileError.
        """
        try:
            yield
        except UnreadableFileError:
            raise
        except Exception as error:  # noqa: BLE001 - storages raise errors of their own kinds
            text, where = self.clean(str(error)), self.clean(place)
            message = text if where in text else f"{where}: {type(error).__name__}: {text}"
            kinds: tuple[type[Exception], ...] = (FileNotFoundError, PermissionError, *kept)
            kind = next((kind for kind in kinds if isinstance(error, kind)), UnreadableFileError)
            cleaned = kind(message)
        else:
            return
        raise cleaned from None


def without_query(url: str) -> str:
    """Return an http URL without query and fragment."""
    return re.split(r"[?#]", url, maxsplit=1)[0]


def _clean_url(match: re.Match[str]) -> str:
    protocol, host, path = match["protocol"], match["host"], match["path"]
    if protocol.lower() not in USER_IS_CONTAINER:
        host = host.rpartition("@")[2]
    url = f"{protocol}://{host}{path}"
    return without_query(url) if protocol.lower() in HTTP else url


def _secrets(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the values of options that are named like secrets, at any depth."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _secrets(value)
        elif isinstance(value, str) and value and SECRET_NAMES.search(str(name)):
            yield value
