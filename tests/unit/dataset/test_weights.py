"""Weights are exact: the fractions of the decimals that were given."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest

from torch_dataloader_utils.dataset.weights import exact_shares, parse_weights


def test_weights_are_the_exact_fractions_of_their_decimals():
    assert exact_shares({"a": 0.1, "b": 0.2, "c": 0.7}, "abc") == (Fraction(1, 10), Fraction(1, 5), Fraction(7, 10))
    assert exact_shares({"b": Decimal("0.5"), "a": 1}, "ab") == (Fraction(2, 3), Fraction(1, 3))
    assert exact_shares({"a": Fraction(1, 3), "b": 0}, "ab") == (1, 0)
    assert exact_shares({"a": 1e-30, "b": 1e-30}, "ab") == (Fraction(1, 2), Fraction(1, 2))


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        ({"a": True, "b": 1}, TypeError, "source 'a'"),
        ({"a": "1", "b": 1}, TypeError, "source 'a'"),
        ({"a": float("inf"), "b": 1}, ValueError, "source 'a'"),
        ({"a": 1, "c": 1}, ValueError, "'c', which is no source"),
        (0.5, TypeError, "weights=0.5"),
        ([], ValueError, "from row 0 on"),
        ([(5, {"a": 1, "b": 1})], ValueError, "from row 0 on"),
        ([(0, {"a": 1, "b": 1}), (0, {"a": 1, "b": 1})], ValueError, "row 0"),
        ([(0.5, {"a": 1, "b": 1})], TypeError, "row"),
        ([{"a": 1, "b": 1}], TypeError, "expected"),
    ],
    ids=["flag", "text", "infinite", "unknown", "number", "none", "late", "twice", "half", "no row"],
)
def test_wrong_weights_name_the_source(weights, error, message):
    with pytest.raises(error, match=message):
        parse_weights(weights, ["a", "b"])
