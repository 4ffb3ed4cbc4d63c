"""`outbox doctor` on real services: what it explains, and what it finds."""

from __future__ import annotations

import re

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
from outbox._clients.checks import Level
from outbox.errors import SchemaError
from outbox.sandbox.kafka import KafkaCluster
from relay.cli.app import app
from relay.config import Delivery, SourceKind, load
from relay.core.lease import Lease
from relay.core.ports import PUBLISHED, Receipt
from relay.database import Connector
from relay.operations.doctor import EXPLAINED, examine
from relay.operations.doctor import kafka as doctor_kafka
from relay.operations.doctor.postgres import check_ids
from relay.operations.guarantee import Strategy, guarantee
from relay.operations.roles import Kind, grants
from relay.operations.wal_setup import Cdc
from relay.polling.source import PollingSource
from relay.settle.retries import Failures
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
        "relay.operations.doctor.postgres._ARCHIVE_TIMEOUT", "SELECT set_config('statement_timeout', '50ms', true)"
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
                findings = list(check_ids(reader, "outbox"))
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
            for statement in grants([(Kind.WRITER, role)], "outbox", "consumer", wal=False):
                admin.execute(statement)
            assert f"role {role}" not in found(given)
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
    monkeypatch.setattr("relay.operations.doctor.kafka._SECONDS", 2.0)
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
    # Long words continue on the next line, and nothing is cut off.
    narrow = runner.invoke(app, ["doctor"], env={**environment, "COLUMNS": "80"}).stdout
    assert ("min.insync.replicas=" in narrow, "…" in narrow) == (True, False)
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
        connection.execute("UPDATE outbox.lanes SET owner = 'me'")
        source = OneLane(polling, Lease(lane, 0, 30.0, 0.0, owner="me"))
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
        # Whatever else goes on on this server is in the same WAL.
        level, text = found(polling)[about]
        assert (level, re.sub(r"\d+", "N", text)) == (Level.WARNING, "keeps N MiB of WAL, and nobody reads it")
        cdc.switch(SourceKind.WAL)
        level, text = found(wal)[about]
        assert (level, re.sub(r"\d+", "N", text)) == (Level.OK, "whole; N MiB of WAL are kept for it")
        assert found(polling)["source"][0] is Level.WARNING
        assert found(wal)[f"{about}, lanes"][0] is Level.WARNING
        connection.execute("UPDATE outbox.lanes SET streaming = lane <> 2")
        assert found(wal)[f"{about}, lanes"][1].startswith("lane 2: read from the table")
        connection.execute("UPDATE outbox.lanes SET streaming = true")
        assert f"{about}, lanes" not in found(wal)
        connection.execute("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", (slot,))
        level, text = found(wal)[about]
        assert level is Level.FAILURE
        assert "somebody advanced it" in text


# --- what is promised ------------------------------------------------------------------------------------------------


def groups(database, **strategies: str | None) -> None:
    with psycopg.connect(database.url) as connection:
        for group, strategy in strategies.items():
            connection.execute(
                "INSERT INTO consumer.groups (grp, owner, strategy) VALUES (%s, 'me', %s)", (group, strategy)
            )


@pytest.mark.parametrize("delivery", [Delivery.AT_LEAST_ONCE, Delivery.EXACTLY_ONCE])
def test_the_guarantee_of_the_lanes_and_of_each_group(outbox_postgres, outbox_kafka, delivery):
    groups(outbox_postgres, sums="Dedup", log="OffsetsOnly", old=None)
    given = settings(outbox_postgres, outbox_kafka, delivery=delivery, name=outbox_kafka.name("outbox"))
    promised = {one.about: one for one in examine(given) if one.about.startswith("guarantee")}
    assert set(promised) == {"guarantee on Kafka", *(f"guarantee of group {group}" for group in ("sums", "log", "old"))}
    lanes = promised["guarantee on Kafka"]
    assert lanes.found.startswith(guarantee(delivery, SourceKind.POLLING).found)
    for group, strategy in (("sums", Strategy.DEDUP), ("log", Strategy.OFFSETS_ONLY)):
        expected = guarantee(delivery, SourceKind.POLLING, strategy)
        one = promised[f"guarantee of group {group}"]
        assert (one.found, one.do) == (f"strategy {strategy}, {expected.found}", expected.do)
    repeats = delivery is Delivery.AT_LEAST_ONCE
    assert promised["guarantee of group sums"].level is Level.OK
    assert promised["guarantee of group log"].level is (Level.WARNING if repeats else Level.OK)
    assert promised["guarantee of group old"].found.startswith("not known")


def test_a_group_that_reads_what_others_write_is_promised_nothing_of_the_relay(outbox_postgres, outbox_kafka):
    groups(outbox_postgres, sums="Dedup", foreign="Fingerprint")
    with psycopg.connect(outbox_postgres.url) as connection:
        for group, topic in (("sums", "order-events"), ("sums", "other"), ("foreign", "others")):
            connection.execute("INSERT INTO consumer.offsets VALUES (%s, %s, 0, 'id', 0, 1)", (group, topic))
    findings = found(settings(outbox_postgres, outbox_kafka))
    assert "exactly-once" in findings["guarantee of group sums"][1]
    assert findings["guarantee of group foreign"] == (
        Level.OK,
        "reads others, which no relay with these settings writes",
    )


def test_lanes_of_both_sources_have_a_line_each(outbox_postgres, outbox_kafka):
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
            assert "guarantee of group there" in {finding.about for finding in examine(given, url)}
            away = {finding.about: finding.level for finding in examine(given, "postgresql://u@127.0.0.1:1/db")}
            assert (away["Postgres of the sink"], away["tables"]) == (Level.FAILURE, Level.OK)
        finally:
            admin.execute(sql.SQL("DROP DATABASE {}").format(other))


# --- as other roles --------------------------------------------------------------------------------------------------


@pytest.fixture
def roles(outbox_postgres):
    """Makes a role of a kind, with the grants of `outbox db roles`, and gives the URL with which it logs in."""
    made = []
    with psycopg.connect(outbox_postgres.url, autocommit=True) as admin:

        def make(kind: Kind) -> str:
            made.append(f"{kind}_{outbox_postgres.name}")
            admin.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(made[-1])))
            for statement in grants([(kind, made[-1])], "outbox", "consumer", wal=True):
                admin.execute(statement)
            return outbox_postgres.url.replace("postgres@", f"{made[-1]}@")

        yield make
        for role in made:
            admin.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(role)))


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *((Kind.RELAY, how) for how in ("polling", "polling, exactly-once", "wal")),
        (Kind.OPERATOR, "polling, exactly-once"),
        (Kind.PAGE, "wal"),
    ],
)
def test_it_works_as_each_role_and_names_what_that_may_not_look_at(outbox_postgres, outbox_kafka, roles, kind, how):
    source, _, delivery = how.partition(", ")
    slot = outbox_kafka.name("slot").lower().replace("-", "_")
    given = settings(
        outbox_postgres,
        outbox_kafka,
        source=source,
        delivery=delivery or "at-least-once",
        name=outbox_kafka.name("outbox"),
        wal={"slot": slot},
    )
    with psycopg.connect(outbox_postgres.url, autocommit=True) as admin:
        if source == "wal":
            cdc = Cdc(admin, SlotNames("outbox", slot, "outbox_relay"))
            cdc.setup()
            cdc.switch(SourceKind.WAL)
            admin.execute("UPDATE outbox.lanes SET streaming = true")
        admin.execute(
            "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, created_at) "
            "VALUES ('Order', '1', 'T', now() - interval '10 minutes')"
        )
        as_owner = {one.about: one for one in examine(given)}
        given = given.model_copy(update={"database_url": roles(kind)})
        as_role = {one.about: one for one in examine(given)}
    denied = {about for about, one in as_role.items() if "may not look at it" in one.found}
    assert denied == {"consumers", "losses", "remembered ids"}
    assert "were not compared" in as_role["tables"].found
    for about in denied:
        assert as_role[about].level is Level.WARNING
        assert "permission denied for" in as_role[about].found
        assert as_role[about].do.endswith(", or run this as the tables' owner")
    assert "USAGE on the consumers' schema" in as_role["losses"].do
    # Everything else is as the owner sees it, but for figures that change.
    same = as_owner.keys() - denied - {"tables", "backlog", f"slot {slot}, cost"}
    assert {about: as_role[about] for about in same} == {about: as_owner[about] for about in same}
    assert {"backlog", "guarantee on Kafka"} <= as_role.keys()
    assert [about for about, one in as_role.items() if one.level is Level.FAILURE] == ["Postgres fsync"]


def test_a_consumers_role_sees_the_groups(outbox_postgres, outbox_kafka, roles):
    groups(outbox_postgres, sums="Dedup")
    given = settings(outbox_postgres, outbox_kafka)
    findings = {finding.about: finding for finding in examine(given, roles(Kind.CONSUMER))}
    assert findings["guarantee of group sums"].level is Level.OK
    assert not [one for one in findings.values() if "may not look at it" in one.found]


@pytest.mark.parametrize(
    ("table", "about"), [("failures", "failures"), ("lanes", "source"), ("streams", "source"), ("events", "backlog")]
)
def test_one_missing_right_leaves_out_one_check(outbox_postgres, outbox_kafka, roles, table, about):
    url = roles(Kind.OPERATOR)
    given = settings(outbox_postgres, outbox_kafka)
    groups(outbox_postgres, sums="Dedup")
    with psycopg.connect(outbox_postgres.url, autocommit=True) as admin:
        operator = sql.Identifier(f"{Kind.OPERATOR}_{outbox_postgres.name}")
        admin.execute(sql.SQL("REVOKE SELECT ON {} FROM {}").format(sql.Identifier("outbox", table), operator))
        findings = {
            one.about: one for one in examine(given.model_copy(update={"database_url": url}), outbox_postgres.url)
        }
    assert f"permission denied for table {table}" in findings[about].found
    assert findings[about].level is Level.WARNING
    assert re.search(rf"SELECT on outbox\..*\b{table}\b", findings[about].do)
    assert {"Postgres", "guarantee on Kafka", "guarantee of group sums", "Kafka", "remembered ids"} <= findings.keys()


# --- the slot --------------------------------------------------------------------------------------------------------


def test_what_a_slot_costs_and_whether_it_outlives_a_failover(outbox_postgres, outbox_kafka):
    slot = outbox_kafka.name("slot").lower().replace("-", "_")
    wal = settings(outbox_postgres, outbox_kafka, source="wal", wal={"slot": slot})
    cost, failover = f"slot {slot}, cost", f"slot {slot}, failover"
    assert {cost, failover}.isdisjoint(found(wal))
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        Cdc(connection, SlotNames("outbox", slot, "outbox_relay")).setup()
        findings = found(wal)
        assert findings[cost][0] is Level.OK
        assert "of WAL are kept for it, of 1.0 GiB (wal.retained_limit_bytes); " in findings[cost][1]
        # A relay that polls does not need the slot, which costs as much.
        polling = found(settings(outbox_postgres, outbox_kafka, wal={"slot": slot}))
        assert (cost in polling, failover in polling) == (True, False)
        if connection.info.server_version < 170000:
            assert failover not in findings
            return
        assert findings[failover][0] is Level.OK
        standby = f"{slot}_standby"
        connection.execute("SELECT pg_create_physical_replication_slot(%s)", (standby,))
        try:
            level, text = found(wal)[failover]
            assert (level, "the standby can lack what is published" in text) == (Level.WARNING, True)
            assert f"; weakened by {failover} (synchronized_standby_slots)" in found(wal)["guarantee on Kafka"][1]
        finally:
            connection.execute("SELECT pg_drop_replication_slot(%s)", (standby,))
        connection.execute("SELECT pg_drop_replication_slot(%s)", (slot,))
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (slot,))
        level, text = found(wal)[failover]
        assert (level, "made without failover" in text) == (Level.WARNING, True)
        connection.execute("SELECT pg_drop_replication_slot(%s)", (slot,))
