"""What an event costs that the broker refuses, exactly-once with 256 lanes: counted, never by the clock."""

from __future__ import annotations

from collections import Counter

import pytest
from poisoned_relay import ATTEMPTS, Costs, Outboxed, relaying
from support import wait_until

KEYS = [f"p{n}" for n in range(6)]


@pytest.fixture
def outboxed(outbox_postgres, outbox_kafka):
    return Outboxed(outbox_postgres.url, outbox_kafka)


@pytest.fixture
def costs(monkeypatch):
    costs = Costs()
    costs.install(monkeypatch)
    return costs


@pytest.mark.parametrize("source", ["polling", "wal"])
@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_events_that_are_refused_in_the_middle_of_thousands(outboxed, costs, delivery, source):
    settings = outboxed.settings(delivery, source=source)
    outboxed.write(2000)
    with relaying(settings):
        wait_until(lambda: outboxed.waits() == 0, 60, "the first events")
        before = Counter(costs)
        outboxed.write(1000, first=2000)
        outboxed.poison(KEYS)
        outboxed.write(1000, first=3000)
        wait_until(lambda: outboxed.waits() == 0, 120, "all events")
        spent = Counter(costs)
    spent.subtract(before)
    print(f"\n{delivery}, {source}: {dict(spent)}")
    assert sorted(outboxed.dead()) == KEYS
    assert Counter(outboxed.published(outboxed.strict_topic)) == Counter(dict.fromkeys(KEYS, 2))
    assert Counter(outboxed.published(outboxed.fine_topic)) == Counter({f"k{n:05}": 1 for n in range(4000)})
    assert ATTEMPTS == 3
