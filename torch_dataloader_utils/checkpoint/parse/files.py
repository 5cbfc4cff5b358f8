"""The files that a state lists, from outside to frozen values. Pure."""

from __future__ import annotations

from torch_dataloader_utils.checkpoint.json_value import JsonValue
from torch_dataloader_utils.checkpoint.saved_state import BINDING, SavedFile

FILE_REQUIRED = ("path", "size", "digest")

FILE_OPTIONAL = ("etag", "modified", "rows")
"""What a file's entry holds, in order, after what it must hold."""


def parse_listed_files(table: JsonValue) -> tuple[tuple[SavedFile, ...] | None, dict[str, int | None]]:
    """Return the files, None if they are not listed, and the rows of each by its path."""
    files = None if table.is_null else parse_files(table)
    return files, {file.path: file.rows for file in files or ()}


def parse_files(table: JsonValue) -> tuple[SavedFile, ...]:
    """Return the files, or raise a ValueError that names the wrong value."""
    files = []
    for entry in table.items():
        values = entry.items()
        if not len(FILE_REQUIRED) <= len(values) <= len(FILE_REQUIRED) + len(FILE_OPTIONAL):
            raise entry.fail(f"a list of {', '.join(FILE_REQUIRED)} and perhaps {', '.join(FILE_OPTIONAL)}")
        path, size, digest, *extra = values
        etag, modified, rows = [*extra, *[JsonValue(None, "")] * len(FILE_OPTIONAL)][: len(FILE_OPTIONAL)]
        seconds = None if modified.is_null else modified.number()
        file = path.string(), size.integer(), digest.string(), etag.optional_string(), seconds, rows.optional_integer()
        files.append(SavedFile(*file))
    if len({file.path for file in files}) != len(files):
        raise table.fail("each path once")
    return tuple(files)


def parse_bindings(bindings: JsonValue, files: tuple[SavedFile, ...] | None) -> str | None:
    """Return what the filter's columns are in each file, `BINDING` characters for each; None if it is not recorded."""
    if bindings.missing or bindings.is_null:
        return None
    if len(bindings.string()) != BINDING * len(files or ()):
        raise bindings.fail(f"{BINDING} characters for each of the files")
    return bindings.string()
