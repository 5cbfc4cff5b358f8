"""Servers that answer with the whole file, whichever part of it is requested."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torch_dataloader_utils import StructuredDataset, UnreadableFileError


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in http.server
        pass


@pytest.fixture
def server(tmp_path) -> Iterator[str]:
    """The URL of Python's own server of a directory, which knows no ranges."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=tmp_path)) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()


def test_a_server_that_knows_no_ranges_is_soon_an_error_that_says_so(server, tmp_path):
    values = pa.table({"id": range(50_000), "half": [one / 2 for one in range(50_000)]})
    pq.write_table(values, Path(tmp_path) / "some.parquet", row_group_size=10_000)
    with pytest.raises(UnreadableFileError, match="has to answer requests for a range of bytes"):
        StructuredDataset.create_dataloader(f"{server}/some.parquet", num_workers=0)
