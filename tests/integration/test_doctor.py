"""`outbox doctor` on real services: what it explains, and what it finds."""

from __future__ import annotations

import orjson
import psycopg
import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)
from one_lane import OneLane
from psycopg import sql
from support import wait_until
from typer.testing import CliRunner

from outbox._app import migrate as db
from outbox.errors import SchemaError
from outbox.sandbox.kafka import KafkaCluster
from relay.cli.app import app
from relay.config import Delivery, SourceKind, load
from relay.database import Connector
from relay.lease import Lease
from relay.operations import doctor_kafka
from relay.operations.doctor import EXPLAINED, examine
from relay.operations.doctor_postgres import check_ids
from relay.operations.findings import Level
from relay.operations.roles import Kind, grants
from relay.operations.wal_setup import Cdc
from relay.polling.source import PollingSource
from relay.ports import PUBLISHED, Receipt
from relay.retries import Failures
from relay.wal.slot import SlotNames


def settings(database, kafka, **more):
    return load(database_url=database.url, kafka={"bootstrap.servers": kafka.bootstrap_servers}, **more)


def found(given) -> dict[str, tuple[Level, str]]:
    return {finding.about: (finding.level, finding.found) for finding in examine(given)}


@pytest.mark.parametrize("delivery", list(Delivery))
def test_every_delivery_is_explained(outbox_postgres, outbox_kafka, delivery):
    name = outbox_kafka.name("outbox")
    findings = found(settings(outbox_postgres, outbox_kafka, delivery=delivery, name=name))
    assert findings[f"delivery {delivery}"] == (Level.OK, EXPLAINED[delivery])
    assert findings["tables"][0] is Level.OK
    # The embedded broker is alone.
    assert findings["Kafka brokers"][0] is Level.WARNING
    # Only exactly-once has one.
    assert (f"state topic {name}.relay.state" in findings) is (delivery is Delivery.EXACTLY_ONCE)


def test_brokers_that_can_lose_the_end_of_a_transaction_are_named(outbox_postgres, outbox_kafka, monkeypatch):
    given = settings(outbox_postgres, outbox_kafka, delivery="exactly-once", name=outbox_kafka.name("outbox"))
    assert found(given)["Kafka's version"][0] is Level.OK
    # As if this broker had the setting that tells a newer one.
    monkeypatch.setattr(doctor_kafka, "_SINCE_4_3", "log.dirs")
    level, text = found(given)["Kafka's version"]
    assert level is Level.WARNING
    assert "KAFKA-20734" in text
    given = settings(outbox_postgres, outbox_kafka, delivery="at-least-once")
    assert "Kafka's version" not in found(given)


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


def test_a_failure_whose_event_was_deleted_by_hand(outbox_postgres, outbox_kafka):
    given = settings(outbox_postgres, outbox_kafka)
    assert "failures without an event" not in found(given)
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO outbox.failures "
            "VALUES (0, 1, gen_random_uuid(), 'Order', '1', true, 1, 'e', now(), now(), 'infinity')"
        )
    level, text = found(given)["failures without an event"]
    assert level is Level.WARNING
    assert text.startswith("the events of 1 failures were deleted by hand")


# --- ids -------------------------------------------------------------------------------------------------------------

EVENTS = (
    "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type) "
    "SELECT 'A', g::text, 'T' FROM generate_series(1, %s) g"
)
MOVED = {
    "events": "",
    "failures": """
        INSERT INTO outbox.failures
        SELECT lane, id, event_id, aggregate_type, aggregate_id, true, 1, '', now(), now(), now() FROM outbox.events""",
    "dead_letters": """
        INSERT INTO outbox.dead_letters (lane, id, event_id, aggregate_type, aggregate_id, event_type, created_at,
                                         attempts, last_error, first_failed_at)
        SELECT lane, id, event_id, aggregate_type, aggregate_id, event_type, created_at, 1, '', now()
          FROM outbox.events""",
    "published": """
        INSERT INTO outbox.published (lane, id, event_id, aggregate_type, aggregate_id, event_type, created_at)
        SELECT lane, id, event_id, aggregate_type, aggregate_id, event_type, created_at FROM outbox.events""",
}


@pytest.mark.parametrize("table", MOVED)
def test_ids_that_would_be_given_again(outbox_postgres, outbox_kafka, table):
    given = settings(outbox_postgres, outbox_kafka)
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        connection.execute(EVENTS, (100,))
        if table == "events":
            # The table was copied, and its sequence was not.
            connection.execute("ALTER TABLE outbox.events ALTER COLUMN id RESTART WITH 40")
        else:
            connection.execute(MOVED[table])
            assert "ids of events" not in found(given)
            connection.execute("TRUNCATE outbox.events RESTART IDENTITY")
        finding = next(one for one in examine(given) if one.about == "ids of events")
        assert finding.level is Level.FAILURE
        following = 40 if table == "events" else 1
        assert f"the next event gets the id {following}, and outbox.{table} has ids up to 100" in finding.found
        # What it says to do is what mends it.
        connection.execute(finding.do.split("; ")[1])
        assert "ids of events" not in found(given)
        connection.execute(EVENTS, (1,))
        assert connection.execute("SELECT max(id) FROM outbox.events").fetchone() == (101,)


def test_ids_that_sessions_take_in_blocks(outbox_postgres, outbox_kafka):
    given = settings(outbox_postgres, outbox_kafka)
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        connection.execute("ALTER TABLE outbox.events ALTER COLUMN id SET CACHE 50")
        finding = next(one for one in examine(given) if one.about == "ids of events, cache")
        assert (finding.level, "50 ids at once" in finding.found) == (Level.FAILURE, True)
        connection.execute(finding.do)
    assert "ids of events, cache" not in found(given)


def test_an_archive_that_is_too_large_to_look_through_is_left_out(outbox_postgres, outbox_kafka, monkeypatch):
    monkeypatch.setattr(
        "relay.operations.doctor_postgres._ARCHIVE_TIMEOUT", "SELECT set_config('statement_timeout', '50ms', true)"
    )
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        connection.execute("CREATE TABLE slow AS SELECT 1")
        connection.execute(EVENTS, (1,))
        connection.execute(MOVED["published"])
        connection.execute("TRUNCATE outbox.events RESTART IDENTITY")
        with connection.transaction():
            # Whoever reads it waits, as for a large one.
            connection.execute("LOCK TABLE outbox.published IN ACCESS EXCLUSIVE MODE")
            with Connector(outbox_postgres.url, "test")() as reader:
                findings = list(check_ids(reader, settings(outbox_postgres, outbox_kafka)))
    assert findings == []


# --- rights ----------------------------------------------------------------------------------------------------------


def test_who_could_pose_as_the_relay(outbox_postgres, outbox_kafka):
    role = f"writer_{outbox_postgres.name}"
    given = settings(outbox_postgres, outbox_kafka)
    with psycopg.connect(outbox_postgres.url, autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE ROLE {0}; GRANT INSERT ON outbox.events TO {0}").format(sql.Identifier(role)))
        try:
            level, text = found(given)[f"role {role}"]
            assert (level, "may set from_relay" in text) == (Level.WARNING, True)
            for statement in grants([(Kind.WRITER, role)], "outbox", "consumer", wal=False, messages=False):
                admin.execute(statement)
            assert f"role {role}" not in found(given)
        finally:
            admin.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(role)))


def test_messages_that_everybody_may_write(outbox_postgres, outbox_kafka):
    role = f"writer_{outbox_postgres.name}"
    off, on = (settings(outbox_postgres, outbox_kafka, wal={"messages": messages}) for messages in (False, True))
    assert "messages" not in found(off)
    assert found(on)["messages"][0] is Level.WARNING
    with psycopg.connect(outbox_postgres.url, autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE ROLE {}").format(sql.Identifier(role)))
        try:
            db.grant(
                outbox_postgres.url,
                list(grants([(Kind.WRITER, role)], "outbox", "consumer", wal=False, messages=True)),
                messages=True,
            )
            assert "messages" not in found(on)
        finally:
            admin.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(role)))


def test_a_lease_that_is_too_long_for_the_brokers_transactions(outbox_postgres, outbox_kafka):
    """The broker's limit is 15 minutes unless it is raised."""
    many = settings(outbox_postgres, outbox_kafka, delivery="exactly-once", relay={"lease_seconds": 451})
    finding = next(one for one in examine(many) if one.about == "transaction.timeout.ms")
    assert (finding.level, finding.found) == (
        Level.FAILURE,
        "902000 is above the broker's transaction.max.timeout.ms of 900000: no transaction can begin",
    )
    assert "set OUTBOX_RELAY__LEASE_SECONDS to 450 or less" in finding.do
    fits = settings(outbox_postgres, outbox_kafka, delivery="exactly-once", relay={"lease_seconds": 450})
    assert "transaction.timeout.ms" not in found(fits)
    given = settings(outbox_postgres, outbox_kafka, delivery="exactly-once", relay={"lease_seconds": 3000})
    given.kafka["delivery.timeout.ms"] = "400000"
    finding = next(one for one in examine(given) if one.about == "transaction.timeout.ms")
    assert "set kafka.delivery.timeout.ms to 300000 or less" in finding.do


@pytest.fixture(scope="module")
def guarded_kafka():
    """A broker that knows access rights."""
    authorizer = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
    }
    with KafkaCluster(settings=authorizer) as cluster:
        yield cluster


def test_topics_that_may_not_be_written_to(outbox_postgres, guarded_kafka):
    admin = AdminClient({"bootstrap.servers": guarded_kafka.bootstrap_servers})
    topics = ["good", "guarded", "copies", "outbox.relay.state", "secret"]
    for future in admin.create_topics([NewTopic(topic, 1, 1) for topic in topics]).values():
        future.result()
    # What is allowed to somebody is allowed to nobody else, and nothing beside it.
    rules = [
        AclBinding(
            ResourceType.TOPIC, topic, ResourcePatternType.LITERAL, "User:*", "*", operation, AclPermissionType.ALLOW
        )
        for topic in topics[1:]
        for operation in (
            AclOperation.DESCRIBE,
            AclOperation.WRITE if topic == "secret" else AclOperation.DESCRIBE_CONFIGS,
        )
    ]
    for future in admin.create_acls(rules).values():
        future.result()
    given = settings(
        outbox_postgres,
        guarded_kafka,
        delivery="exactly-once",
        routes={"Good": {"topic": "good", "dead_letter_topic": "copies"}, "Guarded": "guarded", "Secret": "secret"},
    )

    def forbidden() -> dict[str, tuple[Level, str]]:
        return {about: said for about, said in found(given).items() if about.endswith(", rights")}

    # The broker learns of its rules from the controller.
    wait_until(lambda: len(forbidden()) == 3, what="the rules to hold")
    for about, said in forbidden().items():
        assert about.split()[1].rstrip(",") in topics[1:4]
        assert said == (Level.FAILURE, "these credentials may not write to it, only DESCRIBE, DESCRIBE_CONFIGS")
    # What a relay needs on a topic of events, and all that is looked at after it.
    findings = found(given)
    assert findings["topic secret, settings"][0] is Level.WARNING
    assert findings["state topic outbox.relay.state"][0] is Level.FAILURE


def test_servers_that_are_away_are_findings_and_not_tracebacks(monkeypatch):
    monkeypatch.setattr("relay.operations.doctor_kafka._SECONDS", 2.0)
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
        polling = PollingSource(Connector(outbox_postgres.url, "test"), "outbox", Failures("outbox", None, None))
        source = OneLane(polling, Lease(lane, 0, 30.0, 0.0))
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
        assert found(wal)[f"{about}, lanes"][0] is Level.WARNING
        connection.execute("UPDATE outbox.lanes SET streaming = lane <> 2")
        assert found(wal)[f"{about}, lanes"][1].startswith("lane 2: read from the table")
        connection.execute("UPDATE outbox.lanes SET streaming = true")
        assert f"{about}, lanes" not in found(wal)
        # Messages that were published once, and a relay that would take none from now on.
        assert "messages" not in found(wal)
        connection.execute("UPDATE outbox.streams SET message_at = now()")
        off, on = ({"slot": slot, "messages": value} for value in (False, True))
        assert found(wal)["messages"][0] is Level.FAILURE
        assert "does not start" in found(wal)["messages"][1]
        told = found(settings(outbox_postgres, outbox_kafka, source="wal", wal=off))["messages"]
        assert (told[0], "dead letters" in told[1]) == (Level.WARNING, True)
        told = found(settings(outbox_postgres, outbox_kafka, source="wal", wal=on)).get("messages", (None, ""))
        assert "dead letters" not in told[1]
        connection.execute("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", (slot,))
        level, text = found(wal)[about]
        assert level is Level.FAILURE
        assert "somebody advanced it" in text
