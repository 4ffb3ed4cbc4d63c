"""Which stored positions Kafka no longer has: a pure comparison."""

from __future__ import annotations

import pytest

from outbox.inbox import PositionLost, TopicReplaced
from outbox.inbox._group import Position
from outbox.inbox._kafka import Extent, find_losses, lost

PLACE = ("orders", 3)


@pytest.mark.parametrize(
    ("next_offset", "extent", "found"),
    [
        (5, Extent("id", 5, 5), None),
        (5, Extent("id", 0, 9), None),
        (9, Extent("id", 0, 9), None),
        (4, Extent("id", 5, 9), ("retention", 4, 5)),
        (10, Extent("id", 0, 9), ("cut", 9, 10)),
        (5, Extent("other", 0, 9), ("recreated", 5, None)),
        (0, Extent("other", 0, 0), ("recreated", 0, None)),
        # A broker with old metadata does not list the partition.
        (5, None, None),
    ],
)
def test_what_is_lost(next_offset, extent, found):
    extents = {} if extent is None else {PLACE: extent}
    losses = find_losses({PLACE: Position("id", next_offset, 1)}, extents)
    assert [(loss.place, loss.kind, loss.first, loss.end) for loss in losses] == ([(PLACE, *found)] if found else [])


def test_one_error_for_all_losses():
    positions = {("a", 0): Position("a", 3, 1), ("b", 0): Position("b", 4, 1), ("c", 0): Position("c", 1, 1)}
    extents = {("a", 0): Extent("a", 5, 9), ("b", 0): Extent("other", 0, 9), ("c", 0): Extent("c", 0, 9)}
    error = lost(find_losses(positions, extents), positions, "billing")
    assert isinstance(error, TopicReplaced)
    assert (error.topic, error.partition, error.position) == ("a", 0, 3)
    assert "and 1 partitions more" in str(error)
    only = lost(find_losses({("a", 0): positions["a", 0]}, extents), positions, "billing")
    assert type(only) is PositionLost
    assert "`outbox offsets reset billing --topic a --to loss" in str(only)
