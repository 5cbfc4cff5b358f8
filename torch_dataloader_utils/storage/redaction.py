"""What messages, logs and states may show of URLs and storage options: everything but secrets."""

from __future__ import annotations

import base64
import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import quote, unquote

from torch_dataloader_utils.errors import UnreadableFileError, printable
from torch_dataloader_utils.storage.causes import advice

SECRET_NAMES = re.compile(
    r"secret|token|pass|pwd|credential|auth|cookie|connection_string|sig|private|sas|(^|[_-])p?key|(^|[_-])pat$",
    re.IGNORECASE,
)
"""Names of storage options and query parameters whose values are secret, however short they are."""

PLAIN_NAMES = re.compile(
    r"account_(host|name)|addressing_style|cache_storage|(default_)?cache_type|endpoint(_url)?|host(name)?|location|"
    r"profile|project(_id)?|(target_)?protocol|region(_name)?|signature_version|type",
    re.IGNORECASE,
)
"""Names of storage options whose values help to understand a message and are not secret."""

REDACTED = "***"
"""What stands in the place of a secret."""

SECRET_LENGTH = 8
"""The value of an option of any other name is taken for a secret from this length on."""

SHORT = 4
"""A secret of fewer characters is removed where it stands alone: it may be in any word, and tells little."""

LOGIN = 2
"""A user and a password."""

USER_IS_CONTAINER = frozenset({"abfs", "abfss", "wasb", "wasbs"})
"""Protocols in whose URLs the part before the @ names a container, not a user."""

_URL = re.compile(r"(?P<protocol>[a-zA-Z][a-zA-Z0-9+.-]*)://(?P<host>[^\s'\"<>/]*)(?P<path>[^\s'\"<>]*)")


class Redactor:
    """Removes secrets from messages and errors: those of fsspec's storage options and of the URLs that are read.

    Attributes:
        option_names: The names of the options, at any depth.
    """

    def __init__(self, options: Mapping[str, Any], urls: Iterable[str] = ()) -> None:
        self.option_names = frozenset(_option_names(options))
        found = {*_option_secrets(options), *(secret for url in urls for secret in _url_secrets(url))}
        forms = {form for secret in found for form in _forms(secret)}
        self._secrets = sorted(forms - {""}, key=len, reverse=True)

    def clean(self, text: str) -> str:
        """Remove secrets, and the userinfo and query of any URL, from a message."""
        for secret in self._secrets:
            if len(secret) < SHORT:
                text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", REDACTED, text)
            else:
                text = text.replace(secret, REDACTED)
        return _URL.sub(_clean_url, text)

    def errors(self, name: Callable[[], str], *kept: type[Exception]) -> contextlib.AbstractContextManager[None]:
        """Turn an error that is raised within into one that names what is read and holds no secret.

        `name` is called only if there is an error. Errors of the types `kept` are kept, like FileNotFoundError and
        PermissionError; any other becomes an UnreadableFileError.
        """
        return _Errors(self, name, kept)


@dataclass(frozen=True, slots=True)
class _Errors(contextlib.AbstractContextManager[None]):
    """What `Redactor.errors` returns.

    It is no generator: the traceback of the error that is raised within would have the generator's frame, and so refer
    to the error itself. Such a cycle would keep what the other frames have read.
    """

    redactor: Redactor
    name: Callable[[], str]
    kept: tuple[type[Exception], ...]

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, UnreadableFileError):
            return
        clean, cleaned = self.redactor.clean, None
        try:
            text, where = printable(clean(str(error))), printable(clean(self.name()).replace("\n", "\\n"))
            message = text if where in text else f"{where}: {type(error).__name__}: {text}"
            message += f"; {found}" if (found := advice(error, self.redactor.option_names)) else ""
            kept: tuple[type[Exception], ...] = (FileNotFoundError, PermissionError, *self.kept)
            cleaned = next((kind for kind in kept if isinstance(error, kind)), UnreadableFileError)(message)
            raise cleaned from None
        finally:
            if cleaned is not None:  # `from None` hides it only: logs and debuggers would show what is secret
                cleaned.__context__ = None
            del cleaned, error, _traceback  # of this frame, which the raised error's traceback has


def is_http(url: str) -> bool:
    """Whether a URL's query is no part of the file's name, as a question mark may be in other protocols."""
    return url.lower().startswith(("http://", "https://"))


def without_query(url: str) -> str:
    """Return an http URL without query and fragment."""
    return re.split(r"[?#]", url, maxsplit=1)[0]


def _clean_url(match: re.Match[str]) -> str:
    protocol, host, path = match["protocol"], match["host"], match["path"]
    if protocol.lower() not in USER_IS_CONTAINER:
        host = host.rpartition("@")[2]
    url = f"{protocol}://{host}{path}"
    if is_http(url):
        return without_query(url)
    name, mark, query = url.partition("?")
    return name + mark + re.sub(r"([^&;=/]+)=([^&;/]+)", _clean_parameter, query)


def _clean_parameter(match: re.Match[str]) -> str:
    return f"{match[1]}={REDACTED}" if _is_secret(match[1], match[2]) else match[0]


def _is_secret(name: str, value: str) -> bool:
    return bool(SECRET_NAMES.search(name)) or len(value) >= SECRET_LENGTH


def _forms(secret: str) -> Iterator[str]:
    """Yield the ways in which a secret may be written in a URL or, if it is user and password, in a header."""
    plain = unquote(secret)
    for text in (secret, plain):
        yield from (text, quote(text, safe=""), quote(text))
    if ":" in plain:
        yield base64.b64encode(plain.encode()).decode()


def _option_names(value: Any) -> Iterator[str]:
    """Yield the names of options, at any depth."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _option_names(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _option_names(inner)


def _option_secrets(value: Any, name: str = "") -> Iterator[str]:
    """Yield the strings in options, at any depth, that are or may be secret."""
    if isinstance(value, Mapping):
        yield from _login(value.get("username", value.get("user")), value.get("password"))
        for key, inner in value.items():
            yield from _option_secrets(inner, str(key))
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from _login(*value) if len(value) == LOGIN else ()  # such as auth=(user, password)
        for inner in value:
            yield from _option_secrets(inner, name)
    elif isinstance(value, (str, bytes)):
        text = value if isinstance(value, str) else value.decode("latin-1")
        if PLAIN_NAMES.fullmatch(name):
            yield from _url_secrets(text)
        elif _is_secret(name, text):
            yield text
            yield from (word for word in text.split() if len(word) >= SECRET_LENGTH)  # such as "Bearer ..."


def _login(user: Any, password: Any) -> Iterator[str]:
    if isinstance(user, str) and isinstance(password, str):
        yield f"{user}:{password}"


def _url_secrets(url: str) -> Iterator[str]:
    """Yield the userinfo and the values of the query of a URL, or of each URL in a chain of them."""
    for link in url.split("::"):
        protocol, mark, rest = link.partition("://")
        if not mark:
            continue
        address, *others = re.split(r"[?#]" if is_http(link) else r"[?]", rest)
        for query in others:
            yield from (value for name, value in re.findall(r"([^&;=]+)=([^&;]+)", query) if _is_secret(name, value))
            yield from [query] if "=" not in query and len(query) >= SECRET_LENGTH else ()
        if protocol.lower() not in USER_IS_CONTAINER:
            userinfo = _userinfo(address)
            yield from (userinfo, userinfo.partition(":")[2])


def _userinfo(address: str) -> str:
    """Return what is before the host, also where a secret in it holds a slash."""
    first = address.partition("/")[0]
    is_whole = "@" in first or ":" not in first or re.search(r":\d*$", first)
    return (first if is_whole else address).rpartition("@")[0]
