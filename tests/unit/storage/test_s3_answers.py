"""Answers of S3 that are not what was requested."""

from __future__ import annotations

import pytest

from torch_dataloader_utils.storage.causes import ChangedFileError, require_same_version
from torch_dataloader_utils.storage.s3 import _require_same


@pytest.mark.parametrize("start", [0, 10], ids=["from the beginning", "from the middle"])
def test_an_answer_with_the_whole_object_is_not_taken_for_a_range(start):
    with pytest.raises(OSError, match="names no range"):
        _require_same({"ETag": '"a"', "ContentLength": 100}, start, 20, "a")


@pytest.mark.parametrize("content_range", ["bytes 10-19/100", "bytes 10-19/*", ""], ids=["sized", "unsized", "unnamed"])
def test_an_answer_with_as_much_as_was_requested_is_taken(content_range):
    _require_same({"ETag": '"a"', "ContentLength": 10, "ContentRange": content_range}, 10, 20, "a")


@pytest.mark.parametrize("answered", ["a", '"a"', 'W/"a"', 'W/"a', ""])
def test_an_etag_that_a_proxy_has_marked_as_weak_is_the_same(answered):
    require_same_version("a", answered)
    require_same_version('W/"a"', answered)
    with pytest.raises(ChangedFileError, match="its etag was b"):
        require_same_version("b", answered or "a")
