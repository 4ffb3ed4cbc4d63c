"""The inbox's error for what Kafka has lost. What is a loss: see test_planner."""

from __future__ import annotations

from outbox.consumer.losses import find_losses
from outbox.consumer.model import OffsetBounds, StoredOffset
from outbox.inbox import PositionLost, TopicReplaced
from outbox.inbox._kafka import lost


def test_one_error_for_all_losses():
    positions = {("a", 0): StoredOffset("a", 3), ("b", 0): StoredOffset("b", 4), ("c", 0): StoredOffset("c", 1)}
    bounds = {("a", 0): OffsetBounds(5, 9), ("b", 0): OffsetBounds(0, 9), ("c", 0): OffsetBounds(0, 9)}
    ids = {"a": "a", "b": "other", "c": "c"}
    error = lost(find_losses(positions, bounds, ids), positions, "billing")
    assert isinstance(error, TopicReplaced)
    assert (error.topic, error.partition, error.position) == ("a", 0, 3)
    assert "and 1 partitions more" in str(error)
    only = lost(find_losses({("a", 0): positions["a", 0]}, bounds, ids), positions, "billing")
    assert type(only) is PositionLost
    assert "`outbox offsets reset billing --topic a --to loss" in str(only)
