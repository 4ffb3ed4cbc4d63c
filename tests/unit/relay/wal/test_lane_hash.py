"""The hash's arithmetic, against values of a server. tests/integration/relay/wal/test_stream.py asks a running one."""

from __future__ import annotations

import pytest

from relay.wal.lane_hash import hash_text, lane_of


def test_a_known_value():
    # SELECT hashtextextended('Order', 0)
    assert hash_text("Order", 0) == -3018508084295342439


# SELECT abs(mod(hashtextextended(id, hashtextextended(type, 0)), lanes)), for 4, 7 and 256 lanes. The hash takes twelve
# bytes at a time: texts of none, one less, as many, one more and twice as many; and bytes above 127.
@pytest.mark.parametrize(
    ("aggregate_type", "aggregate_id", "lanes"),
    [
        ("Order", "4711", (1, 3, 193)),
        ("Order", "", (2, 5, 102)),
        ("", "Order", (0, 5, 68)),
        ("Order", "b" * 11, (1, 2, 77)),
        ("Order", "a" * 12, (3, 1, 143)),
        ("Order", "c" * 13, (3, 0, 35)),
        ("Order", "d" * 24, (0, 4, 116)),
        ("Bestellung", "äöü€😀", (1, 0, 105)),
        ("x" * 200, "y" * 1000, (1, 2, 253)),
        ("Order", "\n\t\"'", (2, 2, 118)),
    ],
)
def test_lanes_are_those_that_a_server_gives(aggregate_type, aggregate_id, lanes):
    assert tuple(lane_of(aggregate_type, aggregate_id, count) for count in (4, 7, 256)) == lanes
    assert lane_of(aggregate_type, aggregate_id, 1) == 0
