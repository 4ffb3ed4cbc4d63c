"""The hash's arithmetic; tests/integration/test_stream.py holds it against a server."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from relay.lane_hash import hash_text, lane_of


def test_a_known_value():
    # SELECT hashtextextended('Order', 0)
    assert hash_text("Order", 0) == -3018508084295342439


@given(st.text(min_size=1), st.text(min_size=1), st.integers(1, 256))
def test_a_lane_is_one_of_them(aggregate_type, aggregate_id, lanes):
    assert 0 <= lane_of(aggregate_type, aggregate_id, lanes) < lanes
