"""What is decoded together."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from torch_dataloader_utils.reading.row_groups.decoder import DecodedTables, Decoder

Calls = list[list[tuple[str, list[int]]]]


def note_decoded_together(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Return a list that gets the row groups that are decoded together, by file, call by call."""
    calls: Calls = []
    of_files = Decoder.of_files

    def noted(decoder: Decoder, groups: Sequence[tuple[str, Sequence[int]]], size: int) -> DecodedTables:
        calls.append([(file, list(numbers)) for file, numbers in groups])
        return of_files(decoder, groups, size)

    monkeypatch.setattr(Decoder, "of_files", noted)
    return calls
