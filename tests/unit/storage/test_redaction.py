"""No secret is in what an error shows, nor in the errors that it came from."""

from __future__ import annotations

import errno
import traceback

import pytest
from botocore.exceptions import NoCredentialsError

from torch_dataloader_utils import UnreadableFileError
from torch_dataloader_utils.storage.redaction import Redactor
from torch_dataloader_utils.storage.stored_file import StoredFile

SECRET = "a very secret value"


def fail() -> None:
    try:
        _ = {}[SECRET]
    except KeyError as error:
        raise RuntimeError(f"not with {SECRET}") from error


@pytest.mark.parametrize("depth", [1, 2])
def test_an_error_holds_no_secret_and_no_error_that_does(depth):
    redactor = Redactor({"token": SECRET})

    def read(levels: int) -> None:
        with redactor.errors(lambda: f"file {levels}"):
            fail() if levels == 1 else read(levels - 1)

    with pytest.raises(UnreadableFileError, match=r"file 1: RuntimeError: not with \*\*\*") as raised:
        read(depth)
    assert raised.value.__context__ is raised.value.__cause__ is None
    shown = traceback.TracebackException.from_exception(raised.value, capture_locals=False)
    assert SECRET not in "".join(shown.format())
    assert SECRET not in repr(raised.value)


def test_a_secret_of_few_characters_is_removed_where_it_stands_alone_and_not_from_words():
    redactor = Redactor({"key": "a", "secret": "no", "token": "abcd"})
    text = "no data: key=a, secret='no' and token abcd-abcde of a bucket are unknown"
    assert redactor.clean(text) == ("*** data: key=***, secret='***' and token ***-***e of *** bucket are unknown")


def test_a_listed_file_is_shown_without_its_location():
    file = StoredFile("a.parquet", "http://user:hunter2@host/a.parquet", 100, "v1", 2.5)
    assert repr(file) == "StoredFile(path='a.parquet', size=100, etag='v1', modified=2.5)"


def client(*, anon: bool = False) -> None:
    """Make a storage's client."""


def test_errors_that_only_who_knows_the_client_understands_say_what_to_do():
    options = {"anonn": True}
    redactor = Redactor({"s3": [options]})
    unknown = pytest.raises(UnreadableFileError, match=r"the storage knows no option 'anonn'$")
    with unknown, redactor.errors(lambda: "s3://bucket"):
        client(**options)
    ours = pytest.raises(UnreadableFileError, match=r"unexpected keyword argument 'anonn'$")
    with ours, Redactor({}).errors(lambda: "s3://bucket"):
        client(**options)
    nobody = pytest.raises(
        UnreadableFileError, match=r"Unable to locate credentials; set AWS_ACCESS_KEY_ID.*'anon': True"
    )
    with nobody, redactor.errors(lambda: "s3://bucket"):
        raise NoCredentialsError
    full = pytest.raises(UnreadableFileError, match=r"a\.parquet: .*Too many open files; .*ulimit -n")
    with full, redactor.errors(lambda: "a.parquet"):
        raise OSError(errno.EMFILE, "Too many open files")
