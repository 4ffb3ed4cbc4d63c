"""Real relays and events that can't be published: dead letters, retries, copies, rights; and what a kill repeats."""

from __future__ import annotations

import psycopg
import pytest
from failing_relays import (
    SMALL,
    add,
    dead,
    delivery,
    event,
    headers,
    let_pass,
    names,
    outbox,
    routes,
    url,
    wait_for_dead,
)
from rows_and_roles import login_role
from support import Crashes, backlog, drained, end_leases, ends, look_up, wait_until

from relay.operations.roles import RoleKind, grants

__all__ = ["delivery", "url"]


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
    waiting = {failure["event_type"]: failure["state"] for failure in outbox(url, "dead-letters", "list")["failures"]}
    assert waiting == {"a1": "dead, its key waits", "n1": "dead, its key waits", "s1": "dead", "t1": "dead"}
    # The copies are on Kafka, and settled a moment later.
    waits = "SELECT event_type FROM outbox.events ORDER BY event_type"
    wait_until(lambda: look_up(url, waits) == [("a2",), ("n2",)], what="the others to be settled")
    add(url, event("Block", "a3"), event("Good", "g2"), event("Skip", "s3"))
    assert names(outbox_kafka.consume(good, 2)) == ["g1", "g2"]
    assert names(outbox_kafka.consume(skip, 3))[-1] == "s3"
    assert names(outbox_kafka.consume(block)) == ["b1"]

    let_pass(outbox_kafka, block)
    let_pass(outbox_kafka, skip)
    assert len(outbox(url, "dead-letters", "retry", "--all")["retried"]) == 4
    assert names(outbox_kafka.consume(block, 4)) == ["b1", "a1", "a2", "a3"]
    assert sorted(names(outbox_kafka.consume(skip, 5))[3:]) == ["s1", "t1"]
    # The unroutable one fails again.
    wait_for_dead(url, "n1")
    discarded = [failure["event_id"] for failure in outbox(url, "dead-letters", "list")["failures"]]
    assert outbox(url, "dead-letters", "discard", *discarded, "--reason", "no route")["discarded"] == discarded
    wait_for_dead(url, "n2")
    outbox(url, "dead-letters", "discard", "--all", "--reason", "no route")
    assert backlog(url) == 0
    assert look_up(url, "SELECT * FROM outbox.failures") == []
    audit = look_up(url, "SELECT what, why FROM outbox.audit ORDER BY id")
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
    assert look_up(url, "SELECT * FROM outbox.failures") == []


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
    assert look_up(url, "SELECT * FROM outbox.failures") == []
    let_pass(outbox_kafka, topic)
    let_pass(outbox_kafka, copies)
    assert len(outbox(url, "dead-letters", "retry", "--all")["retried"]) == 1
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
    assert look_up(url, "SELECT event_type FROM outbox.events WHERE headers ? 'outbox-dead-letter'") == []
    assert {("a1",), ("a2",)} <= set(look_up(url, "SELECT event_type FROM outbox.events"))
    assert (dead(url), look_up(url, "SELECT * FROM outbox.failures")) == ([], [])
    end_leases(url)
    relay = outbox_relay(env=allowed, **settings)
    wait_for_dead(url, "a1")
    assert names(outbox_kafka.consume(copies, 1)) == ["a1"]
    outbox(url, "dead-letters", "discard", "--all", "--reason", "test")
    drained(url)
    ends(relay)
    assert names(outbox_kafka.consume(copies)) == ["a1"]
    assert names(outbox_kafka.consume(small)) == ["a2"]
    times = names(outbox_kafka.consume(good))
    assert times == ["g1"] if delivery["delivery"] == "exactly-once" else set(times) == {"g1"}


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


@pytest.fixture
def relay_role(url):
    """A role with exactly the rights that `outbox db roles` gives to a relay; gives the URL to connect as it."""
    with (
        psycopg.connect(url, autocommit=True) as admin,
        login_role(admin, "writer") as writer,
        login_role(admin, "relay") as relay,
    ):
        for statement in grants([(RoleKind.WRITER, writer), (RoleKind.RELAY, relay)], "outbox", "consumer", wal=False):
            admin.execute(statement.encode())
        yield f"{url}?user={relay}"


@pytest.mark.parametrize("delivery", ["exactly-once", "at-most-once"], indirect=True)
def test_a_relay_needs_no_more_than_is_granted(url, relay_role, outbox_kafka, outbox_relay, delivery):
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
    outbox(url, "dead-letters", "retry", "--all")
    assert names(outbox_kafka.consume(small, 1)) == ["a1"]
    drained(url)
    if not at_most_once:
        relay.wait_for_log("the archive's partitions could not be kept")
        count = "SELECT count(*) FROM outbox.published_default"
        wait_until(lambda: look_up(url, count) == [(3,)], what="rows in the default partition")
    ends(relay)
    assert look_up(url, "SELECT count(*) FROM outbox.relays") == [(0,)]
