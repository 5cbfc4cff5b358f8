"""Opens the files of a command once: for what it shows of them, and for the loaders that it makes."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import pyarrow as pa

from torch_dataloader_utils.cli.options import TIMEOUT_SEC
from torch_dataloader_utils.columns.arrow import nbytes, width
from torch_dataloader_utils.dataset.discovery import Request
from torch_dataloader_utils.dataset.file_set import FileSet
from torch_dataloader_utils.dataset.options import LoaderOptions
from torch_dataloader_utils.dataset.structured import StructuredDataset
from torch_dataloader_utils.formats.opened_files import OpenedFiles, files_of
from torch_dataloader_utils.formats.read_cache import ReadCache
from torch_dataloader_utils.loader.data_loader import StructuredDataLoader

SAMPLE_BATCHES = 16
"""Batches of 1,024 rows from which the size of columns of no fixed width is estimated."""


@dataclass(frozen=True)
class OpenedDataset(FileSet):
    """Files that were opened for one rank.

    Attributes:
        opened: The files.
        options: The options that they were opened with.
        arguments: The same as `create_dataloader` takes them.
    """

    opened: OpenedFiles
    options: LoaderOptions
    arguments: Mapping[str, Any] = field(repr=False)

    def open(self, request: Request) -> OpenedFiles:  # noqa: ARG002 - all loaders are of the same columns
        """Return the files: they are opened already."""
        return self.opened

    def loader(self, **arguments: Any) -> tuple[StructuredDataLoader, StructuredDataset]:
        """Make a loader of these files, which are not listed again, with some other arguments."""
        own = {name: value for name, value in self.arguments.items() if name not in OF_FILES}
        return StructuredDataset.create_dataloader(self, **{**own, **arguments})

    def with_arguments(self, **arguments: Any) -> OpenedDataset:
        """Return the same files for loaders with some other arguments, which are not about the files."""
        return replace(self, arguments={**self.arguments, **arguments})

    def with_columns(self, columns: Sequence[str] | None) -> OpenedDataset:
        """Return the same files with other columns. They are listed again only if a manifest cannot describe them."""
        manifest = None
        with contextlib.suppress(ValueError):  # a query in a URL, which may be secret
            manifest = self.loader()[1].dump_manifest()
        return open_dataset(**{**self.arguments, "columns": columns, "manifest": manifest})

    def stored_row_bytes(self, most_files: int = 1000) -> float:
        """Return the compressed bytes of a row in the chosen columns, from footers: of at most so many files."""
        files = self.opened.manifest.files
        measured = files[:: -(-len(files) // most_files)] if files else ()
        codec = self.opened.format.codec(self.opened, ReadCache.of_opened(self.opened.footers).footers)
        try:
            stored = sum(sum(codec.layout(file.path).measures().stored) for file in measured)
        finally:
            codec.close()
        return stored / max(1, sum(group.expected for file in measured for group in file.row_groups))

    def decoded_row_bytes(self) -> float:
        """Return the bytes of a row in memory, in the chosen columns: of no fixed width, of the first rows read."""
        schema = self.opened.schema
        fixed = sum(width(column.type) for column in schema)
        variable = [column.name for column in schema if not width(column.type)]
        if not variable:
            return fixed
        loader, _ = self.with_columns(variable).loader(output_format="arrow", shuffle=True, batch_size=1024)
        sample = pa.concat_tables(islice(loader, SAMPLE_BATCHES))
        return float(fixed + nbytes(sample) / max(1, len(sample)))


OF_FILES = ("path", "storage_options", "partitioning", "manifest", "format_options")
"""Arguments that say which files these are."""


def open_dataset(path: Any, **arguments: Any) -> OpenedDataset:
    """List the files and read their footers, for one rank. The arguments are those of `create_dataloader`.

    Raises what `create_dataloader` raises.
    """
    arguments = {"path": path, "num_ranks": 1, "rank": 0, "num_workers": 0, "storage_timeout": TIMEOUT_SEC, **arguments}
    parameters = inspect.signature(StructuredDataset.create_dataloader).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    options = LoaderOptions.parse({**defaults, "dataloader_kwargs": {}, **arguments}, parameters)
    return OpenedDataset(files_of(options.open_files(), "this"), options, arguments)
