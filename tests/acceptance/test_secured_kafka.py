"""A Kafka behind TLS and SASL that checks rights: relay and doctor have those of docs/operations/relay.md, no more."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import psycopg
import pytest
from confluent_kafka.admin import (
    AclOperation,
    AdminClient,
    ResourceType,
)
from secured import PASSWORD, allow, revoke_all
from support import Crashes, Load, check, ends, look_up
from wal_support import run_outbox

from outbox import Event, Outbox
from outbox.consumer.errors import NotAuthorized
from outbox.testing.fixtures import Topics
from spark_jobs.driver.options import Options
from spark_jobs.driver.runner import Runner
from spark_jobs.job import ConsumerJob

BATCH = 50


def documented() -> list[tuple[ResourceType, str, list[AclOperation], str]]:
    """Return what docs/operations/relay.md lists: on what, which names, the operations, and for which delivery."""
    text = (Path(__file__).parents[2] / "docs" / "operations" / "relay.md").read_text()
    table = text.split("## Rights in Kafka")[1].split("\n\n")[2]
    types = {
        "topic": ResourceType.TOPIC,
        "topics": ResourceType.TOPIC,
        "transactional ids": ResourceType.TRANSACTIONAL_ID,
    }
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return [
        (types[on], names, [AclOperation[operation] for operation in operations.split(", ")], deliveries)
        for on, names, operations, deliveries in rows
    ]


def grant(admin: AdminClient, delivery: str, name: str, topics: list[str]) -> None:
    """Grant what the docs list for this delivery, of an outbox of this name, to the relay's user."""
    for kind, names, operations, deliveries in documented():
        if deliveries in {"every delivery", f"`{delivery}`"}:
            written = names.split("`")[1].replace("outbox", name) if "`" in names else ""
            prefix = "*" if "begins with" in names else ""
            for resource in [written] if written else topics:
                allow(admin, kind, resource + prefix, *operations)


@pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])
def test_tls_a_password_and_the_documented_rights_are_enough(outbox_postgres, outbox_relay, secured, delivery):
    url, settings, admin = outbox_postgres.url, secured.settings, secured.admin
    with Topics(secured.plain) as topics:
        kind, name = topics.name("Order"), topics.name("outbox")
        topic = topics.create_topic(f"{kind.lower()}-events", 3)
        state = topics.create_topic(f"{name}.relay.state", 4, {"cleanup.policy": "compact"})
        settings["bootstrap_servers"] = settings["kafka__bootstrap_servers"]
        settings |= {"delivery": delivery, "name": name, "create_topics": False, "routes": json.dumps({kind: topic})}
        settings |= {"relay__lease_seconds": 20, "relay__batch_size": BATCH, "relay__max_backoff_seconds": 0.5}
        crashes = Crashes(url, kind, BATCH)
        with Load(url, kind) as load:
            relay = outbox_relay(**settings)
            # Without any right it waits.
            relay.wait_for_log("does not exist, or the relay may not" if delivery == "at-least-once" else "waiting for")
            # In one snapshot: the load goes on.
            query = "SELECT (SELECT count(*) FROM outbox.events) = (SELECT coalesce(sum(seq), 0) FROM business)"
            assert look_up(url, query) == [(True,)]
            grant(admin, delivery, name, [topic])
            load.more(100)
            # The next one has to fence it, and to read its markers.
            relay.kill()
            crashes.note()
            relay = outbox_relay(**settings)
            load.drain(90)
            assert relay.running
        messages = topics.consume(topic)
        repeats = check(url, messages)
        assert repeats == (sum(crashes.repeats(messages)) if delivery == "at-least-once" else 0)
        assert PASSWORD not in relay.log()
        ends(relay)
        del settings["bootstrap_servers"]
        examined = run_outbox(url, settings, "doctor", "--json")
        findings = {each["about"]: each for each in json.loads(examined.stdout)["findings"]}
        # The test's Postgres runs with fsync off.
        assert [about for about, each in findings.items() if each["level"] == "failure"] == ["Postgres fsync"]
        assert findings["Kafka"]["level"] == "ok"
        assert "not checked" in findings[f"topic {topic}, settings"]["found"]
        if delivery == "exactly-once":
            assert "DESCRIBE_CONFIGS on the cluster" in findings["Kafka's settings"]["do"]
            assert f"topic {state}" in findings
            # Reads what the topics of a lane with a problem have; nothing of these events.
            with psycopg.connect(url) as connection:
                connection.execute("UPDATE outbox.lanes SET last_batch = last_batch + 5")
                Outbox().add_many(connection, [Event(kind, f"k{number}", "Said", {}) for number in range(40)])
            allow(admin, ResourceType.TOPIC, topic, AclOperation.READ)
            compared = run_outbox(url, settings, "relay", "reconcile", "--json")
            lanes = json.loads(compared.stdout)["lanes"]
            assert (compared.returncode, sum(lane["rows"] for lane in lanes)) == (1, 40), compared.stderr
            assert [lane["found"] for lane in lanes] == [0] * 4
        revoke_all(admin)


def test_a_consumer_that_kafka_refuses_ends_and_says_so(outbox_postgres, secured):
    """Not at once: somebody may be changing the password. But it is no outage, which is waited for without an end."""
    kafka = secured.options | {"sasl.password": "incorrect"}
    reports: list[str] = []
    with Topics(secured.plain) as topics:
        topic = topics.create_topic(topics.name("refused"), 1)
        job = ConsumerJob("refused", (topic,), schema="n int", effect="SELECT")
        # The job ends before Spark is asked for anything.
        runner = Runner(
            None, job, Options(outbox_postgres.url, kafka, refused_seconds=2.0), lambda text, _: reports.append(text)
        )
        with runner, pytest.raises(NotAuthorized, match="look at the credentials and the ACLs"):
            runner.continuous(threading.Event())
    assert reports.count("waiting for a server") > 2
