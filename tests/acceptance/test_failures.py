"""Real relays and events that can't be published: dead letters, retries, copies, the archive, at-most-once, rights."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourcePatternType,
    ResourceType,
)
from psycopg import sql
from support import Crashes, backlog, drained, wait_until
from typer.testing import CliRunner

from outbox import Event, Outbox
from outbox._app import migrate as db
from outbox.sandbox.kafka import KafkaCluster
from outbox.testing.fixtures import Topics
from relay.cli.app import app

QUICK = {"failures__max_attempts": 3, "failures__min_backoff_seconds": 0.05, "failures__max_backoff_seconds": 0.1}
SMALL = {"max.message.bytes": "20000"}
DELIVERIES = ["at-least-once", "exactly-once"]


@pytest.fixture(params=DELIVERIES)
def delivery(request, outbox_kafka):
    """Settings of a relay for this delivery, of an outbox that no other test has."""
    return QUICK | {"delivery": request.param, "name": outbox_kafka.name("outbox")}


@pytest.fixture
def url(outbox_postgres):
    """An outbox with one lane, so that whatever holds it up holds everything up."""
    db.change_lanes(outbox_postgres.url, 1)
    return outbox_postgres.url


@pytest.fixture(scope="module")
def guarded_kafka() -> Iterator[KafkaCluster]:
    """A broker of this module's own that knows access rights, and that may be killed."""
    settings = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
    }
    with KafkaCluster(settings=settings) as cluster:
        yield cluster


def event(kind: str, name: str, size: int = 0) -> Event:
    """An event called key-number, as in a1; ``size`` bytes of payload that do not compress."""
    return Event(kind, name[0], name, os.urandom(size) if size else {"n": name})


def add(url: str, *events: Event) -> None:
    """All in one transaction."""
    with psycopg.connect(url) as connection:
        Outbox().add_many(connection, events)


def rows(url: str, query: str, *values: Any) -> list[Any]:
    with psycopg.connect(url, autocommit=True) as connection:
        return connection.execute(query, values).fetchall()


def headers(message: Any) -> dict[str, str]:
    return {name: value.decode() for name, value in message.headers()}


def names(messages: Iterable[Any]) -> list[str]:
    return [headers(message)["event-type"] for message in messages]


def dead(url: str) -> list[str]:
    return [name for (name,) in rows(url, "SELECT event_type FROM outbox.dead_letters ORDER BY id")]


def wait_for_dead(url: str, *names: str) -> None:
    wait_until(lambda: dead(url) == list(names), 60, what=f"dead letters {names}")


def lease_runs_out(url: str) -> None:
    """As time would have it, once a relay is dead. A short lease would be outlasted by living ones, which then repeat
    or lose what they are allowed to.
    """
    rows(url, "UPDATE outbox.lanes SET lease_until = '-infinity' RETURNING 1")


def outbox(url: str, *arguments: str) -> Any:
    done = CliRunner().invoke(app, [*arguments, "--json"], env={"OUTBOX_DATABASE_URL": url})
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout)


def routes(**given: Any) -> dict[str, str]:
    return {"OUTBOX_ROUTES": json.dumps(given)}


def let_pass(topics: Topics, topic: str) -> None:
    """Remove the cause: the topic takes messages of any size."""
    resource = ConfigResource(
        ConfigResource.Type.TOPIC,
        topic,
        incremental_configs=[ConfigEntry("max.message.bytes", "2000000", incremental_operation=AlterConfigOpType.SET)],
    )
    admin = AdminClient({"bootstrap.servers": topics.bootstrap_servers})
    admin.incremental_alter_configs([resource])[resource].result()


def test_each_failure_ends_as_its_policy_says_and_the_lane_lives_on(url, outbox_kafka, outbox_relay, delivery):
    block, skip = (outbox_kafka.create_topic(outbox_kafka.name(name), 1, SMALL) for name in ("block", "skip"))
    good, copies = (outbox_kafka.create_topic(outbox_kafka.name(name)) for name in ("good", "copies"))
    allowed = routes(
        Block=block, Skip={"topic": skip, "on_failure": "skip", "dead_letter_topic": copies}, Good={"topic": good}
    )
    big = event("Skip", "s1", 30_000)
    add(
        url,
        event("Block", "a1", 30_000),
        event("Nowhere", "n1"),
        event("Good", "g1"),
        event("Block", "a2"),
        big,
        event("Block", "b1"),
        event("Nowhere", "n2"),
        event("Skip", "s2"),
        event("Skip", "t1", 999_900),
        event("Skip", "t2"),
    )
    relay = outbox_relay(env=allowed, **delivery)
    # Others of the lane go on, also while the failed ones are tried again.
    assert names(outbox_kafka.consume(good, 1)) == ["g1"]
    assert names(outbox_kafka.consume(block, 1)) == ["b1"]
    assert sorted(names(outbox_kafka.consume(skip, 2))) == ["s2", "t2"]
    wait_for_dead(url, "a1", "n1", "s1", "t1")
    relay.wait_for_log("event is a dead letter now")
    whole, omitted = sorted(outbox_kafka.consume(copies, 2), key=lambda message: message.key())
    assert (whole.value(), whole.key(), headers(whole)["ce_id"]) == (big.payload, b"s", str(big.event_id))
    assert "takes no message of this size" in headers(whole)["outbox-dead-letter"]
    assert headers(whole)["outbox-attempts"] == "3"
    assert (omitted.value(), headers(omitted)["outbox-payload-omitted"]) == (None, "true")
    waiting = {failure["event_type"]: failure["state"] for failure in outbox(url, "failures", "list")["failures"]}
    assert waiting == {"a1": "dead, its key waits", "n1": "dead, its key waits", "s1": "dead", "t1": "dead"}
    # The copies are on Kafka, and settled a moment later.
    waits = "SELECT event_type FROM outbox.events ORDER BY event_type"
    wait_until(lambda: rows(url, waits) == [("a2",), ("n2",)], what="the others to be settled")
    add(url, event("Block", "a3"), event("Good", "g2"), event("Skip", "s3"))
    assert names(outbox_kafka.consume(good, 2)) == ["g1", "g2"]
    assert names(outbox_kafka.consume(skip, 3))[-1] == "s3"
    assert names(outbox_kafka.consume(block)) == ["b1"]

    let_pass(outbox_kafka, block)
    let_pass(outbox_kafka, skip)
    assert len(outbox(url, "failures", "retry", "--all")["retried"]) == 4
    assert names(outbox_kafka.consume(block, 4)) == ["b1", "a1", "a2", "a3"]
    assert sorted(names(outbox_kafka.consume(skip, 5))[3:]) == ["s1", "t1"]
    # The unroutable one fails again.
    wait_for_dead(url, "n1")
    discarded = [failure["event_id"] for failure in outbox(url, "failures", "list")["failures"]]
    assert outbox(url, "failures", "discard", *discarded, "--reason", "no route")["discarded"] == discarded
    wait_for_dead(url, "n2")
    outbox(url, "failures", "discard", "--all", "--reason", "no route")
    assert backlog(url) == 0
    assert rows(url, "SELECT * FROM outbox.failures") == []
    audit = rows(url, "SELECT what, why FROM outbox.audit ORDER BY id")
    assert audit == [("retry", None), ("discard", "no route"), ("discard", "no route")]
    assert names(outbox_kafka.consume(good)) == ["g1", "g2"]
    assert relay.running


def test_a_batch_too_large_for_its_topic_is_made_smaller_and_no_event_fails(url, outbox_kafka, outbox_relay, delivery):
    topic = outbox_kafka.create_topic(outbox_kafka.name("small"), 1, SMALL)
    sent = [f"{key}{number}" for number in range(1, 5) for key in "abc"]
    add(url, *(event("Small", name, 5_000) for name in sent))
    relay = outbox_relay(env=routes(Small=topic), **delivery)
    drained(url)
    assert names(outbox_kafka.consume(topic)) == sent
    assert "event refused" not in relay.log()
    assert dead(url) == []
    assert rows(url, "SELECT * FROM outbox.failures") == []


def test_a_refused_copy_ends_as_a_dead_letter_and_makes_no_other(url, outbox_kafka, outbox_relay, delivery):
    topic = outbox_kafka.create_topic(outbox_kafka.name("small"), 1, SMALL)
    copies = outbox_kafka.create_topic(outbox_kafka.name("copies"), 1, {"max.message.bytes": "300"})
    add(url, event("Small", "a1", 30_000), event("Small", "a2"))
    allowed = routes(Small={"topic": topic, "dead_letter_topic": copies, "on_failure": "skip"})
    outbox_relay(env=allowed, **delivery)
    wait_for_dead(url, "a1", "a1")
    drained(url)
    assert names(outbox_kafka.consume(topic)) == ["a2"]
    assert outbox_kafka.consume(copies) == []
    assert rows(url, "SELECT * FROM outbox.failures") == []
    let_pass(outbox_kafka, topic)
    let_pass(outbox_kafka, copies)
    assert len(outbox(url, "failures", "retry", "--all")["retried"]) == 1
    drained(url)
    assert names(outbox_kafka.consume(topic)) == ["a2", "a1"]
    assert names(outbox_kafka.consume(copies)) == ["a1"]


def test_a_relay_killed_while_it_records_a_dead_letter_leaves_nothing_half_done(
    url, outbox_kafka, outbox_relay, delivery
):
    good, copies = (outbox_kafka.create_topic(outbox_kafka.name(name)) for name in ("good", "copies"))
    small = outbox_kafka.create_topic(outbox_kafka.name("small"), 1, SMALL)
    settings = delivery | {"failures__max_attempts": 1}
    allowed = routes(Good=good, Small={"topic": small, "dead_letter_topic": copies})
    add(url, event("Small", "a1", 30_000), event("Small", "a2"), event("Good", "g1"))
    relay = outbox_relay(env=allowed | {"OUTBOX_FAILPOINTS": "failure.recorded=kill"}, **settings)
    assert relay.wait() == -9
    assert rows(url, "SELECT event_type FROM outbox.events WHERE headers ? 'outbox-dead-letter'") == []
    assert {("a1",), ("a2",)} <= set(rows(url, "SELECT event_type FROM outbox.events"))
    assert (dead(url), rows(url, "SELECT * FROM outbox.failures")) == ([], [])
    lease_runs_out(url)
    relay = outbox_relay(env=allowed, **settings)
    wait_for_dead(url, "a1")
    assert names(outbox_kafka.consume(copies, 1)) == ["a1"]
    outbox(url, "failures", "discard", "--all", "--reason", "test")
    drained(url)
    relay.terminate()
    assert relay.wait() == 0
    assert names(outbox_kafka.consume(copies)) == ["a1"]
    assert names(outbox_kafka.consume(small)) == ["a2"]
    times = names(outbox_kafka.consume(good))
    assert times == ["g1"] if delivery["delivery"] == "exactly-once" else set(times) == {"g1"}


# --- a Kafka of our own ----------------------------------------------------------------------------------------------


def deny(
    cluster: KafkaCluster,
    topic: str,
    operation: AclOperation,
    permission: AclPermissionType = AclPermissionType.DENY,
) -> None:
    rule = AclBinding(ResourceType.TOPIC, topic, ResourcePatternType.LITERAL, "User:*", "*", operation, permission)
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    admin.create_acls([rule])[rule].result()


def permit(cluster: KafkaCluster, topic: str) -> None:
    every = AclBindingFilter(
        ResourceType.TOPIC, topic, ResourcePatternType.LITERAL, None, None, AclOperation.ANY, AclPermissionType.ANY
    )
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    admin.delete_acls([every])[every].result()


def said(relay: Any, text: str, topic: str) -> list[str]:
    """The lines of the log that say this of the topic."""
    return [line for line in relay.log().splitlines() if text in line and topic in line]


UNUSABLE, USABLE = "topic can't be written to; its events wait", "topic can be written to again"


def test_topics_that_are_missing_or_forbidden_hold_up_their_own_events_only(url, guarded_kafka, outbox_relay, delivery):
    """More than one batch of each, all mixed. No event is at fault: no attempt is counted, nothing is a dead letter."""
    topics = Topics(guarded_kafka.bootstrap_servers)
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
    assert rows(url, "SELECT * FROM outbox.failures") == []
    assert dead(url) == []

    permit(guarded_kafka, guarded)
    permit(guarded_kafka, hidden)
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
    relay.terminate()
    assert relay.wait() == 0


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
    assert rows(url, "SELECT * FROM outbox.failures") == []
    outbox_kafka.create_topic(copies)
    drained(url)
    assert names(outbox_kafka.consume(copies)) == ["a1"]
    assert dead(url) == ["a1"]


def test_while_the_broker_is_away_no_attempt_is_counted(outbox_postgres_server, guarded_kafka, outbox_relay):
    """Two outboxes, one for each delivery, and one outage."""
    topics = Topics(guarded_kafka.bootstrap_servers)
    # A backoff longer than a try takes, or the lane would be busy with this one event.
    settings = {
        "failures__max_attempts": 1000,
        "failures__min_backoff_seconds": 0.5,
        "failures__max_backoff_seconds": 0.5,
        "relay__max_backoff_seconds": 0.2,
        "kafka__reconnect_backoff_max_ms": 500,
        # At-least-once, what a slow broker acknowledges later than this is sent twice.
        "kafka__delivery_timeout_ms": 6000,
        "bootstrap_servers": guarded_kafka.bootstrap_servers,
    }
    attempts = "SELECT coalesce(sum(attempts), 0) FROM outbox.failures"
    outboxes = []
    for delivery in DELIVERIES:
        name = f"away_{topics.token}_{len(outboxes)}"
        url = outbox_postgres_server.create_database(name)
        db.upgrade(url)
        good, small = topics.create_topic(f"good-{name}"), topics.create_topic(f"small-{name}", 1, SMALL)
        relay = outbox_relay(
            database_url=url, env=routes(Good=good, Small=small), delivery=delivery, name=name, **settings
        )
        add(url, event("Small", "a1", 30_000), event("Small", "a2"), event("Good", "g1"))
        outboxes.append((name, url, good, small, relay))
    for _, url, good, _, _ in outboxes:
        wait_until(lambda url=url: rows(url, attempts) > [(1,)], what="attempts")
        wait_until(lambda good=good: topics.consume(good), what="the good one")
    guarded_kafka.kill_broker(0)
    before = []
    try:
        for _, url, _, _, relay in outboxes:
            relay.wait_for_log("waiting for a server")
            add(url, event("Good", "g2"), event("Good", "h1"))
            before.append((rows(url, attempts)[0][0], relay.log().count("waiting for a server")))
        for (_, url, _, _, relay), (counted, tries) in zip(outboxes, before, strict=True):
            wait_until(lambda relay=relay, tries=tries: relay.log().count("waiting for a server") > tries, what="a try")
            # One may have been under way.
            assert rows(url, attempts)[0][0] <= counted + 1
            assert rows(url, "SELECT aggregate_type FROM outbox.failures") == [("Small",)]
    finally:
        guarded_kafka.start_broker(0)
    for (name, url, good, small, relay), (counted, _) in zip(outboxes, before, strict=True):
        relay.wait_for_log("publishing again", 60)
        wait_until(lambda url=url, counted=counted: rows(url, attempts)[0][0] > counted + 1, what="attempts go on")
        let_pass(topics, small)
        drained(url)
        assert sorted(set(names(topics.consume(good)))) == ["g1", "g2", "h1"]
        assert names(topics.consume(small)) == ["a1", "a2"]
        assert dead(url) == []
        relay.kill()
        outbox_postgres_server.drop_database(name)


# --- the archive -----------------------------------------------------------------------------------------------------


def places(url: str) -> dict[str, tuple[str, int, int]]:
    found = rows(url, 'SELECT event_id::text, topic, partition, "offset" FROM outbox.published')
    assert len({event_id for event_id, *_ in found}) == len(found)
    return {event_id: tuple(place) for event_id, *place in found}


def test_every_published_event_is_archived_with_its_place(outbox_postgres, outbox_kafka, outbox_relay, delivery):
    url, topic = outbox_postgres.url, outbox_kafka.create_topic(outbox_kafka.name("archived"), 3)
    settings = delivery | {"env": routes(Order=topic), "relay__archive_days": 7}
    relays = [outbox_relay(**settings) for _ in range(2)]
    for relay in relays:
        relay.wait_for_log("lanes acquired")
    for number in range(5):
        add(url, *(event("Order", f"{key}{number}") for key in "abcdef"))
    drained(url)
    for relay in relays:
        relay.terminate()
        assert relay.wait() == 0
    read = {headers(m)["ce_id"]: (m.topic(), m.partition(), m.offset()) for m in outbox_kafka.consume(topic)}
    assert len(read) == 30
    assert places(url) == read
    assert sum(relay.log().count("archive kept") for relay in relays) == 1
    partitions = rows(url, "SELECT DISTINCT tableoid::regclass::text FROM outbox.published")
    assert [name.partition("_20")[0] for (name,) in partitions] == ["outbox.published"]


def test_after_a_kill_each_event_is_archived_once(url, outbox_kafka, outbox_relay, delivery):
    topic = outbox_kafka.create_topic(outbox_kafka.name("archived"))
    settings = delivery | {"relay__archive_days": 7}
    exactly = delivery["delivery"] == "exactly-once"
    add(url, *(event("Order", f"a{number}") for number in range(5)))
    point = "txn.committed=kill" if exactly else "batch.acknowledged=kill"
    relay = outbox_relay(env=routes(Order=topic) | {"OUTBOX_FAILPOINTS": point}, **settings)
    assert relay.wait() == -9
    assert places(url) == {}
    lease_runs_out(url)
    outbox_relay(env=routes(Order=topic), **settings)
    drained(url)
    wait_until(lambda: len(places(url)) == 5, what="the archive")
    messages = outbox_kafka.consume(topic)
    if exactly:
        assert set(places(url).values()) == {(None, None, None)}
        assert names(messages) == [f"a{number}" for number in range(5)]
    else:
        again = {headers(m)["ce_id"]: (m.topic(), m.partition(), m.offset()) for m in messages[-5:]}
        assert places(url) == again
        assert names(messages) == 2 * [f"a{number}" for number in range(5)]
    # A replay goes out once more, marked, in order, and is archived beside the first.
    assert outbox(url, "replay", "--aggregate", "Order/a", "--yes")["sent"] == 5
    drained(url)
    replayed = outbox_kafka.consume(topic)[len(messages) :]
    assert names(replayed) == [f"a{number}" for number in range(5)]
    assert all("outbox-replay" in headers(message) for message in replayed)
    assert {headers(message)["ce_id"] for message in replayed} == {headers(message)["ce_id"] for message in messages}
    wait_until(lambda: rows(url, "SELECT count(*) FROM outbox.published") == [(10,)], what="the archive")


# --- at-least-once ---------------------------------------------------------------------------------------------------


def test_at_least_once_each_kill_repeats_what_was_sent_and_not_settled_and_nothing_else(
    url, outbox_kafka, outbox_relay
):
    """Each relay settles a batch and is killed with the next: before it is sent, while, after, and when it is settled.

    Between two kills, no relay sends anything but that.
    """
    topic = outbox_kafka.create_topic(outbox_kafka.name("repeated"))
    add(url, *(event("Order", f"a{number:02}") for number in range(50)))
    crashes = Crashes(url, "Order", 5, lanes=1)
    # What stands on Kafka again after the kill, of the batch of five. Each turn settles the one before when it is read.
    repeats = {
        "batch.fetched=kill@2": {0},
        "batch.half_sent=kill@2": {0, 1, 2},
        "batch.sent=kill@2": {0, 1, 2, 3, 4, 5},
        "batch.acknowledged=kill@2": {5},
        "batch.settling=kill@2": {5},
        "batch.settled=kill@2": {0},
    }
    for point in repeats:
        relay = outbox_relay(
            env=routes(Order=topic) | {"OUTBOX_FAILPOINTS": point}, relay__batch_size=5, relay__lease_seconds=60
        )
        assert relay.wait() == -9, point
        crashes.note()
    outbox_relay(env=routes(Order=topic), relay__batch_size=5, relay__lease_seconds=60)
    drained(url)
    messages = outbox_kafka.consume(topic)
    assert list(dict.fromkeys(names(messages))) == [f"a{number:02}" for number in range(50)]
    found = dict(zip(repeats, crashes.repeats(messages), strict=True))
    assert all(found[point] in allowed for point, allowed in repeats.items()), found


# --- at-most-once ----------------------------------------------------------------------------------------------------

AT_MOST_ONCE = {"delivery": "at-most-once", "relay__batch_size": 5}


@pytest.mark.parametrize(
    ("point", "left"),
    [
        # In the second turn: read; deleted (each turn settles what it read, and before it the turn before); sent.
        ("batch.fetched=kill@2", 15),
        ("batch.settled=kill@4", 10),
        ("batch.half_sent=kill@2", 10),
        ("batch.acknowledged=kill@2", 10),
    ],
)
def test_at_most_once_a_kill_loses_at_most_a_batch_and_doubles_nothing(url, outbox_kafka, outbox_relay, point, left):
    topic = outbox_kafka.create_topic(outbox_kafka.name("once"))
    sent = [f"a{number:02}" for number in range(20)]
    add(url, *(event("Order", name) for name in sent))
    relay = outbox_relay(env=routes(Order=topic) | {"OUTBOX_FAILPOINTS": point}, **AT_MOST_ONCE)
    assert relay.wait() == -9
    assert backlog(url) == left
    lease_runs_out(url)
    outbox_relay(env=routes(Order=topic), **AT_MOST_ONCE)
    drained(url)
    wait_until(lambda: names(outbox_kafka.consume(topic))[-1:] == sent[-1:], what="the last event")
    arrived = names(outbox_kafka.consume(topic))
    # In order, none twice, and only the second batch may be missing.
    assert arrived == sorted(set(arrived))
    assert set(sent) - set(arrived) <= set(sent[5:10] if left == 10 else [])


def test_at_most_once_events_of_a_missing_topic_are_not_lost(url, outbox_kafka, outbox_relay):
    """Their rows are gone when the relay sees that there is no such topic. It was not sent: it is a dead letter."""
    good, missing = outbox_kafka.create_topic(outbox_kafka.name("good")), outbox_kafka.name("missing")
    sent = [f"{key}{number}" for number in range(4) for key in "abcde"]
    add(url, *(event(kind, name) for name in sent for kind in ("Good", "Missing")))
    relay = outbox_relay(env=routes(Good=good, Missing=missing), create_topics=False, **AT_MOST_ONCE)
    assert sorted(names(outbox_kafka.consume(good, 20))) == sorted(sent)
    assert "events may be lost" not in relay.log()
    outbox_kafka.create_topic(missing)
    drained(url)
    outbox(url, "failures", "retry", "--all")
    assert sorted(names(outbox_kafka.consume(missing, 20))) == sorted(sent)
    assert relay.running


def test_at_most_once_what_comes_behind_a_refused_event_of_its_key_is_not_lost(url, outbox_kafka, outbox_relay):
    """All in one turn: without a route, of a topic that is missing, and refused by the broker."""
    good = outbox_kafka.create_topic(outbox_kafka.name("good"))
    small = outbox_kafka.create_topic(outbox_kafka.name("small"), 1, SMALL)
    allowed = routes(Good=good, Small=small, Missing=outbox_kafka.name("missing"))
    large = event("Small", "a1", 30_000)
    kinds = {"Nowhere": ["n1", "n2", "n3"], "Missing": ["m1", "m2"], "Good": ["g1", "g2"], "Small": ["a2", "a3"]}
    add(url, large, *(event(kind, name) for kind, sent in kinds.items() for name in sent))
    relay = outbox_relay(env=allowed, create_topics=False, **AT_MOST_ONCE | {"relay__batch_size": 100})
    drained(url)
    wait_until(lambda: {"n1", "n2", "n3", "m1", "m2", "a1"} <= set(dead(url)), what="what was refused")
    assert names(outbox_kafka.consume(good, 2)) == ["g1", "g2"]
    # The broker refuses a request as a whole: what was in it is a dead letter too.
    wait_until(
        lambda: {"a2", "a3"} <= set(dead(url)) | set(names(outbox_kafka.consume(small))), what="what came behind"
    )
    relay.terminate()
    assert relay.wait() == 0
    assert "events may be lost" not in relay.log()


def test_at_most_once_a_refused_event_is_a_dead_letter_at_once(url, outbox_kafka, outbox_relay):
    good = outbox_kafka.create_topic(outbox_kafka.name("good"))
    small = outbox_kafka.create_topic(outbox_kafka.name("small"), 1, SMALL)
    allowed = routes(Good=good, Small={"topic": small, "dead_letter_topic": good})
    relay = outbox_relay(env=allowed, **AT_MOST_ONCE)
    add(url, event("Nowhere", "n1"), event("Good", "g1"), event("Nowhere", "n2"))
    wait_for_dead(url, "n1", "n2")
    assert names(outbox_kafka.consume(good, 1)) == ["g1"]
    add(url, event("Small", "a1", 30_000))
    wait_until(lambda: "a1" in dead(url), what="the broker's refusal")
    (_, copy) = outbox_kafka.consume(good, 2)
    assert headers(copy)["outbox-attempts"] == "1"
    let_pass(outbox_kafka, small)
    outbox(
        url,
        "failures",
        "discard",
        "--reason",
        "x",
        *(i for (i,) in rows(url, "SELECT event_id::text FROM outbox.dead_letters WHERE event_type <> 'a1'")),
    )
    outbox(url, "failures", "retry", "--all")
    assert names(outbox_kafka.consume(small, 1)) == ["a1"]
    assert relay.running


# --- rights ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def relay_role(url):
    """A role with exactly the rights that the docs give to a relay; gives the URL to connect as it."""
    text = (Path(__file__).parents[2] / "docs" / "operations" / "migrations.md").read_text()
    grants = text.split("```sql\n-- grants\n")[1].split("```")[0]
    base = url.rpartition("/")[2]
    roles = {role: f"{role}_{base}" for role in ("outbox_writer", "outbox_relay")}
    with psycopg.connect(url, autocommit=True) as admin:
        for role, name in roles.items():
            admin.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name)))
            grants = grants.replace(role, name)
        admin.execute(grants)
        yield f"{url}?user={roles['outbox_relay']}"
        for name in roles.values():
            admin.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(name)))


@pytest.mark.parametrize("delivery", [*DELIVERIES, "at-most-once"], indirect=True)
def test_a_relay_needs_no_more_than_the_docs_grant(url, relay_role, outbox_kafka, outbox_relay, delivery):
    good, copies = (outbox_kafka.create_topic(outbox_kafka.name(name)) for name in ("good", "copies"))
    small = outbox_kafka.create_topic(outbox_kafka.name("small"), 1, SMALL)
    at_most_once = delivery["delivery"] == "at-most-once"
    relay = outbox_relay(
        database_url=relay_role,
        env=routes(Good=good, Small={"topic": small, "dead_letter_topic": copies}),
        relay__archive_days=0 if at_most_once else 7,
        **delivery,
    )
    add(url, event("Good", "g1"))
    assert names(outbox_kafka.consume(good, 1)) == ["g1"]
    add(url, event("Small", "a1", 30_000))
    wait_for_dead(url, "a1")
    assert names(outbox_kafka.consume(copies, 1)) == ["a1"]
    let_pass(outbox_kafka, small)
    outbox(url, "failures", "retry", "--all")
    assert names(outbox_kafka.consume(small, 1)) == ["a1"]
    drained(url)
    if not at_most_once:
        relay.wait_for_log("the archive's partitions could not be kept")
        count = "SELECT count(*) FROM outbox.published_default"
        wait_until(lambda: rows(url, count) == [(3,)], what="rows in the default partition")
    relay.terminate()
    assert relay.wait() == 0
    assert rows(url, "SELECT count(*) FROM outbox.relays") == [(0,)]
