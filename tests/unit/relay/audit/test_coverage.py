"""Of which minutes the archive and the ledger have all events."""

from __future__ import annotations

from typing import Any

import pytest

from relay.audit.coverage import Coverage
from relay.audit.ledger import LedgerState
from relay.audit.sums import Window, minute_start
from relay.audit.topics import Topics
from relay.kafka.offsets import Partition

MINUTES = range(100, 160)


@pytest.mark.parametrize(
    ("first", "on", "last", "whole"),
    [(100, True, 120, True), (106, True, 120, False), (100, False, 120, False), (100, False, 170, True)],
)
def test_the_archive_has_all_places_if_it_was_on_for_all_minutes(first, on, last, whole):
    coverage = Coverage(MINUTES)
    coverage.own = {"orders"}
    assert coverage.whole == ()
    coverage.of_archive((first, minute_start(last)), on=on)
    assert coverage.whole == ({"orders"} if whole else ())


def test_events_of_the_ledgers_first_minutes_may_have_been_written_before_it_was_on():
    """The clocks of writers may be ahead."""
    coverage = Coverage(MINUTES)
    coverage.of_ledger(LedgerState(b"key", minute_start(110)), b"key")
    assert [coverage.counted(Window("orders", minute)) for minute in (110, 111, 115, 116)] == [False] * 3 + [True]


class Log:
    """Of two topics, whose first records retention has deleted."""

    partitions = staticmethod(lambda topics: [Partition(topic, 0) for topic in sorted(topics)])
    low = staticmethod(lambda partitions: dict.fromkeys(partitions, 10))
    stable = staticmethod(lambda partitions: dict.fromkeys(partitions, 50))
    since = staticmethod(lambda partitions, _: dict.fromkeys(partitions, 10))


def test_the_archive_says_nothing_of_what_was_deleted_of_another_outboxs_topic():
    topics: Any = Topics({"bootstrap.servers": "127.0.0.1:1"}, {"orders", "carts"}, "/outbox", b"key")
    topics._offsets = Log()
    found = topics.extents(minute_start(100), {Partition("orders", 0): 10}, complete={"orders"})
    assert {place.topic: extent.cut for place, extent in found.items()} == {"orders": False, "carts": True}
