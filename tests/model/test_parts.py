"""Lists cut into what one call carries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.model.job import parts_of


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([], []),
        ([5], [[5]]),
        ([99], [[99]]),
        ([4, 4, 4], [[4, 4], [4]]),
        ([1, 99, 1], [[1], [99], [1]]),
        ([1, 1, 1, 1], [[1, 1, 1], [1]]),
    ],
)
def test_parts_hold_at_most_three_items_and_ten_bytes(sizes: list[int], parts: list[list[int]]) -> None:
    assert parts_of(sizes, int, most=3, most_bytes=10) == parts


@given(st.lists(st.integers(0, 20)))
def test_nothing_is_lost_and_nothing_is_too_much(sizes: list[int]) -> None:
    parts = parts_of(sizes, int, most=3, most_bytes=10)
    assert [size for part in parts for size in part] == sizes
    assert all(part and len(part) <= 3 and (sum(part) <= 10 or len(part) == 1) for part in parts)
