"""Pauses and drains on real relay processes under load, judged by a reader and by the business rows."""

from __future__ import annotations

import contextlib

import psycopg
import pytest
from pause_support import WAYS, Draining, Published, TwoKinds, obeyed, pause, read, resume, scope_named
from shown import Shown
from support import backlog, check, ends, look_up, owners, wait_until
from wal_support import held_by, run_outbox, set_up, status, streaming, switch, to_wal

from outbox import Event, Outbox
from outbox.sandbox._ports import free_ports
from relay.core.pauses import ALL, scopes_of

LANE = scopes_of([1], [])[0]


class Place:
    """An outbox with two topics, and the settings of a relay that publishes it in one of the ways."""

    def __init__(self, way, database, kafka, wal):
        self.url, self.way, self.kafka = database.url, way, kafka
        self.kinds = (kafka.name("Order"), kafka.name("Bill"))
        self.topics = [kafka.create_topic(f"{kind.lower()}-events", 2) for kind in self.kinds]
        delivery = "exactly-once" if "exactly" in way else "at-least-once"
        self.wal = "WAL" in way
        self.settings = wal | {"delivery": delivery, "relay__lease_seconds": 20}
        if self.wal:
            to_wal(self.url, wal)
        else:
            self.settings |= {"source": "polling"}

    def load(self, **options):
        return TwoKinds(self.url, self.kinds, **options)

    def published(self, load):
        return Published(self.kafka, load, self.topics)

    def confirmed(self):
        return status(self.url, self.settings).slot.confirmed_lsn if self.wal else 0

    def written(self):
        return look_up(self.url, "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint")[0][0]


@pytest.fixture
def polled(outbox_postgres, outbox_kafka, wal):
    return Place(WAYS[0], outbox_postgres, outbox_kafka, wal)


@pytest.mark.parametrize(("way", "which"), [(WAYS[0], "lane"), (WAYS[2], "topic")])
def test_what_is_paused_waits_and_the_rest_goes_on(outbox_postgres, outbox_kafka, outbox_relay, wal, way, which):
    """And when it is resumed, each event is published once and in order. All lanes at once: the 256 below."""
    place = Place(way, outbox_postgres, outbox_kafka, wal)
    url, scope = place.url, scope_named(which, place.topics)
    with place.load() as load:
        outbox_relay(**place.settings)
        published = place.published(load)
        wait_until(lambda: published.of(scope) > 20, what="some load")
        pause(url, scope)
        before, besides, written = published.of(scope), published.besides(scope), place.written()
        load.more(150)
        wait_until(lambda: published.besides(scope) > besides + 30, what="the others to go on")
        if place.wal:
            # What waits does not keep the WAL.
            wait_until(lambda: place.confirmed() > written, what="the slot to advance")
        assert published.of(scope) == before
        assert backlog(url) > 0
        assert look_up(url, "SELECT count(*) FROM outbox.failures") == [(0,)]
        assert sum(owners(url).values()) == 4
        resume(url, scope)
        assert check(url, published.all_of(load)) == 0
    if place.wal:
        wait_until(lambda: streaming(url), what="the lanes to stream again")


@pytest.mark.parametrize(("way", "lease"), [(WAYS[0], 12), (WAYS[1], 5)])
def test_a_pause_outlives_switches_of_the_source_which_repeat_nothing(
    outbox_postgres, outbox_kafka, outbox_relay, wal, way, lease
):
    """From the table to the WAL and back: the relays of the other source obey from their first turn on.

    Both relays run beside each other under load, and nobody is killed: no event may stand there twice. Exactly-once,
    the marker of a paused lane stands still while those of the others change their source.
    """
    place = Place(way, outbox_postgres, outbox_kafka, wal)
    url = place.url
    # Relays see a switch when a third of the lease is over. No machine is so slow to pass the longer lease; who is
    # slower than the shorter one repeats nothing, exactly-once.
    settings = place.settings | {"relay__lease_seconds": lease}
    streams = "SELECT bool_and(streaming) FROM outbox.lanes WHERE lane <> 1"
    with place.load() as load:
        published = place.published(load)
        relays = [
            outbox_relay(relay__instance="polls", **settings),
            outbox_relay(relay__instance="reads", **settings | {"source": "wal"}),
        ]
        relays[1].wait_for_log("this relay waits")
        wait_until(lambda: published.of(LANE) > 20, what="some load")
        pause(url, LANE)
        before = published.of(LANE)
        set_up(url, wal)
        for source, instance in (("wal", "reads"), ("polling", "polls")):
            switch(url, wal, source)
            wait_until(lambda source=source, who=instance: held_by(url, source, who), 30, "the lanes to change hands")
            if source == "wal":
                wait_until(lambda: look_up(url, streams) == [(True,)], 30, "the others to stream")
            besides = published.besides(LANE)
            wait_until(lambda n=besides: published.besides(LANE) > n + 60, 60, "the others to go on")
            assert published.of(LANE) == before
        resume(url, LANE)
        assert check(url, published.all_of(load)) == 0
    for relay in relays:
        ends(relay)


def test_a_drain_publishes_what_was_written_and_then_pauses(outbox_postgres, outbox_kafka, outbox_relay, wal):
    """The event of a transaction that was open when the drain began, too."""
    place = Place(WAYS[2], outbox_postgres, outbox_kafka, wal)
    url, scope = place.url, scope_named("topic", place.topics)
    outbox = Outbox()
    with place.load() as load, psycopg.connect(url) as old, contextlib.ExitStack() as stack:
        outbox_relay(**place.settings)
        published = place.published(load)
        wait_until(lambda: published.of(scope) > 20, what="some load")
        # A key of the scope: lane 1 of the first topic.
        key = next(f"k9-{n}" for n in range(0, 100, 2) if published.lane(f"k9-{n}") == 1)
        old.execute("INSERT INTO business VALUES (%s, 1)", (key,))
        draining = stack.enter_context(Draining(url, scope))
        load.more(100)
        (left,) = draining.look().values()
        assert not left.drained
        assert any("a transaction from before the drain is open" in cause for cause in left.causes)
        # It writes its event only now.
        outbox.add(old, Event(place.kinds[0], key, "Counted", {"seq": 1}))
        old.commit()
        wait_until(draining.drained, 60, "the drain")
        draining.pause()
        obeyed(url, [scope])
        before = published.messages()
        assert key in {message.key().decode() for message in before}
        count = published.of(scope)
        assert count > 0
        load.more(100)
        assert published.of(scope) == count
        resume(url, scope)
        assert check(url, published.all_of(load)) == 0


def test_at_most_once_loses_nothing_to_a_pause(polled, outbox_relay):
    """Its rows are deleted before they are sent: what is paused must not be among them. A pause outlives its relay."""
    url = polled.url
    topic = scopes_of([], [polled.topics[0]])[0]
    with polled.load() as load:
        settings = polled.settings | {"delivery": "at-most-once"}
        relay = outbox_relay(**settings)
        published = polled.published(load)
        wait_until(lambda: published.of(topic) > 20, what="some load")
        for scope in (topic, LANE):
            pause(url, scope)
            before, besides = published.of(scope), published.besides(scope)
            # A relay that has never sent anything does not know yet which types lead to the topic.
            ends(relay)
            relay = outbox_relay(**settings)
            load.more(100)
            wait_until(lambda scope=scope, n=besides: published.besides(scope) > n, what="the others to go on")
            assert published.of(scope) == before
            resume(url, scope)
            wait_until(lambda scope=scope, before=before: published.of(scope) > before, what="it to go on")
        assert check(url, published.all_of(load)) == 0
    assert look_up(url, "SELECT count(*) FROM outbox.dead_letters") == [(0,)]


def test_with_256_lanes(outbox_postgres, outbox_kafka, outbox_relay, wal):
    """Every other one is paused by itself, then all of them are."""
    from outbox._app import migrate as db

    db.change_lanes(outbox_postgres.url, 256)
    place = Place(WAYS[0], outbox_postgres, outbox_kafka, wal)
    url, odd = place.url, range(1, 256, 2)
    scopes = scopes_of(odd, [])
    with place.load(keys=200) as load:
        for name in ("first", "second"):
            outbox_relay(relay__instance=name, **place.settings)
        published = Published(outbox_kafka, load, place.topics, 256)
        wait_until(lambda: len(published.messages()) > 50, what="some load")
        pause(url, *scopes)
        before, count = published.by_lane(odd), len(published.messages())
        load.more(200)
        wait_until(lambda: len(published.messages()) > count + 50, what="the others to go on")
        assert published.by_lane(odd) == before
        pause(url, ALL)
        count = len(published.messages())
        resume(url, *scopes)
        load.more(100)
        assert len(published.messages()) == count
        resume(url, ALL)
        assert check(url, published.all_of(load)) == 0


def test_a_paused_relay_is_ready_and_says_what_is_paused(polled, outbox_relay):
    url, shown = polled.url, Shown(free_ports(1)[0])
    topic = scopes_of([], [polled.topics[0]])[0]
    pause(url, topic, LANE, wait=False)
    relay = outbox_relay(**polled.settings | {"relay__metrics_address": shown.address})
    obeyed(url, [topic, LANE])
    shown.recovers()
    assert (shown.metric("lanes_paused"), shown.metric("topics_paused")) == (1, 1)
    pause(url, ALL)
    wait_until(lambda: shown.metric("lanes_paused") == 4, what="all lanes to be paused")
    assert shown.metric("topics_unusable") == 0
    shown.recovers()
    resume(url, ALL, topic, LANE)
    wait_until(lambda: (shown.metric("lanes_paused"), shown.metric("topics_paused")) == (0, 0), what="it to go on")
    assert '"error"' not in relay.log()


def test_a_relay_that_sleeps_has_not_confirmed(polled, outbox_relay):
    url = polled.url
    relay = outbox_relay(relay__instance="sleeper", **polled.settings)
    wait_until(lambda: owners(url) == {"sleeper": 4}, what="it to hold the lanes")
    relay.pause()
    done = run_outbox(url, polled.settings, "relay", "pause", "--timeout", "1")
    assert (done.returncode, "sleeper did not confirm" in done.stderr) == (1, True)
    relay.resume()
    done = run_outbox(url, polled.settings, "relay", "pause", "--reason", "again")
    assert (done.returncode, "Nothing was changed" in done.stdout) == (0, True)
    assert "every running relay has confirmed" in done.stdout
    assert read(url)[ALL].reason is None
