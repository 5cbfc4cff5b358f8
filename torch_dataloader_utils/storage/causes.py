"""What a storage's error means: whether the file is missing, forbidden or changed, and whether to try again."""

from __future__ import annotations

import errno
import json
import math
import re
from collections.abc import Collection, Iterator
from http import HTTPStatus
from typing import Any

FORBIDDEN = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})
MISSING = frozenset({HTTPStatus.NOT_FOUND, HTTPStatus.GONE})
TRANSIENT = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS})
"""The statuses from 400 to 499 that another request helps against."""

CLIENT_ERRORS = range(400, 500)

FINAL = (FileNotFoundError, ImportError, IsADirectoryError, NotADirectoryError, NotImplementedError, PermissionError)
"""Errors that another attempt does not help against."""

DOUBTFUL = (AttributeError, LookupError, TypeError, ValueError)
"""Errors of a wrong option; or of two threads that disturbed one another, as in fsspec's caches of files."""

FEW = 3
"""How many attempts a doubtful error is worth."""

MISCONFIGURED = frozenset(
    {"NoCredentialsError", "NoRegionError", "ParamValidationError", "PartialCredentialsError", "ProfileNotFound"}
)
"""Errors of botocore, by name, that say that options are wrong or missing."""

ADVICE_BY_NAME = {
    "NoCredentialsError": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or pass storage_options={'key': ..., "
    "'secret': ...}; {'anon': True} reads public data"
}
"""What to do about errors of botocore, by name."""

ADVICE_BY_NUMBER = {
    errno.EMFILE: "the process may open no more files: raise its limit (ulimit -n)",
    errno.ENFILE: "the system may open no more files",
    errno.ENOMEM: "there is no memory left for it",
}
"""What to do about errors of the system."""

UNKNOWN_OPTION = re.compile(r"unexpected keyword argument '(?P<name>\w+)'")
"""Python's message for an option that a storage's client does not have."""

TRANSIENT_LOCAL = frozenset({errno.EAGAIN, errno.EBUSY, errno.EIO, errno.ESTALE, errno.ETIMEDOUT})
"""Errors of the system that pass, as in a network file system whose server starts again."""

S3_ERROR = re.compile(r".*<Code>(?P<code>[^<]*)</Code>.*<Message>(?P<message>[^<]*)</Message>.*", re.DOTALL)
"""What S3 says of an error, in the body of its answer."""


class ChangedFileError(OSError):
    """The storage no longer has the version of the file that was requested."""


class NoRangeError(OSError):
    """The storage answered with the whole file where a part of it was requested."""


def require_same_version(etag: str | None, answered: str) -> None:
    """Raise a ChangedFileError if an answer is of another version than was requested: they have other etags.

    Either may be marked as weak, which proxies do, and be in quotes: that does not matter (RFC 9110, section 8.8.3.2).
    """
    if etag is not None and answered and _opaque(answered) != _opaque(etag):
        raise ChangedFileError(f"it changed since it was listed: its etag was {etag} then and is {answered} now")


def advice(error: Exception, option_names: Collection[str]) -> str:
    """Return what to do about an error that says it only to who knows the storage's client; nothing about others.

    `option_names` are those of the storage's options.
    """
    unknown = UNKNOWN_OPTION.search(str(error)) if isinstance(error, TypeError) else None
    if unknown is not None and unknown["name"] in option_names:
        return f"the storage knows no option {unknown['name']!r}"
    number = error.errno if isinstance(error, OSError) else None
    return ADVICE_BY_NAME.get(type(error).__name__) or ADVICE_BY_NUMBER.get(number or 0, "")


def _opaque(etag: str) -> str:
    return etag.removeprefix("W/").strip('"')


def told_by_s3(body: str, status: int | None) -> tuple[str, str] | None:
    """Return what S3 calls an error, and what messages say of it, by the body of its answer; None if it does not say.

    Args:
        body: The body, with whatever a client has put around it.
        status: The HTTP status of the answer.
    """
    found = S3_ERROR.fullmatch(body)
    return None if found is None else (found["code"], f"{found['code']}: {found['message']} (status {status})")


def meaning(error: Exception) -> Exception:
    """Return the error itself, or the one that says what it means.

    fsspec's http filesystem raises FileNotFoundError for each failed request for a file's size. s3fs raises an OSError
    for each status that has no exception in Python. So the HTTP status decides, if there is one.
    """
    status = _status(error)
    if status in FORBIDDEN:
        advice = "the credentials or the signed URL give no access, or no longer do"
        return PermissionError(f"{_origin(error)}; {advice}")
    if status in MISSING:
        return FileNotFoundError(str(error))
    if status == HTTPStatus.PRECONDITION_FAILED or type(error).__name__ == "FileExpired":  # s3fs' error
        return ChangedFileError("it changed since it was listed: the storage no longer has that version")
    if status == HTTPStatus.BAD_REQUEST and re.search("HeadObject|HEAD", str(_origin(error))):  # without a body
        advised = OSError(f"{_origin(error)}; S3 answers so where a session token has expired or the region is wrong")
        advised.__cause__ = error  # it has the status
        return advised
    return _origin(error) if isinstance(error, FileNotFoundError) else error


def most_attempts(error: Exception) -> float:
    """Return how many attempts a remote storage's error is worth at most. It is what `meaning` returned."""
    status = _status(error)
    refused = status in CLIENT_ERRORS and status not in TRANSIENT
    if refused or isinstance(error, (*FINAL, ChangedFileError)) or type(error).__name__ in MISCONFIGURED:
        return 1
    cut_short = isinstance(error, (json.JSONDecodeError, UnicodeDecodeError))
    doubtful = isinstance(error, (*DOUBTFUL, NoRangeError)) and not cut_short
    return FEW if doubtful else math.inf


def most_attempts_locally(error: Exception) -> float:
    """Return how many attempts a local file's error is worth at most."""
    return math.inf if isinstance(error, OSError) and error.errno in TRANSIENT_LOCAL else 1


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and those that it was raised from or while they were handled."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        yield current
        seen.add(id(current))
        current = current.__cause__ or current.__context__


def _origin(error: Exception) -> Exception:
    """Return the error that has the HTTP status; or the one that an error was raised from explicitly."""
    for link in chain_of(error):
        if isinstance(link, Exception) and _own_status(link) is not None:
            return link
    return error.__cause__ if isinstance(error.__cause__, Exception) else error


def _status(error: Exception) -> int | None:
    return next((status for link in chain_of(error) if (status := _own_status(link)) is not None), None)


def _own_status(error: BaseException) -> int | None:
    """Return the HTTP status in an error of botocore, aiohttp, requests, gcsfs or azure-core; None if it has none."""
    if type(error).__module__.startswith("aiohttp.http_"):
        return None  # of an answer that was cut short, which aiohttp calls 400
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        names = ("status", "status_code", "code")
        values = (getattr(holder, name, None) for holder in (error, response) for name in names)
        found = next((value for value in values if value is not None), None)
    text = str(found)
    return int(text) if text.isdecimal() and HTTPStatus.CONTINUE <= int(text) < 600 else None  # noqa: PLR2004
