"""What a probe sees of a member without an assignment. With one: tests/integration/outbox/inbox."""

from __future__ import annotations

from outbox.consumer.stalled import Watch


def test_a_member_without_an_assignment_is_not_ready():
    watch = Watch()
    watch.unassigned(["orders", "invoices"])
    [one] = watch.stalled(0.0)
    assert (one.topic, one.partition, one.offset) == ("orders, invoices", None, None)
    assert str(one).startswith("the group assigns nothing of orders, invoices to this member since 2")
    assert "max.poll.interval.ms" in str(one)
    # Time goes on.
    watch.unassigned(["orders"])
    watch.failed([None], "the group is full")
    [later] = watch.stalled(0.0)
    assert (later.since, later.why) == (one.since, "the group is full")
    assert watch.stalled(3600.0) == []
    # Of several members some get none.
    watch.assigned([])
    watch.failed([None], "a broker is away")
    assert watch.stalled(0.0) == []


def test_beside_partitions():
    watch = Watch()
    watch.waits(("orders", 1), 7)
    watch.waits(("orders", 0), 5)
    watch.unassigned(["orders"])
    assert [(one.partition, one.offset) for one in watch.stalled(0.0)] == [(None, None), (0, 5), (1, 7)]
    watch.assigned({("orders", 1)})
    assert [one.partition for one in watch.stalled(0.0)] == [1]
