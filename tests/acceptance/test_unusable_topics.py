"""Real relays, and a Kafka whose topics are missing or forbidden, or whose broker is away."""

from __future__ import annotations

from typing import Any

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
from failing_relays import DELIVERIES, SMALL, add, dead, delivery, event, let_pass, names, routes, url, wait_for_dead
from secured import revoke_all
from support import backlog, drained, ends, look_up, wait_until

from outbox.sandbox.kafka import KafkaCluster

__all__ = ["delivery", "url"]


def deny(
    cluster: KafkaCluster, topic: str, operation: AclOperation, permission: AclPermissionType = AclPermissionType.DENY
) -> None:
    rule = AclBinding(ResourceType.TOPIC, topic, ResourcePatternType.LITERAL, "User:*", "*", operation, permission)
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    admin.create_acls([rule])[rule].result()


def said(relay: Any, text: str, topic: str) -> list[str]:
    """The lines of the log that say this of the topic."""
    return [line for line in relay.log().splitlines() if text in line and topic in line]


UNUSABLE, USABLE = "topic can't be written to; its events wait", "topic can be written to again"


@pytest.mark.parametrize("delivery", ["exactly-once"], indirect=True)
def test_topics_that_are_missing_or_forbidden_hold_up_their_own_events_only(url, mortal_kafka, outbox_relay, delivery):
    """More than one batch of each, all mixed. No event is at fault: no attempt is counted, nothing is a dead letter."""
    guarded_kafka, topics = mortal_kafka
    good, guarded, hidden = (topics.create_topic(topics.name(name)) for name in ("good", "guarded", "hidden"))
    missing = topics.name("missing")
    # With a rule of its own, a topic is no longer open to everyone: it would be hidden too.
    deny(guarded_kafka, guarded, AclOperation.DESCRIBE, AclPermissionType.ALLOW)
    deny(guarded_kafka, guarded, AclOperation.WRITE)
    deny(guarded_kafka, hidden, AclOperation.ALL)
    kinds = {"Good": "g", "Guarded": "a", "Hidden": "h", "Missing": "m"}
    sent = {kind: [f"{key}{number:02}" for number in range(15)] for kind, key in kinds.items()}
    add(url, *(event(kind, sent[kind][number]) for number in range(15) for kind in kinds))
    relay = outbox_relay(
        bootstrap_servers=guarded_kafka.bootstrap_servers,
        create_topics=False,
        relay__batch_size=10,
        env=routes(Good=good, Guarded=guarded, Hidden=hidden, Missing=missing),
        **delivery,
    )
    assert names(topics.consume(good, 15)) == sent["Good"]
    for topic, reason in ((guarded, "grant it WRITE"), (hidden, "DESCRIBE"), (missing, "OUTBOX_CREATE_TOPICS")):
        wait_until(lambda topic=topic: said(relay, UNUSABLE, topic), 60, f"{topic} to be named")
        assert reason in said(relay, UNUSABLE, topic)[0]
    # They wait where they are, and the others go on, also through tries of these topics.
    for number in range(15, 20):
        add(url, *(event(kind, f"{key}{number}") for kind, key in kinds.items()))
        for kind, key in kinds.items():
            sent[kind].append(f"{key}{number}")
        assert names(topics.consume(good, number + 1)) == sent["Good"]
    wait_until(lambda: backlog(url) == 60, what="the good ones to be settled")
    assert look_up(url, "SELECT * FROM outbox.failures") == []
    assert dead(url) == []

    revoke_all(AdminClient({"bootstrap.servers": guarded_kafka.bootstrap_servers}))
    topics.create_topic(missing)
    drained(url, 120)
    for kind, topic in (("Good", good), ("Guarded", guarded), ("Hidden", hidden), ("Missing", missing)):
        assert names(topics.consume(topic)) == sent[kind]
    for topic in (guarded, hidden, missing):
        # Said once, however often it was tried.
        assert len(said(relay, UNUSABLE, topic)) == 1, said(relay, UNUSABLE, topic)
        assert said(relay, USABLE, topic)
    assert dead(url) == []
    assert relay.running
    ends(relay)


@pytest.mark.parametrize("delivery", ["exactly-once"], indirect=True)
def test_a_state_topic_that_may_not_be_written_to_is_named_with_the_rights(url, mortal_kafka, outbox_relay, delivery):
    guarded_kafka, topics = mortal_kafka
    good, name = topics.create_topic(topics.name("good")), topics.name("outbox")
    state = f"{name}.relay.state"
    config = {"cleanup.policy": "compact", "unclean.leader.election.enable": "false"}
    admin = AdminClient({"bootstrap.servers": guarded_kafka.bootstrap_servers})
    admin.create_topics([NewTopic(state, 4, 1, config=config)])[state].result()
    for operation in (AclOperation.DESCRIBE, AclOperation.DESCRIBE_CONFIGS, AclOperation.READ):
        deny(guarded_kafka, state, operation, AclPermissionType.ALLOW)
    add(url, event("Good", "g1"))
    relay = outbox_relay(
        bootstrap_servers=guarded_kafka.bootstrap_servers, env={**routes(Good=good), "OUTBOX_NAME": name}, **delivery
    )
    rights = "grant it READ, WRITE, DESCRIBE and DESCRIBE_CONFIGS"
    wait_until(lambda: said(relay, rights, state), 60, "the state topic to be named")
    revoke_all(admin)
    drained(url, 120)
    assert names(topics.consume(good)) == ["g1"]
    ends(relay)


@pytest.mark.parametrize("delivery", ["at-most-once", "at-least-once"], indirect=True)
def test_a_topic_with_more_replicas_than_brokers_holds_up_its_own_events_only(
    url, outbox_kafka, outbox_relay, delivery
):
    """The first event of a new type, in front of all others of its lane."""
    good, large = outbox_kafka.create_topic(outbox_kafka.name("good")), outbox_kafka.name("large")
    add(url, event("Large", "m1"), event("Good", "g1"), event("Large", "m2"), event("Good", "g2"))
    relay = outbox_relay(env=routes(Good=good, Large=large), create_topics=True, topic_replication=3, **delivery)
    assert names(outbox_kafka.consume(good, 2)) == ["g1", "g2"]
    wait_until(lambda: said(relay, UNUSABLE, large), 60, f"{large} to be named")
    assert "OUTBOX_TOPIC_REPLICATION" in said(relay, UNUSABLE, large)[0]
    wait_until(lambda: backlog(url) == 2, what="the good ones to be settled")
    assert look_up(url, "SELECT * FROM outbox.failures") == []
    outbox_kafka.create_topic(large)
    drained(url)
    assert names(outbox_kafka.consume(large, 2)) == ["m1", "m2"]
    assert dead(url) == []
    ends(relay)


def test_the_copies_of_dead_letters_wait_for_their_topic_and_hold_nothing_up(url, outbox_kafka, outbox_relay, delivery):
    small = outbox_kafka.create_topic(outbox_kafka.name("small"), 1, SMALL)
    copies = outbox_kafka.name("copies")
    add(url, event("Small", "a1", 30_000), *(event("Small", f"b{number}") for number in range(5)))
    allowed = routes(Small={"topic": small, "dead_letter_topic": copies, "on_failure": "skip"})
    relay = outbox_relay(env=allowed, create_topics=False, **delivery)
    wait_for_dead(url, "a1")
    wait_until(lambda: said(relay, UNUSABLE, copies), 60, "the topic of the copies to be named")
    add(url, event("Small", "a2"), event("Small", "c1"))
    assert sorted(names(outbox_kafka.consume(small, 7))) == ["a2", "b0", "b1", "b2", "b3", "b4", "c1"]
    assert look_up(url, "SELECT * FROM outbox.failures") == []
    outbox_kafka.create_topic(copies)
    drained(url)
    assert names(outbox_kafka.consume(copies)) == ["a1"]
    assert dead(url) == ["a1"]


def test_while_the_broker_is_away_no_attempt_is_counted(another_outbox, mortal_network, mortal_kafka, outbox_relay):
    """Two outboxes, one for each delivery, and one outage."""
    (_, proxy), (_, topics) = mortal_network, mortal_kafka
    # A backoff longer than a try takes, or the lane would be busy with this one event.
    settings = {
        "failures__max_attempts": 1000,
        "failures__min_backoff_seconds": 0.5,
        "failures__max_backoff_seconds": 0.5,
        "relay__max_backoff_seconds": 0.2,
        "kafka__reconnect_backoff_max_ms": 500,
        # At-least-once, what a slow broker acknowledges later than this is sent twice.
        "kafka__delivery_timeout_ms": 2000,
        "bootstrap_servers": proxy.address,
    }
    attempts = "SELECT coalesce(sum(attempts), 0) FROM outbox.failures"
    outboxes = []
    for promise in DELIVERIES:
        url, name = another_outbox(), topics.name(f"away-{promise}")
        good, small = topics.create_topic(f"good-{name}"), topics.create_topic(f"small-{name}", 1, SMALL)
        relay = outbox_relay(
            database_url=url, env=routes(Good=good, Small=small), delivery=promise, name=name, **settings
        )
        add(url, event("Small", "a1", 30_000), event("Small", "a2"), event("Good", "g1"))
        outboxes.append((url, good, small, relay))
    for url, good, _, _ in outboxes:
        wait_until(lambda url=url: look_up(url, attempts) > [(1,)], what="attempts")
        wait_until(lambda good=good: topics.consume(good), what="the good one")
    proxy.stop()
    before = []
    try:
        for url, _, _, relay in outboxes:
            relay.wait_for_log("waiting for a server")
            add(url, event("Good", "g2"), event("Good", "h1"))
            before.append((look_up(url, attempts)[0][0], relay.log().count("waiting for a server")))
        for (url, _, _, relay), (counted, tries) in zip(outboxes, before, strict=True):
            wait_until(lambda relay=relay, tries=tries: relay.log().count("waiting for a server") > tries, what="a try")
            # One may have been under way.
            assert look_up(url, attempts)[0][0] <= counted + 1
            assert look_up(url, "SELECT aggregate_type FROM outbox.failures") == [("Small",)]
    finally:
        proxy.start()
    for promise, (url, good, small, relay), (counted, _) in zip(DELIVERIES, outboxes, before, strict=True):
        relay.wait_for_log("publishing again", 60)
        wait_until(lambda url=url, counted=counted: look_up(url, attempts)[0][0] > counted + 1, what="attempts go on")
        let_pass(topics, small)
        drained(url)
        assert sorted(set(names(topics.consume(good)))) == ["g1", "g2", "h1"]
        found = names(topics.consume(small))
        assert (found if promise == "exactly-once" else list(dict.fromkeys(found))) == ["a1", "a2"]
        assert dead(url) == []
        relay.kill()
