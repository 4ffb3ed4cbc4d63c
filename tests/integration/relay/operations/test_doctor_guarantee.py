"""`outbox doctor` and what is promised: for lanes and groups, and what a slot costs."""

from __future__ import annotations

import psycopg
from doctor_support import found, groups, in_postgres, settings
from psycopg import sql

from outbox._app import migrate as db
from outbox._clients.checks import Level
from relay.config import Delivery, SourceKind
from relay.operations.doctor import examine, postgres
from relay.operations.guarantee import Strategy, guarantee
from relay.operations.wal_setup import Cdc
from relay.wal.slot import SlotNames


def test_the_source_and_its_slot(outbox_postgres, outbox_kafka, monkeypatch):
    monkeypatch.setattr(postgres, "_RATE_SECONDS", 0.01)
    slot = outbox_kafka.name("slot").lower().replace("-", "_")
    polling = settings(outbox_postgres, outbox_kafka, wal={"slot": slot})
    wal = settings(outbox_postgres, outbox_kafka, source="wal", wal={"slot": slot})
    about = f"slot {slot}"
    assert about not in in_postgres(polling)
    findings = in_postgres(wal)
    assert (findings["source"].level, findings[about].level) == (Level.WARNING, Level.FAILURE)
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        cdc = Cdc(connection, SlotNames("outbox", slot, "outbox_relay"))
        cdc.setup()
        # Whatever else goes on on this server is in the same WAL.
        one = in_postgres(polling)[about]
        assert (one.level, one.found.startswith("is not read; ")) == (Level.WARNING, True)
        cdc.switch(SourceKind.WAL)
        findings = in_postgres(wal)
        assert (findings[about].level, findings[about].found.startswith("has no gap; ")) == (Level.OK, True)
        assert findings[f"{about}, lanes"].level is Level.WARNING
        assert in_postgres(polling)["source"].level is Level.WARNING
        connection.execute("UPDATE outbox.lanes SET streaming = lane <> 2")
        assert in_postgres(wal)[f"{about}, lanes"].found.startswith("lane 2: read from the table")
        connection.execute("UPDATE outbox.lanes SET streaming = true")
        assert f"{about}, lanes" not in in_postgres(wal)
        connection.execute("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", (slot,))
        one = in_postgres(wal)[about]
        assert (one.level, "it was advanced" in one.found) == (Level.FAILURE, True)


def test_the_guarantee_of_the_lanes_and_of_each_group(outbox_postgres, outbox_kafka):
    groups(outbox_postgres, sums="Dedup", log="OffsetsOnly", old=None, foreign="Fingerprint")
    with psycopg.connect(outbox_postgres.url) as connection:
        for group, topic in (("sums", "order-events"), ("sums", "other"), ("foreign", "others")):
            connection.execute("INSERT INTO consumer.offsets VALUES (%s, %s, 0, 'id', 0, 1)", (group, topic))
    for delivery in (Delivery.AT_LEAST_ONCE, Delivery.EXACTLY_ONCE):
        given = settings(outbox_postgres, outbox_kafka, delivery=delivery, name=outbox_kafka.name("outbox"))
        promised = {one.about.removeprefix("guarantee "): one for one in examine(given)}
        assert promised["on Kafka"].found.startswith(guarantee(delivery, SourceKind.POLLING).found)
        for group, strategy in (("sums", Strategy.DEDUP), ("log", Strategy.OFFSETS_ONLY)):
            expected = guarantee(delivery, SourceKind.POLLING, strategy)
            one = promised[f"of group {group}"]
            assert (one.found, one.do) == (f"strategy {strategy}, {expected.found}", expected.do)
        repeats = delivery is Delivery.AT_LEAST_ONCE
        assert promised["of group sums"].level is Level.OK
        assert promised["of group log"].level is (Level.WARNING if repeats else Level.OK)
        assert promised["of group old"].found.startswith("not known")
        # What others write is promised nothing of this relay.
        foreign = promised["of group foreign"]
        assert (foreign.level, foreign.found) == (Level.OK, "reads others, which no relay with these settings writes")
    with psycopg.connect(outbox_postgres.url) as connection:
        connection.execute("UPDATE outbox.lanes SET source = 'wal' WHERE lane = 2")
    findings = found(settings(outbox_postgres, outbox_kafka))
    for lanes, source in (("lanes 0, 1, 3", SourceKind.POLLING), ("lane 2", SourceKind.WAL)):
        text = findings[f"guarantee on Kafka, {lanes}"][1]
        assert text.startswith(guarantee(Delivery.AT_LEAST_ONCE, source).found)


def test_what_weakens_the_guarantee_is_named_with_its_setting(outbox_postgres, outbox_kafka):
    one = outbox_kafka.create_topic(outbox_kafka.name("one"), 1)
    unclean = outbox_kafka.create_topic(outbox_kafka.name("unclean"), 1, {"unclean.leader.election.enable": "true"})
    with psycopg.connect(outbox_postgres.url, autocommit=True) as admin:
        database = sql.Identifier(admin.info.dbname)
        admin.execute(sql.SQL("ALTER DATABASE {} SET synchronous_commit = off").format(database))
    given = settings(outbox_postgres, outbox_kafka, routes={"A": one, "B": unclean})
    level, text = found(given)["guarantee on Kafka"]
    assert level is Level.WARNING
    for weak in (
        "Postgres fsync (fsync = on)",
        "Postgres synchronous_commit (synchronous_commit = on)",
        "Kafka brokers (three brokers)",
        f"topic {one} (replication factor 3)",
        f"topic {unclean} (replication factor 3)",
    ):
        assert f"; weakened by {weak}" in text
    no_acks = settings(outbox_postgres, outbox_kafka, delivery="at-most-once", relay={"at_most_once_acks": 0})
    assert "; weakened by acknowledgements (relay.at_most_once_acks = 1)" in found(no_acks)["guarantee on Kafka"][1]


def test_the_sink_may_be_another_database(outbox_postgres, outbox_kafka):
    with psycopg.connect(outbox_postgres.url, autocommit=True) as admin:
        other = sql.Identifier(f"{outbox_postgres.name}_sink")
        admin.execute(sql.SQL("CREATE DATABASE {}").format(other))
        try:
            url = outbox_postgres.url.replace(outbox_postgres.name, f"{outbox_postgres.name}_sink")
            db.upgrade_consumer(url)
            with psycopg.connect(url) as connection:
                connection.execute("INSERT INTO consumer.groups (grp, owner, strategy) VALUES ('there', 'me', 'Dedup')")
            given = settings(outbox_postgres, outbox_kafka)
            assert "guarantee of group there" not in found(given)
            there = settings(outbox_postgres, outbox_kafka, relay={"sink_url": url})
            assert "guarantee of group there" in found(there)
            nowhere = settings(outbox_postgres, outbox_kafka, relay={"sink_url": "postgresql://u@127.0.0.1:1/db"})
            away = {finding.about: finding.level for finding in examine(nowhere)}
            assert (away["Postgres of the sink"], away["tables"]) == (Level.FAILURE, Level.OK)
        finally:
            admin.execute(sql.SQL("DROP DATABASE {}").format(other))


def test_what_a_slot_costs_and_whether_it_outlives_a_failover(outbox_postgres, outbox_kafka, monkeypatch):
    monkeypatch.setattr(postgres, "_RATE_SECONDS", 0.01)
    slot = outbox_kafka.name("slot").lower().replace("-", "_")
    wal = settings(outbox_postgres, outbox_kafka, source="wal", wal={"slot": slot})
    cost, failover = f"slot {slot}, cost", f"slot {slot}, failover"
    assert {cost, failover}.isdisjoint(in_postgres(wal))
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        Cdc(connection, SlotNames("outbox", slot, "outbox_relay")).setup()
        findings = in_postgres(wal)
        assert findings[cost].level is Level.OK
        assert "of WAL are retained, of 1.0 GiB (wal.retained_limit_bytes)" in findings[cost].found
        # A relay that polls does not need the slot, which costs as much.
        polling = in_postgres(settings(outbox_postgres, outbox_kafka, wal={"slot": slot}))
        assert (cost in polling, failover in polling) == (True, False)
        if connection.info.server_version < 170000:
            assert failover not in findings
            return
        assert findings[failover].level is Level.OK
        standby = f"{slot}_standby"
        connection.execute("SELECT pg_create_physical_replication_slot(%s)", (standby,))
        try:
            whole = found(wal)
            level, text = whole[failover]
            assert (level, "the standby can lack what is published" in text) == (Level.WARNING, True)
            assert f"; weakened by {failover} (synchronized_standby_slots)" in whole["guarantee on Kafka"][1]
        finally:
            connection.execute("SELECT pg_drop_replication_slot(%s)", (standby,))
        connection.execute("SELECT pg_drop_replication_slot(%s)", (slot,))
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (slot,))
        one = in_postgres(wal)[failover]
        assert (one.level, "created without failover" in one.found) == (Level.WARNING, True)
        connection.execute("SELECT pg_drop_replication_slot(%s)", (slot,))
