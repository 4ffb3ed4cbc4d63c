"""A lost slot heals by itself: killed midway, with a backlog, writers and several relays.

Judged by a read_committed reader and the business rows. When it does not heal:
tests/integration/relay/operations/test_healing.py.
"""

from __future__ import annotations

import signal

import psycopg
from alerting import scraped
from support import Load, check, ends, look_up, wait_until
from wal_support import done, streaming, to_wal

from outbox.sandbox._ports import free_ports

PATIENT = {"relay__max_backoff_seconds": 0.5, "relay__lease_seconds": 10}
AUDIT = "SELECT count(*) FROM outbox.audit WHERE what = 'cdc repair' AND why LIKE 'the relay % itself: %'"

# Keys that no thread of a Load writes: 250 with 100 events each.
BULK = """
WITH k AS (INSERT INTO business SELECT 'bulk-' || n, 100 FROM generate_series(1, 250) AS n)
INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, payload)
SELECT %s, 'bulk-' || n, 'Counted', jsonb_build_object('seq', seq)
  FROM generate_series(1, 100) AS seq, generate_series(1, 250) AS n ORDER BY seq, n"""


def audited(url):
    """How many repairs the audit has of relays."""
    return look_up(url, AUDIT)[0][0]


def lose_wal(admin):
    """Write WAL until the server has given the slot up."""

    def lost():
        admin.execute("SELECT pg_logical_emit_message(false, 'much', repeat('x', 1000000)), pg_switch_wal()")
        admin.execute("CHECKPOINT")
        return admin.execute("SELECT wal_status FROM pg_replication_slots").fetchall() == [("lost",)]

    wait_until(lost, 30, "the slot to be lost")


def test_a_slot_that_has_lost_its_wal(private_postgres, outbox_kafka, outbox_relay, wal, order):
    """While no relay is there. One after the other is killed in the middle of the repair; then two begin together."""
    kind, topic = order
    server = private_postgres(
        {"fsync": "off", "max_slot_wal_keep_size": "1MB", "wal_keep_size": "0", "min_wal_size": "32MB"}
    )
    url = private_postgres.database(server).url
    settings = wal | PATIENT | {"delivery": "exactly-once", "relay__batch_size": 1000}
    to_wal(url, settings)
    with psycopg.connect(url, autocommit=True) as admin:
        # With no rights but those of a relay.
        admin.execute("CREATE ROLE relay LOGIN")
        done(url, {}, "db", "roles", "relay=relay", "--wal", "--apply")
        as_relay = url.replace("postgres@", "relay@")
        with Load(url, kind) as load:
            relay = outbox_relay(database_url=as_relay, **settings)
            wait_until(lambda: streaming(url), 30, "the lanes to stream")
            load.more(50)
            ends(relay)
            admin.execute(BULK, [kind])
            lose_wal(admin)
            for place in ("heal.dropped", "heal.made", "heal.noted"):
                killed = outbox_relay(database_url=as_relay, env={"OUTBOX_FAILPOINTS": f"{place}=kill"}, **settings)
                assert killed.wait(60) == -signal.SIGKILL
                assert audited(url) == 0
            addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
            relays = [
                outbox_relay(database_url=as_relay, relay__metrics_address=address, **settings) for address in addresses
            ]
            wait_until(lambda: streaming(url), 60, "the lanes to stream")
            load.more(50)
            load.drain()
        assert audited(url) == 1
        counted = {name: n for name, n in scraped(*addresses).items() if name.startswith("outbox_slot_repairs_total")}
    healed = [relay for relay in relays if "the relay has replaced the slot" in relay.log()]
    assert len(healed) == sum(counted.values()) == 1
    for relay in relays:
        ends(relay)
    # No relay was killed that had published anything.
    assert check(url, outbox_kafka.consume(topic)) == 0
