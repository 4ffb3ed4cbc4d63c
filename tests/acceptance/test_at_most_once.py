"""Real relays at-most-once: what a kill loses, and what it must not."""

from __future__ import annotations

import psycopg
import pytest
from failing_relays import SMALL, add, dead, event, names, routes, url
from support import backlog, drained, end_leases, ends, logged, wait_until

from outbox._app import migrate as db
from outbox.testing.fixtures import RelayFactory, RelayProcess, Topics

__all__ = ["url"]

AT_MOST_ONCE = {"delivery": "at-most-once", "relay__batch_size": 5}


@pytest.mark.parametrize(
    ("point", "left", "acks"),
    [
        # In the second turn: read; deleted; sent.
        ("batch.fetched=kill@2", 15, 1),
        ("batch.settled=kill@2", 10, 1),
        ("batch.acknowledged=kill@2", 10, 0),
    ],
)
def test_at_most_once_a_kill_loses_at_most_a_batch_and_doubles_nothing(
    url, outbox_kafka, outbox_relay, point, left, acks
):
    settings = AT_MOST_ONCE | {"relay__at_most_once_acks": acks}
    topic = outbox_kafka.create_topic(outbox_kafka.name("once"))
    sent = [f"a{number:02}" for number in range(20)]
    add(url, *(event("Order", name) for name in sent))
    relay = outbox_relay(env=routes(Order=topic) | {"OUTBOX_FAILPOINTS": point}, **settings)
    assert relay.wait() == -9
    assert backlog(url) == left
    end_leases(url)
    outbox_relay(env=routes(Order=topic), **settings)
    drained(url)
    wait_until(lambda: names(outbox_kafka.consume(topic))[-1:] == sent[-1:], what="the last event")
    arrived = names(outbox_kafka.consume(topic))
    # In order, none twice, and only the second batch may be missing.
    assert arrived == sorted(set(arrived))
    assert set(sent) - set(arrived) <= set(sent[5:10] if left == 10 else [])


def test_at_most_once_what_a_relay_abandons_is_not_said_to_be_sent_again(url, outbox_kafka, outbox_relay):
    """It gets SIGTERM twice, between the DELETE and the sending."""
    topic = outbox_kafka.create_topic(outbox_kafka.name("once"))
    add(url, *(event("Order", f"a{number:02}") for number in range(20)))
    armed = routes(Order=topic) | {"OUTBOX_FAILPOINTS": "batch.settled=delay:300@2"}
    relay = outbox_relay(env=armed, log_format="json", **AT_MOST_ONCE)
    wait_until(lambda: backlog(url) == 10, what="the second turn")
    relay.terminate()
    relay.wait_for_log("relay stopping")
    relay.terminate()
    assert relay.wait() == 1
    [line] = logged(relay, "a turn in flight was abandoned")
    assert "may be lost" in line["event"]
    assert "sent again" not in line["event"]


def test_at_most_once_events_of_a_missing_topic_stay_until_it_is_there(url, outbox_kafka, outbox_relay):
    """Nothing of them is deleted, lost, or a dead letter; others go on."""
    good, missing = outbox_kafka.create_topic(outbox_kafka.name("good")), outbox_kafka.name("missing")
    sent = [f"{key}{number}" for number in range(4) for key in "abcde"]
    add(url, *(event(kind, name) for name in sent for kind in ("Good", "Missing")))
    relay = outbox_relay(env=routes(Good=good, Missing=missing), create_topics=False, **AT_MOST_ONCE)
    assert sorted(names(outbox_kafka.consume(good, 20))) == sorted(sent)
    relay.wait_for_log("topic can't be written to")
    assert (backlog(url), dead(url)) == (20, [])
    outbox_kafka.create_topic(missing)
    drained(url)
    assert sorted(names(outbox_kafka.consume(missing, 20))) == sorted(sent)
    assert "events may be lost" not in relay.log()
    assert relay.running


def test_at_most_once_what_comes_behind_a_refused_event_of_its_key_is_not_lost(url, outbox_kafka, outbox_relay):
    """All in one turn: without a route, and refused by the broker."""
    good = outbox_kafka.create_topic(outbox_kafka.name("good"))
    small = outbox_kafka.create_topic(outbox_kafka.name("small"), 1, SMALL)
    allowed = routes(Good=good, Small=small)
    large = event("Small", "a1", 30_000)
    kinds = {"Nowhere": ["n1", "n2", "n3"], "Good": ["g1", "g2"], "Small": ["a2", "a3"]}
    add(url, large, *(event(kind, name) for kind, sent in kinds.items() for name in sent))
    relay = outbox_relay(env=allowed, create_topics=False, **AT_MOST_ONCE | {"relay__batch_size": 100})
    drained(url)
    wait_until(lambda: {"n1", "n2", "n3", "a1"} <= set(dead(url)), what="what was refused")
    assert names(outbox_kafka.consume(good, 2)) == ["g1", "g2"]
    # The broker refuses a request as a whole: what was in it is a dead letter too.
    wait_until(
        lambda: {"a2", "a3"} <= set(dead(url)) | set(names(outbox_kafka.consume(small))), what="what came behind"
    )
    ends(relay)
    assert "events may be lost" not in relay.log()


def test_at_most_once_an_event_of_time_infinity_takes_no_other_dead_letter_with_it(url, outbox_relay):
    """They are kept together, when their rows are deleted already."""
    add(url, event("Nowhere", "a1"), event("Nowhere", "b1"))
    with psycopg.connect(url) as connection:
        connection.execute("UPDATE outbox.events SET created_at = 'infinity' WHERE event_type = 'a1'")
    relay = outbox_relay(env=routes(Good="good"), **AT_MOST_ONCE)
    wait_until(lambda: dead(url) == ["a1", "b1"], what="both dead letters")
    ends(relay)
    assert "events may be lost" not in relay.log()


class Asleep:
    """An outbox whose relay sleeps at a step of its second turn, and whose lane an heir takes meanwhile."""

    def __init__(self, url: str, kafka: Topics, start: RelayFactory, step: str) -> None:
        self._url, self._kafka, self._start = url, kafka, start
        self._topic = kafka.create_topic(kafka.name(step))
        self._sent = [f"a{number:02}" for number in range(20)]
        add(url, *(event("Order", name) for name in self._sent))
        self._sleeper = self._relay(f"{step}=pause@2")

    def sleeps(self) -> bool:
        return backlog(self._url) == 10

    def is_inherited(self) -> None:
        """Wait until the heir has sent what comes after the sleeper's turn, and wake the sleeper."""
        self._heir = self._relay()
        drained(self._url)
        assert names(self._kafka.consume(self._topic, 15))[-1:] == self._sent[-1:]
        self._sleeper.resume()

    def has_lost_a_turn(self) -> None:
        """Look at all that was sent, also behind whatever the sleeper has sent."""
        self._sleeper.wait_for_log("events may be lost")
        self._sleeper.wait_for_log("lane lost")
        assert self._heir.running
        # What the heir writes now comes after it.
        add(self._url, event("Order", "z1"))
        assert names(self._kafka.consume(self._topic, 16))[-1:] == ["z1"]
        arrived = names(self._kafka.consume(self._topic))
        assert arrived == sorted(set(arrived))
        assert set(self._sent) - set(arrived) == set(self._sent[5:10])

    def _relay(self, failpoints: str = "") -> RelayProcess:
        # Nothing is under way before the turn is flushed.
        settings = AT_MOST_ONCE | {"relay__lease_seconds": 6, "kafka__linger_ms": 2500}
        env = routes(Order=self._topic) | {"OUTBOX_FAILPOINTS": failpoints}
        return self._start(database_url=self._url, env=env, **settings)


def test_at_most_once_a_relay_that_slept_past_its_lease_sends_nothing_more(
    url, another_outbox, outbox_kafka, outbox_relay
):
    """Of one outbox, when its turn was deleted and not given to librdkafka; of another, when all of it was, which waits
    for more.
    """
    other = another_outbox()
    db.change_lanes(other, 1)
    places = {"batch.settled": url, "batch.sent": other}
    outboxes = [Asleep(place, outbox_kafka, outbox_relay, step) for step, place in places.items()]
    for one in outboxes:
        wait_until(one.sleeps, what="the second turn")
    for one in outboxes:
        one.is_inherited()
    for one in outboxes:
        one.has_lost_a_turn()
