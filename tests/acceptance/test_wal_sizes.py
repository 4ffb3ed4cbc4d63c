"""The WAL as the source at sizes that users have: many events over many lanes, and large events."""

from __future__ import annotations

import psycopg
from support import Crashes, backlog, drained, ends, numbers_by_key, wait_until
from wal_support import streaming, to_wal, used_up

from outbox import Event, Outbox
from outbox._app import migrate as db

KEYS = 300
LARGE = 900_000


def write(url: str, kind: str, first: int, last: int) -> None:
    """Write events of these numbers, each number to one key after the other, in transactions of a thousand."""
    with psycopg.connect(url, autocommit=True) as connection:
        for begin in range(first, last, 1000):
            connection.execute(
                "INSERT INTO outbox.events (event_id, aggregate_type, aggregate_id, event_type, payload) "
                "SELECT gen_random_uuid(), %s, 'k' || n %% %s, 'Counted', jsonb_build_object('n', n) "
                "FROM generate_series(%s::int, %s::int) AS n",
                (kind, KEYS, begin, min(begin + 1000, last) - 1),
            )


def test_many_events_over_many_lanes_with_a_kill_in_the_middle(outbox_postgres, outbox_kafka, outbox_relay, wal, order):
    lanes = 64
    url, (kind, topic) = outbox_postgres.url, order
    db.change_lanes(url, lanes)
    to_wal(url, wal)
    settings = wal | {"delivery": "exactly-once", "relay__batch_size": 1000, "relay__lease_seconds": 30}
    crashes = Crashes(url, kind, 1000, lanes)
    relay = outbox_relay(**settings)
    wait_until(lambda: streaming(url), 60, "the lanes to stream")
    write(url, kind, 0, 12_000)
    wait_until(lambda: backlog(url) < 11_000, 60, "some to be published")
    relay.kill()
    assert backlog(url) > 0
    crashes.note()
    write(url, kind, 12_000, 16_000)
    relay = outbox_relay(**settings)
    drained(url, 120)
    ends(relay)
    seen, repeats = numbers_by_key(outbox_kafka.consume(topic), "n")
    assert dict(seen) == {f"k{key}": list(range(key, 16_000, KEYS)) for key in range(KEYS)}
    assert repeats == 0


def test_large_events(outbox_postgres, outbox_kafka, outbox_relay, wal, order):
    url, (kind, topic) = outbox_postgres.url, order
    to_wal(url, wal)
    # What takes long here are the large events: neither their turn nor its lease is to run out meanwhile.
    relay = outbox_relay(**wal | {"relay__lease_seconds": 30})
    wait_until(lambda: streaming(url), 60, "the lanes to stream")
    said = len(relay.log())
    count = 40
    with psycopg.connect(url) as connection:
        for number in range(count):
            Outbox().add(connection, Event(kind, f"k{number % 10}", "Counted", {"n": number, "x": "x" * LARGE}))
            connection.commit()
    used_up(url, wal)
    ends(relay)
    assert '"event": "waiting for a server"' not in relay.log()[said:]
    seen, repeats = numbers_by_key(outbox_kafka.consume(topic), "n")
    assert dict(seen) == {f"k{key}": list(range(key, count, 10)) for key in range(10)}
    assert repeats == 0
