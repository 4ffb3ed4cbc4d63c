"""The runbooks of Kafka: topics, transactions, losses. Each shows the cause of its failure, and its way out ends it.

Commands and queries come out of docs/operations/runbooks.md itself; see runbooks.py. They are run with the rights that
the page names. ``firing`` evaluates the real alert rules on what real relays and consumers show.
"""

from __future__ import annotations

import itertools
import json
import re

import impatient
import pytest
from alerting import collected, firing, scraped
from confluent_kafka.admin import AdminClient, NewPartitions
from prometheus_client import CollectorRegistry
from raw_kafka import HangingTransaction
from reconcile_support import hanging, unverified
from rows_and_roles import execute
from runbook_support import Orders, alarmed, every_step_was_taken, of
from support import end_leases, ends, logged, look_up, wait_until

from outbox.testing.fixtures import Topics
from relay.failpoints import VARIABLE
from relay.operations.doctor import kafka
from spark_jobs.metrics import ConsumerMetrics

__all__ = ["hanging", "unverified"]


@pytest.fixture
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands wait no longer than relays with less patience do; see impatient.py."""
    for changed, name, value in impatient.changes(reconcile=True, decide=0.5):
        (monkeypatch.setitem if isinstance(changed, dict) else monkeypatch.setattr)(changed, name, value)


@of("The oldest event gets older")
def test_a_lane_whose_lease_lies_in_the_future(operator, orders, address):
    url = orders.url
    execute(
        url,
        "UPDATE outbox.lanes SET owner = 'long-gone', lease_until = clock_timestamp() + interval '1 day', epoch = 7"
        " WHERE lane = 2",
    )
    # So many that each lane has some.
    orders.add(60, seconds_ago=100)
    operator.start()
    wait_until(lambda: look_up(url, "SELECT DISTINCT lane FROM outbox.events") == [(2,)], what="the other lanes")
    alarmed(address, "OutboxBacklogOld")
    shown = operator.look("outbox status").text
    assert re.search(r"the oldest event has waited for \d+ s \(lane 2\)", shown)
    assert re.search(r"^2 +\d+ +\d+ (s|min) +long-gone", shown, re.MULTILINE)
    assert not re.search(r"^long-gone", shown, re.MULTILINE)
    assert "[-]" not in operator.look("curl -s", RELAY=address).text
    operator.own("outbox relay release", LANE=2)
    orders.published(60)
    alarmed(address)


@of("The oldest event gets older")
def test_kafka_is_away(operator, outbox_postgres, unverified, address, settings):
    """It stands still for a while, and answers nobody."""
    there = Orders(outbox_postgres, Topics(unverified.bootstrap_servers))
    settings["kafka__bootstrap_servers"] = unverified.bootstrap_servers
    operator.start()
    there.add(1)
    there.published(1)
    unverified.pause_broker(0)
    try:
        # So many that each lane has some.
        there.add(100, seconds_ago=100)
        wait_until(lambda: "OutboxBacklogOld" in firing(scraped(address)), what="the alert")
        reason = re.compile(r"lane-0\b.*: kafka_unavailable for ")
        wait_until(lambda: reason.search(operator.look("curl -s", RELAY=address).text), what="the reason")
        shown = operator.look("outbox status").text
        assert re.search(r"the oldest event has waited for \d+ s \(lanes 0, 1, 2, 3\)", shown)
    finally:
        unverified.resume_broker(0)
    there.published(101)
    alarmed(address)


@of("A server refuses the connection")
def test_a_broker_that_can_not_be_found(operator, orders, address, settings, monkeypatch):
    """Certificates, passwords and rights: test_secured_servers.py."""
    monkeypatch.setattr(kafka, "_SECONDS", 2.0)
    right = settings["kafka__bootstrap_servers"]
    orders.add(5)
    settings["kafka__bootstrap_servers"] = "broker.invalid:9092"
    relay = operator.start()
    relay.wait_for_log("Failed to resolve")

    def says_why() -> bool:
        """Return whether the resolver has answered within doctor's patience."""
        shown = operator.look("outbox doctor")
        assert shown.status == 1, shown.text
        return "a connection failed" in shown.text and "Failed to resolve" in shown.text

    wait_until(says_why, what="the reason")
    relay.kill()
    settings["kafka__bootstrap_servers"] = right
    operator.start()
    orders.published(5)
    alarmed(address)


@of("A topic takes nothing")
def test_a_topic_is_missing(operator, outbox_postgres, outbox_kafka, address, settings):
    missing = Orders(outbox_postgres, outbox_kafka, exists=False)
    settings["routes"] = json.dumps({missing.kind: {"topic": missing.topic}})
    operator.start()
    missing.add(5)
    alarmed(address, "OutboxTopicUnusable")
    line = f"[-]topic-{missing.topic} failed: topic '{missing.topic}' does not exist, or"
    assert line in operator.look("curl -s", RELAY=address).text
    shown = operator.look("outbox doctor")
    assert (shown.status, f"topic {missing.topic}" in shown.text) == (1, True), shown.text
    outbox_kafka.create_topic(missing.topic)
    missing.published(5)
    alarmed(address)


@of("A topic got more partitions")
def test_partitions_are_added(operator, orders, address):
    relay = operator.start(delivery="exactly-once")
    orders.add(3)
    orders.published(3)
    admin = AdminClient(orders.options)
    counts = itertools.count(2)

    def added() -> bool:
        # One more, should it not have counted them before.
        admin.create_partitions([NewPartitions(orders.topic, next(counts))])[orders.topic].result(30)
        return "OutboxTopicGrown" in firing(scraped(address))

    wait_until(added, what="the alert")
    alarmed(address, "OutboxTopicGrown")
    shown = operator.look("curl -s", RELAY=address).text
    assert re.search(rf"partitions-{orders.topic} .*partitions were added \(\d+, now \d+\)", shown), shown
    ends(relay)
    operator.start(delivery="exactly-once")
    alarmed(address)


@of("Events may be lost")
def test_kafka_does_not_acknowledge_what_is_deleted(operator, outbox_postgres, unverified, address, settings):
    there = Orders(outbox_postgres, Topics(unverified.bootstrap_servers))
    settings["kafka__bootstrap_servers"] = unverified.bootstrap_servers
    relay = operator.start(delivery="at-most-once")
    there.add(1)
    there.published(1)
    before = scraped(address)
    unverified.pause_broker(0)
    try:
        there.add(10)
        wait_until(lambda: "OutboxEventsLost" in firing(scraped(address), before), what="the alert")
        assert 0 < sum(line["events"] for line in logged(relay, "events may be lost, as at-most-once allows")) <= 10
    finally:
        unverified.resume_broker(0)
    alarmed(address)
    ends(relay)
    # What test_kafka_is_away shows is true of this one.
    relay = operator.run_relay("OUTBOX_DELIVERY=at-least-once")
    (line,) = wait_until(lambda: logged(relay, "relay started"), what="the first line")
    assert line["delivery"] == "at-least-once"


@of("A transaction is undecided")
def test_a_relay_has_died_in_a_transaction(operator, orders, outbox_postgres, settings, monkeypatch):
    monkeypatch.setattr(kafka, "_UNMOVED_SECONDS", 1.0)
    url = orders.url
    relay = operator.start(
        delivery="exactly-once",
        relay__lease_seconds=60,
        kafka__transaction_timeout_ms=90_000,
        env={VARIABLE: "txn.confirmed=pause@2"},
    )
    wait_until(lambda: look_up(url, "SELECT bool_and(last_batch = 1) FROM outbox.lanes") == [(True,)], what="a marker")
    orders.add(3)
    metrics = ConsumerMetrics("g", [orders.topic], url, "consumer", orders.options)
    registry = CollectorRegistry()
    registry.register(metrics)
    wait_until(lambda: "ConsumerUncommitted" in firing(collected(registry)), what="the alert")
    shown = operator.look("outbox doctor").text
    assert f"topic {orders.topic} partition 0, transaction" in shown
    servers = {"BROKERS": orders.kafka.bootstrap_servers}
    shown = operator.look("kafka-transactions.sh --bootstrap-server BROKERS list", **servers).text
    (id_,) = re.findall(rf"^({settings['name']}\.relay\.\S+)\s.*\sOngoing", shown, re.MULTILINE)
    tool = "kafka-transactions.sh --bootstrap-server BROKERS describe"
    shown = operator.look(tool, **servers, TRANSACTIONAL_ID=id_).text
    assert f"{orders.topic}-0" in shown
    assert "90000" in shown
    relay.kill()
    end_leases(url)
    operator.start(delivery="exactly-once")
    wait_until(lambda: "ConsumerUncommitted" not in firing(collected(registry)), what="its heir to fence it")
    orders.published(3)


@of("A transaction is undecided")
def test_a_transaction_hangs(operator, hanging, address, settings, impatience):
    """Of the lanes' last holder; the outbox still has its rows."""
    hanging.hang()
    settings |= {
        "kafka__bootstrap_servers": hanging.kafka.bootstrap_servers,
        "name": hanging.name,
        "delivery": "exactly-once",
        "kafka__transaction_timeout_ms": 2_000,
    }
    operator.start()
    alarmed(address, "OutboxTransactionHangs", "OutboxRelayNotReady")
    shown = operator.own("outbox relay reconcile", status=1)
    assert re.search(r"(\d+) events may be in it; the outbox still has the rows of \1", shown)
    operator.own("outbox relay reconcile --apply")
    wait_until(lambda: hanging.left() == 0, what="the events to be published")
    assert set(hanging.published().values()) == {1}
    alarmed(address)


@of("A transaction is undecided")
def test_a_transaction_of_another_program_hangs(operator, hanging, settings, impatience):
    """Nothing of the outbox ends it."""
    topic = hanging.topics[0]
    stranger = HangingTransaction(hanging.kafka.bootstrap_servers, hanging.kafka.name("stranger"))
    stranger.write(topic, 1, [(b"k", b"{}", {})])
    settings |= {
        "kafka__bootstrap_servers": hanging.kafka.bootstrap_servers,
        "name": hanging.name,
        "delivery": "exactly-once",
    }
    servers = {"BROKERS": hanging.kafka.bootstrap_servers, "TOPIC": topic}
    tool = "kafka-transactions.sh --bootstrap-server BROKERS find-hanging"
    shown = operator.look(tool, **servers, MINUTES=0).text
    assert re.search(rf"^{topic}\s+1\s.*\s0\s", shown, re.MULTILINE), shown
    shown = operator.own("outbox relay reconcile", status=1)
    assert f"abort --topic {topic} --partition 1 --start-offset 0" in shown
    assert hanging.undecided() == {(topic, 1)}
    tool = "kafka-transactions.sh --bootstrap-server BROKERS abort"
    operator.own(tool, **servers, PARTITION=1, STABLE=0)
    assert hanging.undecided() == set()


def test_every_step_was_taken(request):
    """Runs last; of a section only if all of its tests were to run."""
    every_step_was_taken(request)
