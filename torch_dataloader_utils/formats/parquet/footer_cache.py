"""The footers of files that a `_metadata` file describes: read when they are first needed, and compared with it."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from torch_dataloader_utils.errors import UnreadableFileError
from torch_dataloader_utils.formats.base import OpenedFiles
from torch_dataloader_utils.formats.concurrency import FOOTER_THREADS
from torch_dataloader_utils.formats.parquet.footer import FooterReader, parse_footer
from torch_dataloader_utils.formats.parquet.metadata_file import described_columns, description_digest
from torch_dataloader_utils.formats.read_cache import FooterStore

__all__ = ["FooterCache"]


class FooterCache:
    """Files' footers as bytes: those that are known, and those that are read when they are first needed.

    Args:
        files: The files.
        known: The known footers. Those that are read are added.
    """

    def __init__(self, files: OpenedFiles, known: FooterStore) -> None:
        self._storage = files.storage
        self._files = files.files
        self._digests = {file.path: file.digest for file in files.manifest.files}
        self._known = known
        self._requested: dict[str, Future[bytes]] = {}
        self._threads: ThreadPoolExecutor | None = None

    def expect(self, paths: Iterable[str]) -> None:
        """Begin to read footers that are needed soon, unless the storage is local and answers at once."""
        if self._storage.is_local:
            return
        for path in paths:
            if path not in self._known and path not in self._requested:
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(FOOTER_THREADS, thread_name_prefix="fetch_footers")
                self._requested[path] = self._threads.submit(self._read, path)

    def __getitem__(self, path: str) -> bytes:
        if path not in self._known:
            requested = self._requested.pop(path, None)
            self._known.add({path: self._read(path) if requested is None else requested.result()})
        return self._known[path]

    def close(self) -> None:
        """Read nothing more; wait for what is being read."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def _read(self, path: str) -> bytes:
        content = FooterReader(self._storage).content(self._files[path])
        name = self._storage.display(self._files[path].location)
        with self._storage.errors_at(f"the footer of {name}"):
            metadata = parse_footer(content)
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            if description_digest(described_columns(metadata.schema), groups) != self._digests[path]:
                msg = f"{name} is not the file that `_metadata` describes: write `_metadata` again, or remove it"
                raise UnreadableFileError(msg)
        return content
