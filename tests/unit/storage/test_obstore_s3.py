"""When obstore reads in the place of s3fs: where it is certain to read the same, and never behind a fork."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest

from torch_dataloader_utils.storage.obstore.options import options_of
from torch_dataloader_utils.storage.obstore.s3 import ObstoreError, ObstoreS3, _may_be_marked

URL = "s3://bucket/data"
PAIR = {"key": "K", "secret": "S"}
HERE = {"endpoint_url": "http://127.0.0.1:1"}
SIGNED = {"aws_access_key_id": "K", "aws_secret_access_key": "S"}
ADDRESS = {"region": "us-east-1", "endpoint": "http://127.0.0.1:1"}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take all of AWS's variables out of the environment."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("options", "variables", "expected"),
    [
        pytest.param(PAIR | HERE, {}, SIGNED | ADDRESS, id="a key"),
        pytest.param(
            PAIR | HERE | {"token": "T"}, {}, SIGNED | ADDRESS | {"aws_session_token": "T"}, id="a key and its token"
        ),
        pytest.param({"anon": True} | HERE, {}, {"skip_signature": True} | ADDRESS, id="no key"),
        pytest.param(
            HERE,
            {"AWS_ACCESS_KEY_ID": "K", "AWS_SECRET_ACCESS_KEY": "S"},
            SIGNED | ADDRESS,
            id="key of the environment",
        ),
        pytest.param(
            PAIR | {"client_kwargs": {"region_name": "eu-west-1"}}, {}, SIGNED | {"region": "eu-west-1"}, id="a region"
        ),
        pytest.param(
            PAIR, {"AWS_DEFAULT_REGION": "eu-west-1"}, SIGNED | {"region": "eu-west-1"}, id="region of the environment"
        ),
        pytest.param(
            PAIR | HERE, {"AWS_CA_BUNDLE": "/ca.pem"}, SIGNED | ADDRESS, id="certificates that nothing asks for"
        ),
        pytest.param(PAIR | {"endpoint_url": "https://s3"}, {"AWS_CA_BUNDLE": "/ca.pem"}, None, id="certificates"),
        pytest.param(PAIR, {}, None, id="no region"),
        pytest.param(PAIR | {"endpoint_url": "localhost:9000"}, {}, None, id="endpoint without a scheme"),
        pytest.param(PAIR | {"endpoint_url": "http://[::1"}, {}, None, id="endpoint that is none"),
        pytest.param(PAIR | {"endpoint_url": "http://h:99999"}, {}, None, id="port that is none"),
        pytest.param(
            PAIR | {"endpoint_url": "https://s3.example/storage/v1"},
            {},
            SIGNED | {"region": "us-east-1", "endpoint": "https://s3.example/storage/v1"},
            id="endpoint with a path",
        ),
        pytest.param(PAIR | HERE | {"secret": "S\n"}, {}, None, id="secret with the end of its line"),
        pytest.param(HERE, {}, None, id="a key from a file or a service"),
        pytest.param({"key": "K"} | HERE, {}, None, id="half a key"),
        pytest.param({"anon": True} | PAIR | HERE, {}, None, id="a key that is not to be used"),
        pytest.param({"anon": True} | HERE, {"AWS_ACCESS_KEY_ID": "K"}, None, id="half a key of the environment"),
        pytest.param(PAIR | HERE, {"AWS_SESSION_TOKEN": "T"}, None, id="token of another key"),
        pytest.param(PAIR | HERE, {"AWS_PROFILE": "other"}, None, id="a profile"),
        pytest.param(PAIR | HERE | {"requester_pays": True}, {}, None, id="an option of s3fs"),
        pytest.param(PAIR | HERE | {"client_kwargs": {"verify": False}}, {}, None, id="an option of botocore"),
    ],
)
def test_options_are_translated_where_both_clients_would_read_the_same(monkeypatch, options, variables, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert options_of([URL], options) == expected


ELSEWHERE = {"client_kwargs": {"region_name": "us-east-1"}}
FOLLOWED = {
    "a region besides that of the options": ("[default]\nregion = eu-west-1\noutput = json", ELSEWHERE, False),
    "another key": ("[default]\naws_access_key_id = a\naws_secret_access_key = b", ELSEWHERE, False),
    "another profile": ("[profile other]\ns3 =\n  x = y\n[other]\nendpoint_url = http://127.0.0.1:2", ELSEWHERE, False),
    "a region": ("[default]\nregion = eu-west-1", HERE, True),
    "an endpoint": ("[default]\nendpoint_url = http://127.0.0.1:2", ELSEWHERE, True),
    "an endpoint of a quoted profile": ('[profile "default"]\nendpoint_url = http://127.0.0.1:2', ELSEWHERE, True),
    "virtual addresses": ("[default]\ns3 =\n  addressing_style = virtual", HERE, True),
    "a damaged file": ("[default]\nno setting", HERE, True),
}


@pytest.mark.parametrize("file", ["config", "credentials"])
@pytest.mark.parametrize("case", FOLLOWED)
def test_what_the_files_of_settings_say_is_left_to_s3fs(monkeypatch, tmp_path, file, case):
    settings, options, is_left = FOLLOWED[case]
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / file).write_text(f"{settings}\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (options_of([URL], PAIR | options) is None) == is_left


@pytest.mark.parametrize("path", ["data//part", "data/../part", "./data", "data?versionId=1", "data#1", "a:b"])
def test_a_path_that_the_clients_may_read_in_different_ways_is_left_to_s3fs(path):
    assert options_of([URL, f"s3://bucket/{path}"], PAIR | HERE) is None


def test_neither_its_text_nor_its_pickle_holds_a_client_or_its_text_a_secret():
    client = ObstoreS3({"aws_secret_access_key": "hidden"}, {"secret": "hidden"}, 1.0)
    client.__dict__["s3fs"] = lambda: None  # cannot be pickled
    assert "hidden" not in repr(client)
    assert pickle.loads(pickle.dumps(client)) == client


TOLD_BY_S3 = (
    "Error performing GET http://x in 3ms - status code: 503 Busy: "
    "<Error><Code>SlowDown</Code><Message>Reduce your rate.</Message></Error>\n\nDebug source:\nSomething"
)


@pytest.mark.parametrize(
    ("words", "told", "status"),
    [
        (
            TOLD_BY_S3,
            "SlowDown: Reduce your rate. (status 503)",
            503,
        ),
        ("Error performing HEAD http://x - status code: 400 Bad Request\n\nDebug source:\nSomething", None, 400),
        ("Error performing GET http://x: connection refused\n\nDebug source:\nSomething", None, None),
    ],
    ids=["words of S3", "no words", "no answer"],
)
def test_an_error_says_what_s3_said_without_debugging_output(words, told, status):
    error = ObstoreError(RuntimeError(words))
    assert str(error) == (told or words.partition("\n")[0])
    assert error.status == status


FORKED = """
import os, sys
if sys.argv[1] == "imported":
    import obstore
from torch_dataloader_utils.storage.obstore.s3 import is_usable
print(is_usable(), flush=True)
child = os.fork()
if child == 0:
    grandchild = os.fork()
    if grandchild == 0:
        print(is_usable(), flush=True)
    else:
        os.waitpid(grandchild, 0)
    os._exit(0)
os.waitpid(child, 0)
print(is_usable(), flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="This system has no fork.")
@pytest.mark.parametrize(("when", "in_child"), [("imported", "False"), ("not imported", "True")])
def test_a_process_uses_obstore_unless_it_was_forked_after_its_import(when, in_child):
    pytest.importorskip("obstore")
    done = subprocess.run([sys.executable, "-c", FORKED, when], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", in_child, "True"], done.stderr


@pytest.mark.parametrize(
    ("names", "sizes", "may_be"),
    [
        (["b/.keep", "b/_SUCCESS", "b/x.parquet"], [0, 0, 9], False),
        (["b/x.parquet", "b/x.parquet/part.parquet"], [0, 9], True),
        (["b/x.parquet", "b/x.parquet/part.parquet"], [9, 9], True),
        (["b/x.parquet", "b/x.parquet2"], [9, 9], False),
        (["b/x.parquet"], [0], True),
        ([], [], False),
    ],
)
def test_listings_are_left_to_s3fs_where_a_directory_may_look_like_a_file(names, sizes, may_be):
    found = [{"name": name, "size": size} for name, size in zip(names, sizes, strict=True)]
    assert _may_be_marked(found) == may_be


INHERITED = """
import gc, os, sys, weakref
from obstore.exceptions import BaseError
from torch_dataloader_utils.storage.obstore.calls import ObstoreCalls

calls = ObstoreCalls({"endpoint": "http://127.0.0.1:1", "region": "us-east-1", "skip_signature": True}, 1)
try:
    calls.head("bucket", "key")
except BaseError:  # nobody answers, but the client has begun to run
    pass
living = weakref.ref(calls)
child = os.fork()
del calls
gc.collect()
if child:
    assert living() is None
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
os._exit(0 if living() is not None else 3)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="This system has no fork.")
def test_a_forked_process_keeps_what_it_inherits():
    """To end a client asks its runtime, whose lock another thread may have had when the process was forked."""
    pytest.importorskip("obstore")
    subprocess.run([sys.executable, "-c", INHERITED], check=True, timeout=60)


AT_ONCE = """
import threading, time
from concurrent.futures import ThreadPoolExecutor
from torch_dataloader_utils.storage.obstore.calls import ObstoreCalls

options = {"endpoint": "http://127.0.0.1:1", "region": "us-east-1"}
calls = ObstoreCalls(options | {"aws_access_key_id": "K", "aws_secret_access_key": "S"}, 1)
made, new_store = [], calls._new_store


def new_slowly(*arguments, **options):
    time.sleep(0.2)  # threads that are not kept out come meanwhile
    made.append(new_store(*arguments, **options))
    return made[-1]


def signed(key):
    together.wait()
    return calls.signed("bucket", key)


calls._new_store, together = new_slowly, threading.Barrier(4)
with ThreadPoolExecutor(4) as threads:
    urls = list(threads.map(signed, "abcd"))
assert [url.partition("?")[0][-1] for url in urls] == list("abcd"), urls
assert len(made) == 1, made
"""


def test_threads_that_want_a_bucket_at_once_make_one_client():
    """To make one takes some 15 ms of a processor, and threads that fetch want it at the same moment."""
    pytest.importorskip("obstore")
    subprocess.run([sys.executable, "-c", AT_ONCE], check=True, timeout=60)
