"""The runbook of pg_upgrade, with a real one. Commands come out of the page itself; see runbooks.py."""

from __future__ import annotations

import datetime as dt
import json
import os
from collections import Counter

import psycopg
import pytest
from audit_support import kept_before
from failing_relays import SMALL, let_pass
from older_postgres import Upgraded, postgres_16
from rows_and_roles import execute
from runbook_support import of
from shop import applied, in_order, outbox_of, prepare_sink
from standby import ask
from support import await_stops, drained, end_leases, ends, wait_until
from wal_support import done, run_outbox, streaming

from outbox import Event, Outbox
from outbox._app import migrate as db
from outbox._app import schema_drift
from outbox.sandbox._dirs import unprivileged_user
from outbox.sandbox._pgbin import binaries, major_version

NEWEST = major_version(binaries(None) / "postgres")


@pytest.mark.parametrize(
    ("delivery", "source", "version"),
    [
        ("at-least-once", "polling", 16),
        # With a slot that pg_upgrade would take along.
        ("exactly-once", "wal", NEWEST),
    ],
)
@of("Postgres is upgraded")
def test_postgres_is_upgraded(follow, private_postgres, shop, settings, monkeypatch, delivery, source, version):
    """To the newest, with all that waits. Exactly-once, a killed relay has left a batch that is not settled."""
    programs = postgres_16() if version == 16 else binaries(unprivileged_user())
    large = shop.kafka.create_topic(shop.kafka.name("large"), 1, SMALL)
    settings |= {"delivery": delivery, "source": source, "relay__archive_days": 7, "relay__lease_seconds": 10}
    routes = {"Large": {"topic": large}, shop.kind: {"topic": shop.topic}}
    settings |= {"routes": json.dumps(routes), "failures__max_attempts": 1}
    with monkeypatch.context() as older:
        older.setenv("OUTBOX_PG_BIN", str(programs))
        old, url = outbox_of(private_postgres, shop, settings)
        db.upgrade_consumer(url)
        prepare_sink(url)
        done(url, settings, "db", "ledger", "on")
        kept_before(url)
        with psycopg.connect(url) as connection:
            later = Outbox().add(connection, Event(shop.kind, shop.keys[0], "Due", {}), delay=dt.timedelta(hours=1))
            dead = Outbox().add(connection, Event("Large", "k", "Large", os.urandom(30_000)))
        ids = shop.write(url, 5)
        execute(url, f"ALTER TABLE applied ADD CONSTRAINT refused CHECK (event_id <> '{ids[0]}')")
        operator = follow(url)
        relay = operator.start()
        consumer = shop.consumer(url, on_failure="dead-letter", attempts=1)
        drained(url)
        letters = "SELECT count(*) FROM {}.dead_letters".format
        wait_until(lambda: ask(url, letters("outbox")) == 1, what="the relay's dead letter")
        # Later events of a key that has one wait behind it.
        consumer.wait(lambda: ask(url, letters("consumer")) == 5, "the group's dead letters")
        consumer.end()
        ends(relay)
        ids += shop.write(url, 5)
        if delivery == "exactly-once":
            relay = operator.start(failpoints="txn.committed=kill")
            relay.wait()
            end_leases(url)
            assert shop.published().keys() & set(ids[20:])
            assert ask(url, "SELECT count(*) FROM outbox.events") == 20
        ids += shop.write(url, 5)
        assert ask(url, "SHOW server_version_num")[:2] == str(version)
        if source == "wal":
            operator.execute("pg_drop_replication_slot")
        old.stop()
    with Upgraded(old, programs) as new:
        url = new.url("outbox")
        assert ask(url, "SHOW server_version_num")[:2] == str(NEWEST)
        operator, typed = follow(url), operator.typed
        relay = operator.start()
        if delivery == "exactly-once":
            await_stops(relay, 2)
            assert "outbox relay upgraded" in relay.log()
            operator.own("outbox relay upgraded")
        if source == "wal":
            relay.wait_for_log("the checkpoint is of server")
            operator.own("outbox cdc setup --repair")
            assert typed | operator.typed == operator.section.steps
        drained(url)
        with psycopg.connect(url) as connection:
            assert Outbox().reschedule(connection, later, delay=dt.timedelta())
        # Whoever writes its key at the same time would have an order of their own.
        wait_until(lambda: ask(url, "SELECT count(*) FROM outbox.scheduled") == 0, what="the scheduled event to be due")
        let_pass(shop.kafka, large)
        done(url, settings, "dead-letters", "retry", str(dead))
        execute(url, "ALTER TABLE applied DROP CONSTRAINT refused")
        done(url, settings, "dead-letters", "retry", "--side", "consumer", "--all")
        assert len(shop.kafka.consume(large, 1)) == 1
        if source == "wal":
            wait_until(lambda: streaming(url), what="the lanes to stream")
        ids += shop.write(url, 5)
        consumer = shop.consumer(url, on_failure="dead-letter", attempts=1)
        consumer.wait(lambda: len(applied(url)) == len(ids) + 1, "the effects of all")
        consumer.end()
        seen = shop.published()
        assert seen.keys() == {*ids, str(later)}
        assert max(seen.values()) == 1
        assert in_order(ids, list(seen))
        assert Counter(applied(url)) == dict.fromkeys([*ids, str(later)], 1)
        assert (schema_drift.check(url), schema_drift.check_consumer(url, "consumer")) == ([], [])
        found = json.loads(run_outbox(url, settings, "audit", "--json").stdout)
        assert (found["differences"], found["notes"]) == ([], [])
