"""`outbox doctor` and rights: who could pose as the relay, and what each role may not look at.

And `outbox trace`, where a topic may not be read.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Mapping, Sequence

import psycopg
import pytest
from confluent_kafka import Producer
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
from psycopg.conninfo import conninfo_to_dict
from rows_and_roles import NOW, execute, login_role, put, roles
from support import wait_until
from typer.testing import CliRunner
from uuid_utils.compat import uuid7

from outbox._clients.checks import Level
from outbox.testing.fixtures import Topics
from relay.cli.app import app
from relay.config import SourceKind
from relay.operations.doctor import examine
from relay.operations.roles import RoleKind, grants
from relay.operations.wal_setup import Cdc
from relay.wal.slot import SlotNames

__all__ = ["roles"]


def test_who_could_pose_as_the_relay(outbox_postgres, outbox_kafka):
    given = settings(outbox_postgres, outbox_kafka)
    with outbox_postgres.connect(autocommit=True) as admin, login_role(admin, "writer") as role:
        admin.execute(f"GRANT INSERT ON outbox.events TO {role}")
        level, text = found(given)[f"role {role}"]
        assert (level, "may set from_relay" in text) == (Level.WARNING, True)
        for statement in grants([(RoleKind.WRITER, role)], "outbox", "consumer", wal=False):
            admin.execute(statement)
        assert f"role {role}" not in found(given)


@pytest.fixture
def guarded_kafka(mortal_network) -> Topics:
    """A broker that knows access rights. Topics stay there: who may not delete them is among the rules."""
    cluster, _ = mortal_network
    return Topics(cluster.bootstrap_servers)


def create(kafka: Topics, allowed: Mapping[str, Sequence[AclOperation]]) -> None:
    """Create topics, and allow this alone on those that name something."""
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    for future in admin.create_topics([NewTopic(topic, 1, 1) for topic in allowed]).values():
        future.result()
    everyone = ResourcePatternType.LITERAL, "User:*", "*"
    rules = [
        AclBinding(ResourceType.TOPIC, topic, *everyone, operation, AclPermissionType.ALLOW)
        for topic, operations in allowed.items()
        for operation in operations
    ]
    for future in admin.create_acls(rules).values():
        future.result()


def test_topics_that_may_not_be_written_to(outbox_postgres, guarded_kafka):
    describe, configs, write = AclOperation.DESCRIBE, AclOperation.DESCRIBE_CONFIGS, AclOperation.WRITE
    good, guarded, copies, secret, name = map(guarded_kafka.name, ("good", "guarded", "copies", "secret", "outbox"))
    unwritable = {guarded, copies, f"{name}.relay.state"}
    create(guarded_kafka, dict.fromkeys(unwritable, (describe, configs)) | {good: (), secret: (describe, write)})
    given = settings(
        outbox_postgres,
        guarded_kafka,
        name=name,
        delivery="exactly-once",
        routes={"Good": {"topic": good, "dead_letter_topic": copies}, "Guarded": guarded, "Secret": secret},
    )

    def forbidden() -> dict[str, tuple[Level, str]]:
        return {about: said for about, said in found(given).items() if about.endswith(", rights")}

    # The broker learns of its rules from the controller.
    wait_until(lambda: len(forbidden()) == 3, what="the rules to hold")
    for about, said in forbidden().items():
        assert about.split()[1].rstrip(",") in unwritable
        assert said == (Level.FAILURE, "these credentials may not write to it, only DESCRIBE, DESCRIBE_CONFIGS")
    # What a relay needs on a topic of events, and all that is looked at after it.
    findings = found(given)
    assert findings[f"topic {secret}, settings"][0] is Level.WARNING
    assert findings[f"state topic {name}.relay.state"][0] is Level.FAILURE


def test_what_is_found_is_kept_where_another_topic_may_not_be_read(outbox_postgres, guarded_kafka):
    servers, event_id = guarded_kafka.bootstrap_servers, str(uuid7())
    foreign, own = map(guarded_kafka.name, ("foreign", "own"))
    create(guarded_kafka, {foreign: (AclOperation.DESCRIBE, AclOperation.WRITE), own: ()})
    producer = Producer({"bootstrap.servers": servers})
    for topic in (foreign, own):
        producer.produce(topic, b"{}", b"k", headers={"ce_id": event_id})
    assert producer.flush(30) == 0
    environment = {"OUTBOX_DATABASE_URL": outbox_postgres.url, "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": servers}
    words = ["trace", event_id, "--seconds", "60", "--json", "--topic", own, "--topic", foreign]

    def traced() -> tuple[list[str], bool, list[str]]:
        found = json.loads(CliRunner().invoke(app, words, env=environment).stdout)
        return [one["topic"] for one in found["messages"]], found["searched_to_the_end"], found["unseen"]

    # The broker learns of its rules from the controller.
    wait_until(lambda: traced()[2], what="the rule to hold")
    why = f"Kafka: {foreign} partition 0 may not be read with these credentials: grant READ on the topic"
    assert traced() == ([own], False, [why])


@pytest.mark.parametrize(
    ("kind", "how"), [(RoleKind.RELAY, "polling, exactly-once"), (RoleKind.OPERATOR, "polling"), (RoleKind.PAGE, "wal")]
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
        put(admin, "outbox.events", created_at=NOW - dt.timedelta(minutes=10))
        as_owner = {one.about: one for one in examine(given)}
        given = given.model_copy(update={"database_url": roles.of(kind, "--wal")})
        as_role = {one.about: one for one in examine(given)}
    denied = {about for about, one in as_role.items() if "this role lacks a right" in one.found}
    assert denied == {"consumers", "losses", "calls", "remembered ids"}
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
    given = settings(outbox_postgres, outbox_kafka, relay={"sink_url": roles.of(RoleKind.CONSUMER)})
    findings = {finding.about: finding for finding in examine(given)}
    assert findings["guarantee of group sums"].level is Level.OK
    assert not [one for one in findings.values() if "this role lacks a right" in one.found]


def test_one_missing_right_leaves_out_one_check(outbox_postgres, outbox_kafka, roles):
    given = settings(outbox_postgres, outbox_kafka, relay={"sink_url": outbox_postgres.url})
    groups(outbox_postgres, sums="Dedup")
    for table, about in (("failures", "failures without an event"), ("streams", "source")):
        url = roles.of(RoleKind.OPERATOR)
        execute(outbox_postgres.url, f"REVOKE SELECT ON outbox.{table} FROM {conninfo_to_dict(url)['user']}")
        findings = {one.about: one for one in examine(given.model_copy(update={"database_url": url}))}
        assert f"permission denied for table {table}" in findings[about].found
        assert findings[about].level is Level.WARNING
        assert re.search(rf"SELECT on outbox\..*\b{table}\b", findings[about].do)
        others = {"Postgres", "guarantee on Kafka", "guarantee of group sums", "Kafka", "remembered ids"}
        assert others <= findings.keys(), table
