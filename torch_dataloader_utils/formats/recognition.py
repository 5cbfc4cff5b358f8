"""Which format a file seems to have, by its name and its bytes: for hints in errors. It decides nothing."""

from __future__ import annotations

PARQUET_MAGIC = b"PAR1"
"""What a Parquet file begins with and ends in."""

ORC_MAGIC = b"ORC"
"""What an ORC file begins with, and ends in but for a last byte."""

COMPRESSIONS = ("", ".gz", ".zst")

ENDINGS: dict[str, tuple[str, ...]] = {
    "parquet": (".parquet", ".parq", ".pq"),
    "orc": (".orc",),
    "csv": tuple(f".csv{compression}" for compression in COMPRESSIONS),
    "jsonl": tuple(f"{name}{compression}" for name in (".jsonl", ".ndjson", ".json") for compression in COMPRESSIONS),
}
"""Endings of the names of each format's files, in lower case."""


def format_hint(name: str, current: str, *, begin: bytes = b"", end: bytes = b"") -> str:
    """Return the end of a message that says which format to pass; empty if the file does not seem to have another one.

    It judges by a file's path, and by its first and last bytes where they are known.
    """
    if begin.startswith(PARQUET_MAGIC) or end.endswith(PARQUET_MAGIC):
        found, reason = "parquet", "it looks like a Parquet file"
    elif begin.startswith(ORC_MAGIC) or end[:-1].endswith(ORC_MAGIC):
        found, reason = "orc", "it looks like an ORC file"
    else:
        endings = ((other, ending) for other, known in ENDINGS.items() for ending in known)
        matches = (match for match in endings if name.lower().endswith(match[1]))
        found, ending = next(matches, (current, ""))
        reason = f"its name ends in {ending!r}"
    return "" if found == current else f'; {reason}: pass format="{found}"'
