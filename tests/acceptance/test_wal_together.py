"""Several relays and the WAL: standbys, switches between the sources while relays are killed, large and long
transactions, an outbox at rest. Judged by a read_committed reader and the business rows.

Switches under load and without a kill: test_pauses.py.
"""

from __future__ import annotations

import json
import signal

import psutil
import psycopg
from support import Load, backlog, caught_up, check, drained, numbers_by_key, owners, wait_until
from wal_support import held_by, set_up, status, streaming, switch, to_wal

from relay.failpoints import VARIABLE
from relay.wal.replication import lsn_text


def test_switching_while_relays_are_killed(outbox_postgres, outbox_kafka, outbox_relay, wal, order):
    """Exactly-once, kill -9 in the middle of every hand-over, in both directions."""
    url, (kind, topic) = outbox_postgres.url, order
    settings = wal | {"delivery": "exactly-once"}
    set_up(url, settings)
    kills = [
        ("wal", "polling", "txn.committed"),
        ("polling", "wal", "txn.committed"),
        ("wal", "polling", "stream.entered"),
        ("polling", "wal", "takeover.settled"),
    ]
    with Load(url, kind) as load:
        for source, other, point in kills:
            switch(url, settings, source)
            victim = outbox_relay(env={VARIABLE: f"{point}=kill"}, **settings | {"source": source})
            assert victim.wait(40) == -signal.SIGKILL, (point, source)
            heir = outbox_relay(**settings | {"source": source})
            load.more(60)
            wait_until(lambda heir=heir: "acquired" in heir.log(), 20, "the heir to take over")
            # Switched away while it works; killed before it has let go, or just after.
            switch(url, settings, other)
            heir.kill()
        switch(url, settings, "polling")
        outbox_relay(**settings | {"source": "polling"})
        load.drain()
    assert check(url, outbox_kafka.consume(topic)) == 0


def test_standbys_wait_and_take_over(outbox_postgres, outbox_kafka, outbox_relay, wal, order):
    """One reads; it is killed; the next is stopped past its lease: its walsender is ended, it changes nothing."""
    url, (kind, topic) = outbox_postgres.url, order
    # A lease that the first one keeps, also while two others start on a slow machine.
    settings = wal | {"delivery": "exactly-once", "relay__lease_seconds": 10}
    to_wal(url, settings)
    with Load(url, kind) as load:
        first = outbox_relay(**settings | {"relay__instance": "first"})
        wait_until(lambda: held_by(url, "wal", "first"), 30, "the first relay to read")
        others = [outbox_relay(**settings | {"relay__instance": name}) for name in ("second", "third")]
        load.more(100)
        assert owners(url) == {"first": 4}
        first.kill()
        wait_until(lambda: set(owners(url)) - {"first"}, 30, "a standby to take over")
        (holder,) = owners(url)
        sleeper = others[("second", "third").index(holder)]
        wait_until(lambda: streaming(url), 30, "the standby to stream")
        caught_up(url)
        sleeper.pause()
        wait_until(lambda: owners(url) and holder not in owners(url), 30, "the other standby to take over")
        load.more(100)
        # It reads although the slot was in use.
        caught_up(url)
        sleeper.resume()
        sleeper.wait_for_log("lane lost")
        load.drain()
        assert psutil.pid_exists(sleeper.pid)
    assert check(url, outbox_kafka.consume(topic)) == 0


def test_a_huge_transaction_is_not_held_whole(outbox_postgres, outbox_kafka, outbox_relay, wal):
    """Many events in one commit, far more than the relay may hold; killed midway, it goes on behind its marker."""
    url = outbox_postgres.url
    kind = outbox_kafka.name("Bulk")
    topic = outbox_kafka.create_topic(f"{kind.lower()}-events", 2)
    settings = wal | {"delivery": "exactly-once", "relay__batch_size": 500, "relay__lease_seconds": 5}
    count = 24_000
    to_wal(url, settings)
    relay = outbox_relay(**settings)
    wait_until(lambda: streaming(url), 30, "the lanes to stream")
    before = psutil.Process(relay.pid).memory_info().rss
    with psycopg.connect(url) as connection:
        connection.execute(
            "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, payload) "
            "SELECT %s, 'k' || n %% 500, 'Counted', jsonb_build_object('n', n, 'pad', repeat('x', 3000)) "
            "FROM generate_series(1, %s::int) AS n",
            (kind, count),
        )
    highest = before

    def half() -> bool:
        nonlocal highest
        highest = max(highest, psutil.Process(relay.pid).memory_info().rss)
        return 0 < backlog(url) < count // 2

    wait_until(half, 60, "half of it to be published")
    relay.kill()
    outbox_relay(**settings)
    drained(url)
    seen, repeats = numbers_by_key(outbox_kafka.consume(topic, timeout=60), "n")
    assert repeats == 0
    assert seen == {f"k{key}": list(range(key or 500, count + 1, 500)) for key in range(500)}
    # As Python objects the whole would be well above 100 MB; what may be held is 8,000 events.
    assert highest - before < 80 * 1024 * 1024


def test_commit_order_is_kept_across_a_restart(outbox_postgres, outbox_kafka, outbox_relay, wal, order):
    """Writers of one key that do not exclude each other: a low id that commits last comes last."""
    url, (kind, topic) = outbox_postgres.url, order
    to_wal(url, wal)
    relay = outbox_relay(**wal)
    wait_until(lambda: streaming(url), 30, "the lanes to stream")
    relay.kill()
    insert = (
        "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, payload) VALUES (%s, 'key', 'Said', %s)"
    )
    with psycopg.connect(url) as early, psycopg.connect(url) as late:
        early.execute(insert, (kind, '{"n": 3}'))
        late.execute(insert, (kind, '{"n": 1}'))
        late.commit()
        late.execute(insert, (kind, '{"n": 2}'))
        late.commit()
        early.commit()
    outbox_relay(**wal)
    drained(url)
    numbers = [json.loads(message.value())["n"] for message in outbox_kafka.consume(topic)]
    # At-least-once: a relay that was slower than its lease may have sent them again.
    assert list(dict.fromkeys(numbers)) == [1, 2, 3]


def test_an_outbox_at_rest_holds_no_wal(outbox_postgres, outbox_relay, outbox_kafka, wal):
    """Other tables write; no event does. The slot follows, by heartbeats alone."""
    url = outbox_postgres.url
    settings = wal | {"wal__heartbeat_seconds": 0.5}
    to_wal(url, settings)
    outbox_relay(**settings)
    wait_until(lambda: streaming(url), 30, "the lanes to stream")
    start = status(url, settings).slot.current_lsn
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE other (n int, pad text)")
        for _ in range(4):
            connection.execute("INSERT INTO other SELECT n, repeat('x', 500) FROM generate_series(1, 10000) AS n")
            written = connection.execute("SELECT pg_current_wal_lsn() - %s::pg_lsn", (lsn_text(start),)).fetchone()
        assert written[0] > 20_000_000
        wait_until(lambda: status(url, settings).slot.lag_bytes < 1_000_000, 30, "the slot to follow")
        assert status(url, settings).slot.lag_seconds < 30

        def let_go():
            # The slot's restart position moves when the server logs running transactions, as a checkpoint does.
            connection.execute("CHECKPOINT")
            return status(url, settings).slot.retained_bytes < 10_000_000

        wait_until(let_go, 60, "the WAL to be let go")
