"""Each delivery through a network that loses, delays and doubles what matters most: EndTxn and Produce."""

from __future__ import annotations

import datetime as dt
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import psutil
import pytest
from confluent_kafka import Message
from kafka_proxy import (
    CREATE_TOPICS,
    END_TXN,
    FETCH,
    PRODUCE,
    Action,
    KafkaProxy,
    after_request,
    delay_request,
    delay_response,
    drop_request,
    drop_response,
    duplicate_request,
    instead_of_response,
)
from support import (
    IMPATIENT,
    Crashes,
    Load,
    backlog,
    caught_up,
    check,
    check_at_most_once,
    drained,
    ends,
    look_up,
    owners,
    said_to_be_lost,
    wait_until,
    write,
)

from outbox import Event
from outbox.sandbox._process import patience
from outbox.testing.fixtures import Topics
from relay.core.ports import Unavailable
from relay.failpoints import VARIABLE
from relay.kafka import state_topic
from relay.kafka.state_topic import StateTopic
from relay.wal.lane_hash import lane_of

QUICK = {
    "relay__lease_seconds": 8.0,
    "relay__batch_size": 50,
    # Connections are cut on purpose here; neither client nor relay must take longer and longer to come back.
    "kafka__reconnect_backoff_max_ms": 200,
    "relay__max_backoff_seconds": 0.5,
}

LOST_LATE_OR_DOUBLED = [drop_response, drop_request, duplicate_request, delay_request(1.5)]
"""The client repeats what is late; of EndTxn, the first one comes when later transactions of the lane are open."""
RULES = {api: [(api, action) for action in LOST_LATE_OR_DOUBLED] for api in (END_TXN, PRODUCE)}


class Place:
    """An outbox whose relay reaches that broker through the proxy; its topics are read by the way past it."""

    def __init__(self, url: str, proxy: KafkaProxy, topics: Topics) -> None:
        self.url, self.proxy, self.topics = url, proxy, topics
        self.kind = topics.name("Order")
        self.topic = f"{self.kind.lower()}-events"
        self.settings = QUICK | {"bootstrap_servers": proxy.address, "name": topics.name("outbox")}

    def messages(self) -> list[Message]:
        return self.topics.consume(self.topic)

    def begins(self, load: Load) -> None:
        """Wait until the relay keeps up with a load."""
        load.more(100)
        caught_up(self.url)


@pytest.fixture
def place(request, outbox_postgres, mortal_network) -> Iterator[Place]:
    """With a topic of two partitions, or so many as a test says."""
    cluster, proxy = mortal_network
    with Topics(cluster.bootstrap_servers) as topics:
        made = Place(outbox_postgres.url, proxy, topics)
        topics.create_topic(made.topic, getattr(request, "param", 2))
        yield made


def break_requests(proxy: KafkaProxy, rules: Sequence[tuple[int, Action]]) -> None:
    """Do these things to requests, a few that are left alone between any two."""
    for api_key, action in rules:
        proxy.on(api_key, action)
        # Counted from here on: the first of them meets the rule, however many came before it was there.
        proxy.wait_seen(api_key, proxy.seen(api_key) + 3)
    proxy.wait_done()


@pytest.mark.parametrize(
    ("delivery", "rules"),
    [("exactly-once", RULES[END_TXN] + RULES[PRODUCE]), ("at-least-once", RULES[PRODUCE])],
    ids=["exactly-once", "at-least-once"],
)
def test_requests_that_are_lost_late_or_doubled(place, outbox_relay, delivery, rules):
    """At-least-once, brokers know what an idempotent producer repeats: as long as it lives, nothing is there twice."""
    before = len(place.proxy.fired)
    with Load(place.url, place.kind) as load:
        relay = outbox_relay(**place.settings | {"delivery": delivery, "relay__lease_seconds": 30})
        place.begins(load)
        break_requests(place.proxy, rules)
        load.drain(90)
        assert relay.running
    assert len(place.proxy.fired) == before + len(rules)
    assert check(place.url, place.messages()) == 0
    assert delivery == "exactly-once" or "waiting for a server" not in relay.log()
    ends(relay)


def test_the_broker_is_killed_while_a_commit_is_under_way(place, mortal_network, outbox_relay):
    """EndTxn is on its way; has been answered. The relay can't know which, and the markers tell."""
    url, (cluster, proxy) = place.url, mortal_network
    settings = place.settings | {"delivery": "exactly-once", "relay__lease_seconds": 20}
    settings["kafka__delivery_timeout_ms"] = 4000
    moments = [after_request, instead_of_response]
    before = len(proxy.fired)
    with Load(url, place.kind) as load:
        relay = outbox_relay(**settings)
        for moment in moments:
            place.begins(load)
            load.more(100)
            caught_up(url)
            killed = threading.Event()

            def kill(killed: threading.Event = killed) -> None:
                cluster.kill_broker(0)
                killed.set()

            renewed = relay.log().count("publishing again")
            proxy.on(END_TXN, moment(kill))
            assert killed.wait(60 * patience()), moment.__name__
            cluster.start_broker(0)
            wait_until(
                lambda renewed=renewed: relay.log().count("publishing again") > renewed, 60, "the relay to go on"
            )
        load.drain(90)
        assert relay.running
        assert [fired.action.name for fired in proxy.fired[before:]] == [moment.__name__ for moment in moments]
        assert check(url, place.messages()) == 0
        # While its way to the broker is open: the relay ends its transactions before it stops.
        ends(relay)


def test_at_most_once_requests_and_answers_that_are_lost(place, outbox_relay):
    """Nothing is sent again. What may be lost is what the log counts."""
    settings = {"delivery": "at-most-once", "relay__lease_seconds": 30, "log_format": "json"}
    rules = [(PRODUCE, drop_response), (PRODUCE, drop_request), (PRODUCE, delay_request(1.5))]
    with Load(place.url, place.kind) as load:
        relay = outbox_relay(**place.settings | settings)
        place.begins(load)
        for rule in 2 * rules:
            lost = said_to_be_lost(relay)
            break_requests(place.proxy, [rule])
            wait_until(lambda lost=lost: said_to_be_lost(relay) > lost, what="the loss to be counted")
        load.drain(90)
        assert relay.running
    ends(relay)
    assert 0 < check_at_most_once(place.url, place.messages()) <= said_to_be_lost(relay)


def test_a_controller_that_does_not_answer_is_asked_anew_in_seconds(place, monkeypatch):
    """Kafka's client alone would wait a minute for it, with all lanes of the relay behind."""
    proxy = place.proxy
    monkeypatch.setattr(state_topic, "_READ_SECONDS", 2.0)
    state = StateTopic({"bootstrap.servers": proxy.address}, place.topics.name("outbox.relay.state"))
    proxy.on(CREATE_TOPICS, delay_response())
    fired = len(proxy.fired)
    # Again where the broker is too slow even to say which topics there are.
    while len(proxy.fired) == fired:
        asked_at = time.monotonic()
        with pytest.raises(Unavailable, match="preparing the state topic"):
            state.require(2)
        assert time.monotonic() - asked_at < 50
    proxy.release()
    monkeypatch.undo()
    state.require(2)
    assert state.last_markers([0])[0] is None


def test_an_outage_longer_than_lease_delivery_and_transaction(place, outbox_relay):
    """The network swallows everything. The coordinator ends the transaction by itself; the relay keeps its lanes."""
    url, proxy = place.url, place.proxy
    settings = place.settings | {"delivery": "exactly-once", "relay__lease_seconds": 4.0}
    settings |= {"kafka__delivery_timeout_ms": 1000, "kafka__transaction_timeout_ms": 1000}
    lease = dt.timedelta(seconds=settings["relay__lease_seconds"])
    leases = "SELECT min(lease_until) FROM outbox.lanes"
    with Load(url, place.kind) as load:
        relay = outbox_relay(**settings)
        place.begins(load)
        said = relay.log().count("waiting for a server")
        proxy.blackhole()
        [(began,)] = look_up(url, "SELECT clock_timestamp()")
        wait_until(lambda: relay.log().count("waiting for a server") > said, what="the relay to notice")
        # Prolonged when it had been dark for longer than a lease.
        wait_until(lambda: look_up(url, leases)[0][0] > began + 2 * lease, 60, "leases to be prolonged")
        # By the way past the proxy: nothing of it is open any more.
        place.topics.await_transactions(place.topic)
        assert "lane lost" not in relay.log()
        assert backlog(url) > 0
        said = relay.log().count("publishing again")
        proxy.heal()
        wait_until(lambda: relay.log().count("publishing again") > said, 90, "the relay to go on")
        load.drain(90)
    assert check(url, place.messages()) == 0
    ends(relay)


@pytest.mark.parametrize("place", [1], indirect=True)
def test_a_batch_that_is_always_late_is_halved_until_it_is_not(place, outbox_relay):
    """Exactly-once, over a way to the broker on which the whole batch takes twice the time there is for it."""
    url, proxy = place.url, place.proxy
    # Each lane has more than a batch, and less than makes a relay try larger ones again.
    lanes, each, batch, of_a_request, request_seconds, deadline = 4, 25, 20, 5, 0.1, 0.8
    settings = place.settings | {"delivery": "exactly-once", "relay__batch_size": batch}
    settings |= {"kafka__batch_num_messages": of_a_request, "kafka__delivery_timeout_ms": int(deadline * 1000)}
    # A turn is a batch of each of the four lanes, and the answers come one after the other.
    assert lanes * batch / of_a_request * request_seconds >= 2 * deadline
    by_lane: list[list[str]] = [[] for _ in range(lanes)]
    for key in (f"k{n}" for n in range(1_000)):
        by_lane[lane_of(place.kind, key, lanes)].append(key)
    keys = [key for own in by_lane for key in own[:each]]
    write(url, [Event(place.kind, key, "T", {}) for key in keys])
    assert look_up(url, "SELECT count(*) FROM outbox.events GROUP BY lane") == [(each,)] * lanes
    proxy.on(PRODUCE, delay_response(request_seconds), times=1_000_000)
    relay = outbox_relay(**settings)
    drained(url, 90)
    # The whole one, and half of it.
    assert relay.log().count("no acknowledgement within") >= 2
    relay.terminate()
    relay.wait()
    proxy.clear()
    assert Counter(message.key().decode() for message in place.messages()) == Counter(keys)


def test_a_state_topic_that_can_not_be_read_is_waited_for(place, outbox_relay):
    """A batch is committed and not settled: to publish without its marker would double it."""
    url, proxy = place.url, place.proxy
    settings = place.settings | {"delivery": "exactly-once", "relay__lease_seconds": 1.0}
    with Load(url, place.kind) as load:
        relay = outbox_relay(env={VARIABLE: "txn.committed=kill@8"}, **settings)
        assert relay.wait(40) == -signal.SIGKILL
        load.more(100)
    left, there = backlog(url), len(place.messages())
    # No answer to a Fetch: the only client that fetches is the relay's reader of the state topic.
    proxy.on(FETCH, drop_response, times=1_000_000)
    relay = outbox_relay(program=IMPATIENT, **settings)
    relay.wait_for_log("could not be read to the end", 60)
    assert (backlog(url), len(place.messages())) == (left, there)
    assert "lane stopped" not in relay.log()
    proxy.clear()
    load.drain(90)
    assert check(url, place.messages()) == 0
    ends(relay)


def test_a_second_signal_leaves_what_is_in_flight_to_the_next_relay(place, outbox_relay):
    """The first one waits for the acknowledgements, which do not come."""
    url, proxy = place.url, place.proxy
    # Neither the batch's time nor the time to stop is over before the test is.
    settings = place.settings | {"relay__lease_seconds": 900, "relay__instance": "a"}
    relay = outbox_relay(relay__shutdown_seconds=900, **settings)
    crashes = Crashes(url, place.kind, settings["relay__batch_size"])
    with Load(url, place.kind) as load:
        place.begins(load)
        fired = len(proxy.fired)
        proxy.on(PRODUCE, delay_response(), times=1_000_000)
        # A relay that has nothing in flight stops at the first signal.
        wait_until(lambda: len(proxy.fired) > fired, what="a turn to be in flight")
        wait_until(lambda: backlog(url) > 4 * 50, what="more behind it")
        os.kill(relay.pid, signal.SIGINT)
        relay.wait_for_log("relay stopping")
        assert relay.running
        os.kill(relay.pid, signal.SIGTERM)
        assert relay.wait() == 1
        assert "a turn in flight was abandoned" in relay.log()
        proxy.clear()
        # Its leases have a quarter of an hour left. Under its name, the next one sees that its session has ended.
        assert look_up(url, "SELECT count(*) FROM outbox.lanes WHERE owner IS NOT NULL") == [(4,)]
        crashes.note_only(range(4))
        outbox_relay(**settings)
        load.drain(90)
    messages = place.messages()
    assert check(url, messages) == sum(crashes.repeats(messages))


def test_only_a_second_signal_to_their_parent_makes_workers_leave_what_is_in_flight(place, outbox_relay):
    """systemd signals all processes of a unit, and the parent passes its signal on: two workers end so, and the next
    two by a second signal.
    """
    url, proxy = place.url, place.proxy
    # Under their names, the next ones see that their sessions have ended.
    settings = place.settings | {"relay__lease_seconds": 900, "relay__shutdown_seconds": 900, "relay__instance": "a"}
    crashes = Crashes(url, place.kind, settings["relay__batch_size"])
    with Load(url, place.kind) as load:
        for again in (False, True):
            relay = outbox_relay("--workers", "2", **settings)
            wait_until(lambda: len(owners(url)) == 2, what="both workers to hold lanes")
            place.begins(load)
            fired = len(proxy.fired)
            proxy.on(PRODUCE, delay_response(), times=1_000_000)
            wait_until(lambda fired=fired: len(proxy.fired) > fired, what="a turn to be in flight")
            for process in psutil.Process(relay.pid).children():
                process.send_signal(signal.SIGTERM)
            wait_until(lambda relay=relay: relay.log().count("relay stopping") == 2, 60, "both workers to stop")
            relay.terminate()
            # Signals that come together are one.
            time.sleep(1.0)
            assert relay.running
            if again:
                relay.terminate()
            else:
                proxy.clear()
                proxy.release()
            assert relay.wait() == again
            assert ("a turn in flight was abandoned" in relay.log()) == again
            # Lanes are let go of when all is settled.
            assert (owners(url) == {}) == (not again)
            proxy.clear()
        # Before it, nothing is sent twice.
        crashes.note_only(range(4))
        relay = outbox_relay("--workers", "2", **settings)
        load.drain(90)
        ends(relay)
        assert owners(url) == {}
    messages = place.messages()
    assert check(url, messages) == sum(crashes.repeats(messages))
