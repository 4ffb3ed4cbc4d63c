"""A relay that is killed: others take its lanes when its session in Postgres has ended, long before its leases do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest
from pgbouncer import PgBouncer
from support import Load, check, check_at_most_once, end_leases, look_up, owners, wait_until

from outbox._app import migrate as db
from relay.database import Connector
from relay.lanes import LaneTable, lock_session

LEASE = 300.0
"""Longer than any test waits: lanes that change hands do so because a session has ended."""
BATCH = 20
SESSIONS = "SELECT session FROM outbox.relays ORDER BY instance"


def end_sessions(url: str, instance: str) -> None:
    """End all sessions of a relay."""
    look_up(
        url,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s",
        f"outbox relay {instance}",
    )


@pytest.fixture
def observer() -> Iterator[Callable[[str], LaneTable]]:
    """Opens a relay's session that only looks at the lanes."""
    with ExitStack() as stack:

        def open_session(url: str) -> LaneTable:
            connection = stack.enter_context(closing(Connector(url, "observer")()))
            return LaneTable(connection, "outbox", "observer", "0", LEASE, session=lock_session(connection))

        yield open_session


def never_free(looks: LaneTable, before: int = 0) -> bool:
    """Look at the lanes more often than it takes to see that a session has ended. Return whether none became free."""
    return [looks.distribution().free for _ in range(3)] == [before] * 3


@pytest.mark.parametrize(("delivery", "lanes"), [("at-least-once", 256), ("exactly-once", 4)])
def test_the_lanes_of_a_killed_relay_are_published_before_its_leases_end(
    outbox_postgres, outbox_kafka, outbox_relay, order, delivery, lanes
):
    url, (kind, topic) = outbox_postgres.url, order
    db.change_lanes(url, lanes)
    settings = {"delivery": delivery, "name": outbox_kafka.name("outbox")}
    settings |= {"relay__lease_seconds": LEASE, "relay__batch_size": BATCH}
    with Load(url, kind) as load:
        killed = outbox_relay(relay__instance="killed", **settings)
        wait_until(lambda: owners(url) == {"killed": lanes}, what="one relay with all lanes")
        # It has seen the other one alive when it gets lanes of it.
        other = outbox_relay(relay__instance="other", **settings)
        wait_until(lambda: owners(url) == {"killed": lanes // 2, "other": lanes // 2}, what="two relays with lanes")
        load.more(100)
        killed.kill()
        wait_until(lambda: owners(url) == {"other": lanes}, what="the lanes of the killed relay to be taken")
        load.more(100)
        load.drain()
    assert "lane lost" not in other.log()
    repeats = check(url, outbox_kafka.consume(topic))
    assert repeats <= (0 if delivery == "exactly-once" else lanes // 2 * BATCH)


def test_a_killed_relay_that_comes_back_under_its_name_takes_its_lanes(
    outbox_postgres, outbox_kafka, outbox_relay, order
):
    """As a container that restarts in its pod: its first beat replaces the session that others have to miss."""
    url, (kind, topic) = outbox_postgres.url, order
    settings = {"delivery": "exactly-once", "name": outbox_kafka.name("outbox"), "relay__instance": "relay"}
    settings |= {"relay__lease_seconds": LEASE, "relay__batch_size": BATCH}
    sessions = "SELECT FROM pg_stat_activity WHERE application_name = 'outbox relay relay'"
    with Load(url, kind) as load:
        killed = outbox_relay(**settings)
        load.more(100)
        killed.kill()
        wait_until(lambda: not look_up(url, sessions), what="its sessions to end")
        again = outbox_relay(**settings)
        again.wait_for_log("lanes of a former process of this name are free")
        load.more(100)
        load.drain()
    assert look_up(url, "SELECT DISTINCT owner, epoch FROM outbox.lanes") == [("relay", 2)]
    assert check(url, outbox_kafka.consume(topic)) == 0


def test_a_relay_keeps_its_lanes_when_its_connections_break_or_it_is_halted(
    outbox_postgres, outbox_kafka, outbox_relay, observer
):
    url = outbox_postgres.url
    relay = outbox_relay(relay__instance="relay", relay__lease_seconds=LEASE)
    wait_until(lambda: owners(url) == {"relay": 4}, what="the relay to have all lanes")
    looks = observer(url)
    looks.distribution()
    before = look_up(url, SESSIONS)
    end_sessions(url, "relay")
    looks.distribution()
    wait_until(lambda: look_up(url, SESSIONS) != before, what="another session of the relay")
    assert never_free(looks), "broken connections"
    assert look_up(url, "SELECT DISTINCT owner, epoch FROM outbox.lanes") == [("relay", 1)]
    assert relay.running
    relay.pause()
    assert never_free(looks), "halted"
    relay.kill()
    # The difference is its session.
    wait_until(lambda: looks.distribution().free == 4, what="the lanes to be free")


def test_a_relay_whose_lanes_were_taken_while_it_lives_lets_go_of_them(
    outbox_postgres, outbox_kafka, outbox_relay, order
):
    """It is halted, and its sessions end, as when a firewall forgets them. Kafka refuses what it sends on waking.

    At-least-once, what both send are repeats: test_relays.py.
    """
    url, (kind, topic) = outbox_postgres.url, order
    settings = {"delivery": "exactly-once", "name": outbox_kafka.name("outbox")}
    settings |= {"relay__lease_seconds": LEASE, "relay__batch_size": BATCH}
    with Load(url, kind) as load:
        halted = outbox_relay(relay__instance="halted", **settings)
        wait_until(lambda: owners(url) == {"halted": 4}, what="one relay with all lanes")
        outbox_relay(relay__instance="other", **settings)
        wait_until(lambda: owners(url) == {"halted": 2, "other": 2}, what="two relays with lanes")
        load.more(100)
        halted.pause()
        end_sessions(url, "halted")
        wait_until(lambda: owners(url) == {"other": 4}, what="the lanes of the halted relay to be taken")
        load.more(100)
        halted.resume()
        halted.wait_for_log("lane lost")
        wait_until(lambda: owners(url) == {"halted": 2, "other": 2}, what="both with two lanes")
        load.drain()
        assert halted.running
    assert check(url, outbox_kafka.consume(topic)) == 0


def test_relays_keep_their_lanes_when_postgres_crashes(private_postgres, outbox_kafka, outbox_relay, observer):
    """The first to come back sees none of the others' sessions."""
    server = private_postgres()
    url = private_postgres.database(server).url
    lanes = "SELECT lane, owner, epoch FROM outbox.lanes ORDER BY lane"
    settings = {"database_url": url, "relay__lease_seconds": LEASE}
    first, second = (outbox_relay(relay__instance=name, **settings) for name in ("first", "second"))
    wait_until(lambda: owners(url) == {"first": 2, "second": 2}, what="two relays with lanes")
    before, shared = set(look_up(url, SESSIONS)), look_up(url, lanes)
    # It comes back later than the other one has looked often enough.
    first.pause()
    server.kill()
    server.start()
    second.wait_for_log("Postgres is back")
    assert never_free(observer(url))
    first.resume()
    first.wait_for_log("Postgres is back")
    wait_until(lambda: not before & set(look_up(url, SESSIONS)), what="another session of each relay")
    assert look_up(url, lanes) == shared


def test_behind_a_pooler_the_leases_decide(outbox_postgres, outbox_kafka, outbox_relay, observer):
    url = outbox_postgres.url
    looks = observer(url)
    with PgBouncer(url, size=4) as pooler:
        relay = outbox_relay(relay__instance="pooled", relay__lease_seconds=LEASE, database_url=pooler.url)
        wait_until(lambda: owners(url) == {"pooled": 4}, what="the relay to have all lanes")
        assert look_up(url, SESSIONS) == [(None,)]
        looks.distribution()
        relay.kill()
        assert never_free(looks)
        # One that is pooled looks for no sessions.
        other = outbox_relay(relay__instance="other", relay__lease_seconds=LEASE, database_url=pooler.url)
        wait_until(lambda: look_up(url, SESSIONS) == [(None,)] * 2, what="the other relay")
        assert owners(url) == {"pooled": 4}
        assert other.running


def test_with_at_most_once_the_leases_decide(outbox_postgres, outbox_kafka, outbox_relay, order, observer):
    """What a relay has taken from the table it may still send: not after the next one has sent what follows."""
    url, (kind, topic) = outbox_postgres.url, order
    looks = observer(url)
    settings = {"delivery": "at-most-once", "relay__lease_seconds": LEASE}
    with Load(url, kind) as load:
        relay = outbox_relay(relay__instance="killed", **settings)
        wait_until(lambda: owners(url) == {"killed": 4}, what="the relay to have all lanes")
        load.more(50)
        assert look_up(url, SESSIONS) == [(None,)]
        looks.distribution()
        relay.kill()
        assert never_free(looks)
        end_leases(url)
        outbox_relay(relay__instance="other", **settings)
        load.drain()
    check_at_most_once(url, outbox_kafka.consume(topic))
