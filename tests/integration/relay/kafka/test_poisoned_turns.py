"""What an event costs that the broker refuses, exactly-once with many lanes: counted, never by the clock."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from poisoned_relay import ATTEMPTS, KEYS, SIZES, Costs, Outboxed, relaying
from support import wait_until
from wal_support import to_wal

FIRST, _, LAST = SIZES
ONCE = Counter({f"k{n:05}": 1 for n in range(2000)})


@pytest.fixture
def costs(monkeypatch):
    costs = Costs()
    costs.install(monkeypatch)
    return costs


@pytest.mark.parametrize(("source", "lanes"), [("polling", 256), ("wal", 16)])
def test_a_refused_event_costs_its_own_turns_and_no_join(outbox_postgres, outbox_kafka, costs, source, lanes):
    outboxed = Outboxed(outbox_postgres.url, outbox_kafka, lanes)
    # Where a lease may not outlast a delivery, or that is late, events that are tried again go with the others once.
    kafka = {"bootstrap.servers": outboxed.kafka.bootstrap_servers, "delivery.timeout.ms": "60000"}
    settings = outboxed.settings(source, kafka=kafka, relay={"lease_seconds": 600.0})
    outboxed.write(1000)
    with relaying(settings):
        wait_until(lambda: outboxed.waits() == 0, 60, "the first events")
        before = Counter(costs)
        outboxed.write_all()

        def dead() -> bool:
            # Others have events in nearly all turns in which they are tried again.
            outboxed.write(64, first=2000 + len(written))
            written.extend(range(64))
            return sorted(outboxed.dead()) == KEYS

        written: list[int] = []
        wait_until(dead, 120, "the dead letters")
        wait_until(lambda: outboxed.waits() == 0, 120, "all events")
        costs.subtract(before)
        spent = Counter(costs)
    print(f"{source}: {dict(spent)}")
    assert sorted(outboxed.dead()) == KEYS
    assert outboxed.sizes() == dict.fromkeys(KEYS, (FIRST, LAST))
    assert outboxed.others() == ONCE + Counter(f"k{n:05}" for n in range(2000, 2000 + len(written)))
    # The others fail with it when it is met first. Then it is tried alone: once for each attempt, and once more if
    # two of a partition were in one request.
    assert spent["refused with others"] <= len(KEYS)
    assert spent["refused"] <= (ATTEMPTS + 2) * len(KEYS)
    # Each costs one producer, and no join: but for commits that were not clean.
    assert spent["refused and unusable"] == 0
    assert spent["closed"] == spent["unusable"]
    assert spent["joins"] <= spent["unusable"]
    assert spent["producers"] <= spent["refused"] + 2 * spent["unusable"]


@pytest.mark.parametrize(("how", "source"), [("kill", "polling"), ("pause", "wal")])
def test_a_relay_that_takes_over_while_events_are_refused(outbox_postgres, outbox_kafka, outbox_relay, source, how):
    """The former relay is killed, or wakes up when another one has its lanes, and initializes a producer anew."""
    outboxed = Outboxed(outbox_postgres.url, outbox_kafka, lanes=16)
    name = outboxed.kafka.name("outbox")
    settings = {
        "name": name,
        "delivery": "exactly-once",
        "source": source,
        "wal__slot": name.lower().replace("-", "_").replace(".", "_"),
        "relay__lease_seconds": 1.5,
        "failures": json.dumps(
            {"on_failure": "skip", "max_attempts": 6, "min_backoff_seconds": 0.1, "max_backoff_seconds": 0.2}
        ),
    }
    if source == "wal":
        to_wal(outboxed.url, settings)
    outboxed.write(1000)
    former = outbox_relay(**settings)
    wait_until(lambda: outboxed.waits() == 0, 60, "the first events")
    outboxed.write_all()
    wait_until(
        lambda: outboxed.run("SELECT count(*) FROM outbox.failures WHERE attempts > 1") != [(0,)], what="a second try"
    )
    getattr(former, how)()
    outbox_relay(**settings)
    attempts = "SELECT coalesce(sum(attempts), 0) FROM outbox.failures"
    [(tried,)] = outboxed.run(attempts)
    wait_until(
        lambda: outboxed.waits() == 0 or outboxed.run(attempts)[0][0] > tried + 2, 60, "the next relay's attempts"
    )
    if how == "pause":
        former.resume()
    wait_until(lambda: outboxed.waits() == 0, 120, "all events")
    assert sorted(outboxed.dead()) == KEYS
    assert outboxed.sizes() == dict.fromkeys(KEYS, (FIRST, LAST))
    assert outboxed.others() == ONCE
