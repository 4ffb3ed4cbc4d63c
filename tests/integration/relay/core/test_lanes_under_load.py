"""The number of lanes changes while services write: nothing is lost, nothing is out of order by key."""

from __future__ import annotations

import itertools
import os
import signal
from functools import partial

import psycopg
import pytest
from rows_and_roles import outbox
from spans import relay
from support import Load, await_stops, backlog, check, drained, ends, look_up, numbers_by_key, wait_until, write

from outbox import Event, SchemaError
from outbox._app import migrate as db
from relay.failpoints import VARIABLE
from relay.operations.dead_letters import DeadLetters, Selection
from relay.wal.lane_hash import lane_of


def published(url: str) -> None:
    """Wait until all events that are there now are published."""
    [(last,)] = look_up(url, "SELECT max(id) FROM outbox.events")
    settled = "SELECT count(*) = 0 FROM outbox.events WHERE id <= %s"
    wait_until(lambda: look_up(url, settled, last) == [(True,)], 60, "relays that publish")


def taken(url: str) -> None:
    """Wait until a relay has all lanes."""
    held = "SELECT bool_and(lease_until > clock_timestamp()) FROM outbox.lanes"
    wait_until(lambda: look_up(url, held) == [(True,)], what="the lanes to be taken")


def test_relays_stop_and_writers_do_not(outbox_postgres, outbox_kafka, outbox_relay):
    """To fewer lanes; to more: test_not_while_it_is_unknown_what_is_on_kafka and test_a_blocked_key_goes_along."""
    url, kind = outbox_postgres.url, outbox_kafka.name("Order")
    topic = outbox_kafka.create_topic(f"{kind.lower()}-events", 2)
    settings = {"delivery": "exactly-once", "name": outbox_kafka.name("outbox"), "relay__batch_size": 50}
    db.change_lanes(url, 7)
    with Load(url, kind) as load:
        relays = [outbox_relay(**settings) for _ in range(2)]
        load.more(300)
        published(url)
        for each in relays:
            ends(each)
        load.more(200)
        assert backlog(url) > 0
        db.change_lanes(url, 2)
        load.more(100)
        outbox_relay(**settings)
        load.drain()
    assert look_up(url, "SELECT count(*) FROM outbox.lanes") == [(2,)]
    assert check(url, outbox_kafka.consume(topic)) == 0


def test_not_while_it_is_unknown_what_is_on_kafka(outbox_postgres, outbox_kafka, outbox_relay):
    url, kind = outbox_postgres.url, outbox_kafka.name("Order")
    topic = outbox_kafka.create_topic(f"{kind.lower()}-events", 2)
    settings = {"delivery": "exactly-once", "name": outbox_kafka.name("outbox"), "relay__lease_seconds": 1}
    with Load(url, kind) as load:
        victim = outbox_relay(env={VARIABLE: "txn.committed=kill@3"}, **settings)
        assert victim.wait(60) == -signal.SIGKILL
        free = "SELECT count(*) FROM outbox.lanes WHERE lease_until < clock_timestamp()"
        wait_until(lambda: look_up(url, free) == [(4,)], what="the leases to end")
        with pytest.raises(SchemaError, match="it is not known which events are on Kafka"):
            db.change_lanes(url, 7)
        heir = outbox_relay(**settings)
        load.more(100)
        # It has settled what the markers name: one that ends before it took the lanes over leaves that to the next.
        published(url)
        ends(heir)
        db.change_lanes(url, 7)
        outbox_relay(**settings)
        load.drain()
    assert check(url, outbox_kafka.consume(topic)) == 0


SAVED = "id, event_id, aggregate_type, aggregate_id, event_type, payload"


def save(url: str) -> None:
    """Keep the events and the lanes' batches as they are, for ``lose_commits``."""
    with psycopg.connect(url) as connection:
        connection.execute("DROP TABLE IF EXISTS saved, saved_lanes")
        connection.execute(f"CREATE TABLE saved AS SELECT {SAVED} FROM outbox.events")
        connection.execute("CREATE TABLE saved_lanes AS SELECT lane, last_batch FROM outbox.lanes")


def lose_commits(url: str) -> None:
    """Undo what relays have settled since, as a restore does."""
    with psycopg.connect(url) as connection:
        connection.execute(f"INSERT INTO outbox.events ({SAVED}) OVERRIDING SYSTEM VALUE SELECT {SAVED} FROM saved")
        connection.execute(
            "UPDATE outbox.lanes AS l SET last_batch = s.last_batch FROM saved_lanes AS s WHERE s.lane = l.lane"
        )


def test_not_after_a_restore_that_has_lost_commits(outbox_postgres, outbox_kafka):
    """All of a lane's events are in other lanes then, where no marker names them. One batch a relay settles itself."""
    url, kind, name = outbox_postgres.url, outbox_kafka.name("Order"), outbox_kafka.name("outbox")
    topic = outbox_kafka.create_topic(f"{kind.lower()}-events", 2)
    command = partial(outbox, url, kafka__bootstrap_servers=outbox_kafka.bootstrap_servers, name=name)

    def publish(batch: int) -> None:
        with relay(outbox_postgres, outbox_kafka, delivery="exactly-once", name=name, relay__batch_size=batch):
            taken(url)
            drained(url)

    def add(n: int) -> None:
        write(url, [Event(kind, f"k{key}", "T", {"n": n}) for key in range(100)])

    def lost(batch: int, way_out: str) -> None:
        """Publish what is there in batches of this size, and lose it."""
        save(url)
        publish(batch)
        lose_commits(url)
        assert way_out in command("db", "lanes", "7", status=1)
        assert look_up(url, "SELECT count(*) FROM outbox.lanes") == [(4,)]

    add(0)
    publish(500)
    add(1)
    lost(500, "start a relay, wait until")
    publish(5)
    add(2)
    lost(5, "`outbox relay reconcile --apply`")
    command("relay", "reconcile", "--apply", "--reason", "restored")
    publish(5)
    for lanes in ("7", "5"):
        command("db", "lanes", lanes)
    publish(5)
    seen, repeats = numbers_by_key(outbox_kafka.consume(topic), "n")
    assert (seen, repeats) == ({f"k{n}": [0, 1, 2] for n in range(100)}, 0)


def test_not_on_after_postgres_went_back_to_when_their_number_had_changed(outbox_postgres, outbox_kafka, outbox_relay):
    """Of seven lanes two are as before, two had their numbers once, three are new: each has published since."""
    url, kind, name = outbox_postgres.url, outbox_kafka.name("Order"), outbox_kafka.name("outbox")
    topic = outbox_kafka.create_topic(f"{kind.lower()}-events", 2)
    settings = {"delivery": "exactly-once", "name": name, "relay__batch_size": 2, "log_format": "json"}
    command = partial(outbox, url, kafka__bootstrap_servers=outbox_kafka.bootstrap_servers, name=name)

    def publish() -> None:
        with relay(outbox_postgres, outbox_kafka, **settings):
            taken(url)
            drained(url)

    # As many of each lane: where the keys of a type fall is chance.
    keys = [
        key
        for lane in range(7)
        for key in itertools.islice((k for k in map(str, range(1000)) if lane_of(kind, k, 7) == lane), 8)
    ]
    for n, lanes in enumerate(("4", "2", "7")):
        command("db", "lanes", lanes)
        write(url, [Event(kind, key, "T", {"n": n}) for key in keys])
        if lanes != "7":
            publish()
    save(url)
    publish()
    lose_commits(url)
    stopped = outbox_relay(**settings)
    await_stops(stopped, 7)
    ends(stopped)
    command("relay", "reconcile", "--apply", "--reason", "restored")
    publish()
    seen, repeats = numbers_by_key(outbox_kafka.consume(topic), "n")
    assert (seen, repeats) == ({key: [0, 1, 2] for key in keys}, 0)


def test_a_blocked_key_goes_along(outbox_postgres, outbox_kafka, outbox_relay):
    url, kind = outbox_postgres.url, outbox_kafka.name("Order")
    topic = outbox_kafka.create_topic(f"{kind.lower()}-events", 2, {"max.message.bytes": "20000"})
    former = outbox_relay(failures__max_attempts=1)
    keys = [f"k{number}" for number in range(20)]
    write(url, [Event(kind, key, "T", os.urandom(60_000)) for key in keys])
    write(url, [Event(kind, key, "T", {"n": n}) for n in range(5) for key in keys])
    wait_until(lambda: look_up(url, "SELECT count(*) FROM outbox.dead_letters") == [(20,)], 60, "the dead letters")
    ends(former)
    assert backlog(url) == 100
    db.change_lanes(url, 7)
    outbox_relay(failures__max_attempts=1)
    write(url, [Event(kind, "another", "T", {"n": 0})])
    with psycopg.connect(url, autocommit=True) as connection:
        wait_until(lambda: backlog(url) == 100, 60, "an event of another key")
        DeadLetters(connection, "outbox").discard(Selection(), "a test")
    drained(url)
    seen, repeats = numbers_by_key(outbox_kafka.consume(topic), "n")
    assert (seen, repeats) == ({"another": [0], **{key: list(range(5)) for key in keys}}, 0)
