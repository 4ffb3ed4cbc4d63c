"""`outbox doctor` and rights: who could pose as the relay, and what each role may not look at."""

from __future__ import annotations

import re

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
from doctor_support import found, groups, settings
from psycopg import sql
from support import wait_until

from outbox._clients.checks import Level
from outbox.sandbox.kafka import KafkaCluster
from relay.config import SourceKind
from relay.operations.doctor import examine
from relay.operations.roles import RoleKind, grants
from relay.operations.wal_setup import Cdc
from relay.wal.slot import SlotNames


def test_who_could_pose_as_the_relay(outbox_postgres, outbox_kafka):
    role = f"writer_{outbox_postgres.name}"
    given = settings(outbox_postgres, outbox_kafka)
    with psycopg.connect(outbox_postgres.url, autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE ROLE {0}; GRANT INSERT ON outbox.events TO {0}").format(sql.Identifier(role)))
        try:
            level, text = found(given)[f"role {role}"]
            assert (level, "may set from_relay" in text) == (Level.WARNING, True)
            for statement in grants([(RoleKind.WRITER, role)], "outbox", "consumer", wal=False):
                admin.execute(statement)
            assert f"role {role}" not in found(given)
        finally:
            admin.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(role)))


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


@pytest.fixture
def roles(outbox_postgres):
    """Makes a role of a kind, with the grants of `outbox db roles`, and gives the URL with which it logs in."""
    made = []
    with psycopg.connect(outbox_postgres.url, autocommit=True) as admin:

        def make(kind: RoleKind) -> str:
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
        (RoleKind.RELAY, "polling, exactly-once"),
        (RoleKind.OPERATOR, "polling"),
        (RoleKind.PAGE, "wal"),
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
    denied = {about for about, one in as_role.items() if "this role lacks a right" in one.found}
    assert denied == {"consumers", "losses", "remembered ids"}
    assert "were not compared" in as_role["tables"].found
    for about in denied:
        assert as_role[about].level is Level.WARNING
        assert "permission denied for" in as_role[about].found
        assert as_role[about].do.endswith(", or run this as the tables' owner")
    assert "USAGE on the consumers' schema" in as_role["losses"].do
    # Everything else is as the owner sees it, but for figures that change.
    same = as_owner.keys() - denied - {"tables", "status", f"slot {slot}", f"slot {slot}, cost"}
    assert {about: as_role[about] for about in same} == {about: as_owner[about] for about in same}
    assert {"status", "guarantee on Kafka"} <= as_role.keys()
    assert [about for about, one in as_role.items() if one.level is Level.FAILURE] == ["Postgres fsync"]


def test_a_consumers_role_sees_the_groups(outbox_postgres, outbox_kafka, roles):
    groups(outbox_postgres, sums="Dedup")
    given = settings(outbox_postgres, outbox_kafka)
    findings = {finding.about: finding for finding in examine(given, roles(RoleKind.CONSUMER))}
    assert findings["guarantee of group sums"].level is Level.OK
    assert not [one for one in findings.values() if "this role lacks a right" in one.found]


@pytest.mark.parametrize(("table", "about"), [("failures", "failures without an event"), ("streams", "source")])
def test_one_missing_right_leaves_out_one_check(outbox_postgres, outbox_kafka, roles, table, about):
    url = roles(RoleKind.OPERATOR)
    given = settings(outbox_postgres, outbox_kafka)
    groups(outbox_postgres, sums="Dedup")
    with psycopg.connect(outbox_postgres.url, autocommit=True) as admin:
        operator = sql.Identifier(f"{RoleKind.OPERATOR}_{outbox_postgres.name}")
        admin.execute(sql.SQL("REVOKE SELECT ON {} FROM {}").format(sql.Identifier("outbox", table), operator))
        findings = {
            one.about: one for one in examine(given.model_copy(update={"database_url": url}), outbox_postgres.url)
        }
    assert f"permission denied for table {table}" in findings[about].found
    assert findings[about].level is Level.WARNING
    assert re.search(rf"SELECT on outbox\..*\b{table}\b", findings[about].do)
    assert {"Postgres", "guarantee on Kafka", "guarantee of group sums", "Kafka", "remembered ids"} <= findings.keys()
