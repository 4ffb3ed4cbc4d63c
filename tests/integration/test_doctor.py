"""`outbox doctor` on real services: what it explains, and what it finds."""

from __future__ import annotations

import orjson
import psycopg
import pytest
from typer.testing import CliRunner

from outbox.errors import SchemaError
from relay.cdc import Cdc
from relay.cli.app import app
from relay.config import Delivery, SourceKind, load
from relay.database import Connector
from relay.doctor import EXPLAINED, Level, examine
from relay.failures import Failures
from relay.lanes import Lease
from relay.polling import PollingSource
from relay.ports import PUBLISHED, Receipt
from relay.slot import SlotNames


def settings(database, kafka, **more):
    return load(database_url=database.url, kafka={"bootstrap.servers": kafka.bootstrap_servers}, **more)


def found(given) -> dict[str, tuple[Level, str]]:
    return {finding.about: (finding.level, finding.found) for finding in examine(given)}


@pytest.mark.parametrize("delivery", list(Delivery))
def test_every_delivery_is_explained(outbox_postgres, outbox_kafka, delivery):
    findings = found(settings(outbox_postgres, outbox_kafka, delivery=delivery))
    assert findings[f"delivery {delivery}"] == (Level.OK, EXPLAINED[delivery])
    assert findings["tables"][0] is Level.OK
    # The embedded broker is alone.
    assert findings["Kafka brokers"][0] is Level.WARNING
    assert (f"state topic {outbox_kafka.name('outbox')}.relay.state" in findings) is False


def test_what_would_break_the_promise_is_a_failure(outbox_postgres, outbox_kafka):
    name = outbox_kafka.name("outbox")
    state = outbox_kafka.create_topic(f"{name}.relay.state", 2, {"cleanup.policy": "delete"})
    unclean = outbox_kafka.create_topic(outbox_kafka.name("unclean"), 1, {"unclean.leader.election.enable": "true"})
    compacted = outbox_kafka.create_topic(outbox_kafka.name("compacted"), 1, {"cleanup.policy": "compact"})
    missing = outbox_kafka.name("missing")
    given = settings(
        outbox_postgres,
        outbox_kafka,
        delivery="exactly-once",
        name=name,
        routes={"A": unclean, "B": compacted, "C": missing},
    )
    given.kafka["transaction.timeout.ms"] = "9000000"
    findings = [(finding.level, finding.about, finding.found) for finding in examine(given)]
    failures = {(about, text) for level, about, text in findings if level is Level.FAILURE}
    assert (f"state topic {state}", "cleanup.policy=delete could lose markers") in failures
    assert (f"topic {unclean}", "unclean.leader.election.enable=true: acknowledged events can be lost") in failures
    assert (f"topic {missing}", "does not exist yet (C)") in failures
    assert any(about == "transaction.timeout.ms" for about, _ in failures)
    assert any(level is Level.WARNING and about == f"topic {compacted}" for level, about, _ in findings)


def test_the_tables_and_what_waits_in_them(outbox_postgres, outbox_kafka):
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, created_at) "
            "VALUES ('Order', '1', 'T', now() - interval '10 minutes')"
        )
        connection.execute(
            "INSERT INTO outbox.failures "
            "VALUES (0, 1, gen_random_uuid(), 'Order', '1', true, 1, 'e', now(), now(), now())"
        )
        findings = found(settings(outbox_postgres, outbox_kafka))
        assert findings["backlog"][0] is Level.WARNING
        assert findings["failures"] == (Level.WARNING, "1 events wait, 0 dead letters")
        connection.execute("ALTER TABLE outbox.lanes DROP CONSTRAINT lanes_counters")
    findings = found(settings(outbox_postgres, outbox_kafka))
    assert findings["tables"][0] is Level.FAILURE
    assert "lanes_counters" in findings["tables"][1]


def test_servers_that_are_away_are_findings_and_not_tracebacks(monkeypatch):
    monkeypatch.setattr("relay.doctor._SECONDS", 2.0)
    given = load(database_url="postgresql://u@127.0.0.1:1/db", kafka={"bootstrap.servers": "127.0.0.1:1"})
    findings = found(given)
    assert findings["Postgres"][0] is Level.FAILURE
    assert findings["Kafka"][0] is Level.FAILURE


def test_the_command(outbox_postgres, outbox_kafka):
    environment = {
        "OUTBOX_DATABASE_URL": outbox_postgres.url,
        "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": outbox_kafka.bootstrap_servers,
    }
    runner = CliRunner()
    said = runner.invoke(app, ["doctor", "--delivery", "exactly-once", "--json"], env=environment)
    report = orjson.loads(said.stdout)
    assert report["delivery"] == "exactly-once"
    # The test's Postgres runs with fsync off, which no doctor can let pass.
    assert {finding["about"] for finding in report["findings"] if finding["level"] == "failure"} == {"Postgres fsync"}
    assert said.exit_code == 1
    assert "at-least-once" in runner.invoke(app, ["doctor"], env=environment).stdout
    assert runner.invoke(app, ["doctor", "--delivery", "twice"], env=environment).exit_code == 2
    assert runner.invoke(app, ["doctor"], env={}).exit_code == 2


def test_a_publication_that_keeps_every_event_in_the_table(outbox_postgres, outbox_kafka):
    """Postgres 18: it refuses DELETEs when their publication leaves out a generated column of the key."""
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        if connection.info.server_version < 180000:
            pytest.skip("Postgres 18 and later refuse such deletes")
        connection.execute(
            "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type) VALUES ('A', '1', 'T')"
        )
        connection.execute('CREATE PUBLICATION "Others" FOR ALL TABLES')
        lane = connection.execute("SELECT lane FROM outbox.events").fetchone()[0]
        source = PollingSource(
            Connector(outbox_postgres.url, "test"), "outbox", Lease(lane, 0, 30.0, 0.0), Failures("outbox", None, None)
        )
        # Before anything is published that could not be settled.
        with pytest.raises(SchemaError, match="a publication of deletes has the outbox's table; see `outbox doctor`"):
            source.fetch(10)
        (finding,) = [f for f in examine(settings(outbox_postgres, outbox_kafka)) if f.about == "publication Others"]
        assert finding.level is Level.FAILURE
        # What it advises is the way out.
        connection.execute(finding.do.partition(", or")[0])
        assert "publication Others" not in found(settings(outbox_postgres, outbox_kafka))
        source.settle(Receipt([(claim, PUBLISHED) for claim in source.fetch(10)]))
        source.flush()
        source.close()
        assert connection.execute("SELECT count(*) FROM outbox.events").fetchone() == (0,)


def test_the_source_and_its_slot(outbox_postgres, outbox_kafka):
    slot = outbox_kafka.name("slot").lower().replace("-", "_")
    polling = settings(outbox_postgres, outbox_kafka, wal={"slot": slot})
    wal = settings(outbox_postgres, outbox_kafka, source="wal", wal={"slot": slot})
    about = f"slot {slot}"
    assert about not in found(polling)
    assert found(wal)["source"][0] is Level.WARNING
    assert found(wal)[about][0] is Level.FAILURE
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        cdc = Cdc(connection, SlotNames("outbox", slot, "outbox_relay"))
        cdc.setup()
        assert found(polling)[about] == (Level.WARNING, "keeps 0 MiB of WAL, and nobody reads it")
        cdc.switch(SourceKind.WAL)
        assert found(wal)[about] == (Level.OK, "whole; 0 MiB of WAL are kept for it")
        assert found(polling)["source"][0] is Level.WARNING
        connection.execute("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", (slot,))
        level, text = found(wal)[about]
        assert level is Level.FAILURE
        assert "somebody advanced it" in text
