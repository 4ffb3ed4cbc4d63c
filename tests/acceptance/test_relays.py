"""Real relay processes under load, joined, stopped and killed; held against the business rows afterwards.

Exactly-once: test_exactly_once.py. Each kill by itself: test_failures.py; relay and Postgres: test_pgbouncer.py.
"""

from __future__ import annotations

import psycopg
from alerting import firing, scraped
from support import (
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
from outbox.sandbox._ports import free_ports
from outbox.testing.fixtures import RelayProcess

LEASE = 8.0
"""Renewed when a third of it is over. No machine is so slow that it runs out before."""
BATCH = 20


def test_relays_join_and_leave(outbox_postgres, outbox_kafka, outbox_relay, order):
    """One that stops frees its lanes at once; those of one that is killed: test_killed_relays.py, test_sizes.py."""
    url, (kind, topic) = outbox_postgres.url, order
    settings = {"relay__lease_seconds": LEASE, "relay__batch_size": BATCH}
    with Load(url, kind) as load:
        first = outbox_relay(relay__instance="first", **settings)
        wait_until(lambda: list(owners(url).values()) == [4], what="one relay with all lanes")
        second = outbox_relay(relay__instance="second", **settings)
        wait_until(lambda: sorted(owners(url).values()) == [2, 2], what="two relays with two lanes each")
        third = outbox_relay(relay__instance="third", **settings)
        wait_until(lambda: sorted(owners(url).values()) == [1, 1, 2], what="three relays")
        ends(first)
        # Released, not expired.
        assert "first" not in owners(url)
        wait_until(lambda: sorted(owners(url).values()) == [2, 2], what="two relays again")
        second.kill()
        wait_until(lambda: owners(url) == {"third": 4}, what="the lanes of the killed relay to be taken")
        load.more(100)
        load.drain()
    # One kill, of a relay with two lanes; and nothing else, unless a lease was too short for this machine.
    repeats = check(url, outbox_kafka.consume(topic))
    assert repeats <= 2 * BATCH or any("lane lost" in relay.log() for relay in (first, second, third))


UNREAD = """
import os
read, write = os.pipe()
os.close(read)
os.dup2(write, 2)
from relay.cli import main
main()
"""


def test_a_relay_whose_log_nobody_reads_any_more_publishes_and_ends_in_order(
    outbox_postgres, outbox_kafka, outbox_relay, order, tmp_path
):
    """As in ``outbox relay run 2>&1 | tee``, whose tee Ctrl-C has ended."""
    program = tmp_path / "unread.py"
    program.write_text(UNREAD)
    relay = outbox_relay(program=(str(program),))
    write(outbox_postgres.url, [Event(order[0], "k", "T", {"n": n}) for n in range(20)])
    drained(outbox_postgres.url)
    ends(relay)
    assert (relay.log(), owners(outbox_postgres.url)) == ("", {})
    assert len(outbox_kafka.consume(order[1], 20)) == 20


def test_a_relay_that_slept_past_its_lease_settles_nothing(outbox_postgres, outbox_kafka, outbox_relay, order):
    """SIGSTOP, take-over, SIGCONT: the sleeper must find its epoch over, and nothing may be lost or out of order.

    Its metrics then say that lanes were taken from it.
    """
    url, (kind, topic) = outbox_postgres.url, order
    address = f"127.0.0.1:{free_ports(1)[0]}"

    def lost() -> float:
        (count,) = (value for series, value in scraped(address).items() if "lanes_lost" in series)
        return count

    with Load(url, kind) as load:
        # Not longer than it has to sleep.
        sleeper = outbox_relay(relay__lease_seconds=3, relay__batch_size=BATCH, relay__metrics_address=address)
        wait_until(lambda: list(owners(url).values()) == [4], what="one relay with all lanes")
        load.more(200)
        before = scraped(address)
        assert lost() == 0
        sleeper.pause()
        other = outbox_relay(relay__lease_seconds=LEASE, relay__batch_size=BATCH)
        other.wait_for_log("lanes acquired")
        wait_until(lambda: list(owners(url).values()) == [4], what="the other relay with all lanes")
        # Who gets a lane back before it has let go of it has not lost it.
        other.pause()
        sleeper.resume()
        sleeper.wait_for_log("lane lost")
        wait_until(lambda: lost() == 4, what="all lanes to count as lost")
        other.resume()
        wait_until(lambda: sorted(owners(url).values()) == [2, 2], what="both with two lanes")
        wait_until(lambda: "OutboxLanesLost" in firing(scraped(address), before), what="the alert")
        load.drain()
    # What the sleeper had in hand, unless a lease was too short for this machine.
    repeats = check(url, outbox_kafka.consume(topic))
    assert repeats <= 4 * BATCH or "lane lost" in other.log()


WAITING = '"waiting for a server"'


def goes_on(relay: RelayProcess) -> bool:
    """Return whether a relay publishes again, by the last that it has said of its servers."""
    return relay.log().rfind("publishing again") > relay.log().rfind(WAITING)


def test_servers_are_killed_under_load(outbox_postgres, private_postgres, mortal_kafka, outbox_relay):
    """At-least-once, the broker: what was in flight may stand there twice. At-most-once, the broker, Postgres with
    asynchronous writers, and the relay: nothing stands in the topic twice. Two outboxes, and one outage of the broker.
    """
    server, (cluster, topics) = private_postgres({"synchronous_commit": "off", "wal_writer_delay": "10s"}), mortal_kafka
    url, once = outbox_postgres.url, private_postgres.database(server).url
    kind, kind_once = topics.name("Order"), topics.name("Once")
    topic, topic_once = (topics.create_topic(f"{each.lower()}-events", 3) for each in (kind, kind_once))
    settings = {
        "bootstrap_servers": cluster.bootstrap_servers,
        "relay__lease_seconds": 20,
        "relay__batch_size": BATCH,
        # Batches that are lost with the broker are given up soon.
        "kafka__delivery_timeout_ms": 4000,
        "relay__max_backoff_seconds": 0.5,
        "kafka__reconnect_backoff_max_ms": 500,
    }
    at_most_once = settings | {"database_url": once, "delivery": "at-most-once", "log_format": "json"}
    crashes = Crashes(once, kind_once, BATCH)
    with Load(once, kind_once) as load_once:
        with Load(url, kind) as load:
            relay, first = outbox_relay(**settings), outbox_relay(**at_most_once)
            first.wait_for_log("lanes acquired")
            # What it has taken from the table it may still send: its lanes are free when their leases end, not before.
            assert look_up(once, "SELECT session FROM outbox.relays") == [(None,)]
            load.more(300)
            load_once.more(200)
            caught_up(once)
            early = relay.log().count(WAITING)
            cluster.kill_broker(0)
            wait_until(lambda: relay.log().count(WAITING) > early, what="the relay to notice")
            # Each try takes events from the table: they are the last of their batches that it takes.
            first.wait_for_log("waiting for a server")
            load.more(300)
            assert backlog(url) > 0
            away = relay.log().count(WAITING)
            cluster.start_broker(0)
            wait_until(lambda: goes_on(relay) and goes_on(first), 60, "the relays to go on")
            load.drain()
            assert relay.running
        load_once.more(200)
        caught_up(once)
        server.kill()
        first.wait_for_log("waiting for Postgres")
        server.start()
        first.wait_for_log("Postgres is back")
        load_once.more(200)
        caught_up(once)
        first.kill()
        crashes.note()
        second = outbox_relay(**at_most_once)
        load_once.drain()
        assert second.running
    # When the broker was killed, and when it was back and too late: unacknowledged, and there all the same.
    given_up = 1 + early + relay.log().count(WAITING) - away
    assert check(url, topics.consume(topic)) <= 4 * BATCH * given_up
    missing = check_at_most_once(once, topics.consume(topic_once))
    lost = said_to_be_lost(first) + said_to_be_lost(second)
    # What was not acknowledged when the broker died may have arrived all the same.
    assert lost > 0
    # The relay that was killed had a batch of each lane in hand at most.
    assert missing <= lost + 4 * BATCH


def test_settings_that_can_not_work_end_the_command_with_one_line(outbox_relay, outbox_postgres, outbox_kafka):
    wrong = (
        ({"delivery": "exactly-once", "kafka__retry_backoff_ms": 1}, "retry.backoff.ms"),
        ({"env": {"OUTBOX_FAILPOINTS": "batch.sent=burn"}}, "batch.sent=burn"),
        ({"kafka__no_such_option": "1"}, "no.such.option"),
    )
    for relay, shown in [(outbox_relay(**settings), shown) for settings, shown in wrong]:
        assert relay.wait() == 2
        assert shown in relay.log()
        assert "Traceback" not in relay.log()


def test_no_secret_is_logged(outbox_postgres, outbox_kafka, outbox_relay):
    url = outbox_postgres.url.replace("postgresql://postgres@", "postgresql://postgres:hunter2@")
    relay = outbox_relay(database_url=url, log_level="debug", kafka__sasl_password="hunter3")
    relay.wait_for_log("lanes acquired")
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'outbox relay%%'"
        )
    relay.wait_for_log("waiting")
    relay.terminate()
    relay.wait()
    assert "hunter" not in relay.log()
