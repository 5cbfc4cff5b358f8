"""The footers of files that a `_metadata` file describes: read when they are first needed, and compared with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from torch_dataloader_utils.errors import UnreadableFileError
from torch_dataloader_utils.formats.base import FOOTER_THREADS
from torch_dataloader_utils.formats.parquet.footer import FooterReader, parse_footer
from torch_dataloader_utils.formats.parquet.metadata_file import described_columns, description_digest
from torch_dataloader_utils.planning.manifest import DataFile
from torch_dataloader_utils.storage.filesystem import Storage, StoredFile

__all__ = ["Footers"]


class Footers:
    """The files' footers as bytes: those that are known, and those that are read when they are first needed.

    Args:
        storage: Where the files lie.
        files: The files, by path.
        described: The same as the plan knows them.
        known: Footers by path; what is read is added to them.
    """

    def __init__(
        self,
        storage: Storage,
        files: Mapping[str, StoredFile],
        described: Mapping[str, DataFile],
        known: dict[str, bytes],
    ) -> None:
        self._storage = storage
        self._files = files
        self._described = described
        self._known = known
        self._asked: dict[str, Future[bytes]] = {}
        self._threads: ThreadPoolExecutor | None = None

    def expect(self, paths: Iterable[str]) -> None:
        """Begin to read footers that are needed soon, unless the storage is local and answers at once."""
        if self._storage.is_local:
            return
        for path in paths:
            if path not in self._known and path not in self._asked:
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(FOOTER_THREADS, thread_name_prefix="fetch_footers")
                self._asked[path] = self._threads.submit(self._read, path)

    def __getitem__(self, path: str) -> bytes:
        content = self._known.get(path)
        if content is None:
            asked = self._asked.pop(path, None)
            content = self._known[path] = self._read(path) if asked is None else asked.result()
        return content

    def close(self) -> None:
        """Read no more; what is being read is waited for."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def _read(self, path: str) -> bytes:
        content = FooterReader(self._storage).content(self._files[path])
        name = self._storage.display(self._files[path].location)
        with self._storage.errors_at(f"the footer of {name}"):
            metadata = parse_footer(content)
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            if description_digest(described_columns(metadata.schema), groups) != self._described[path].digest:
                msg = f"{name} is not the file that `_metadata` describes: write `_metadata` anew, or remove it"
                raise UnreadableFileError(msg)
        return content
