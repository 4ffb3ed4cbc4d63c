"""Real relay processes under load, joined, stopped and killed; held against the business rows afterwards."""

from __future__ import annotations

import random

import psycopg
import pytest
from support import Load, backlog, check, owners, wait_until

LEASE = 2.0


@pytest.fixture(params=["at-least-once", "exactly-once"])
def delivery(request, outbox_kafka):
    """Settings of a relay for this delivery, of an outbox that no other test has. More in test_exactly_once.py."""
    return {"delivery": request.param, "name": outbox_kafka.name("outbox")}


def check_delivery(delivery, url, messages) -> None:
    """Nothing lost, order per key; and with exactly-once nothing twice."""
    repeats = check(url, messages)
    if delivery["delivery"] == "exactly-once":
        assert repeats == 0


def test_relays_join_and_leave(outbox_postgres, outbox_kafka, outbox_relay, delivery):
    url, kind = outbox_postgres.url, outbox_kafka.name("Order")
    topic = f"{kind.lower()}-events"
    outbox_kafka.create_topic(topic, 3)
    settings = delivery | {"relay__lease_seconds": LEASE}
    with Load(url, kind) as load:
        first = outbox_relay(relay__instance="first", **settings)
        wait_until(lambda: list(owners(url).values()) == [4], what="one relay with all lanes")
        second = outbox_relay(**settings)
        wait_until(lambda: sorted(owners(url).values()) == [2, 2], what="two relays with two lanes each")
        outbox_relay(**settings)
        wait_until(lambda: sorted(owners(url).values()) == [1, 1, 2], what="three relays")
        before = load.committed()
        first.terminate()
        assert first.wait() == 0
        # Released, not expired.
        assert "first" not in owners(url)
        wait_until(lambda: sorted(owners(url).values()) == [2, 2], what="two relays again")
        second.kill()
        wait_until(lambda: list(owners(url).values()) == [4], what="the last relay with all lanes")
        wait_until(lambda: load.committed() > before + 100, what="more load")
        load.drain()
    check_delivery(delivery, url, outbox_kafka.consume(topic))


@pytest.mark.chaos
def test_relays_killed_at_random(outbox_postgres, outbox_kafka, outbox_relay, delivery):
    url, kind = outbox_postgres.url, outbox_kafka.name("Order")
    topic = f"{kind.lower()}-events"
    outbox_kafka.create_topic(topic, 3)
    chance = random.Random(7)
    settings = delivery | {"relay__lease_seconds": 1.0, "relay__batch_size": 20}
    with Load(url, kind) as load:
        relays = [outbox_relay(**settings) for _ in range(2)]
        for _ in range(4):
            victim = chance.randrange(2)
            relays[victim].wait_for_log("lane acquired")
            goal = load.committed() + chance.randint(50, 400)
            wait_until(lambda goal=goal: load.committed() >= goal, what="some load")
            relays[victim].kill()
            relays[victim] = outbox_relay(**settings)
        load.drain()
    check_delivery(delivery, url, outbox_kafka.consume(topic))


def test_a_relay_that_slept_past_its_lease_settles_nothing(outbox_postgres, outbox_kafka, outbox_relay):
    """SIGSTOP, take-over, SIGCONT: the sleeper must find its epoch over, and nothing may be lost or out of order."""
    url, kind = outbox_postgres.url, outbox_kafka.name("Order")
    topic = f"{kind.lower()}-events"
    outbox_kafka.create_topic(topic, 3)
    with Load(url, kind) as load:
        sleeper = outbox_relay(relay__lease_seconds=1.0)
        wait_until(lambda: list(owners(url).values()) == [4], what="one relay with all lanes")
        wait_until(lambda: load.committed() > 200, what="some load")
        sleeper.pause()
        other = outbox_relay(relay__lease_seconds=1.0)
        other.wait_for_log("lane acquired")
        wait_until(lambda: list(owners(url).values()) == [4], what="the other relay with all lanes")
        sleeper.resume()
        sleeper.wait_for_log("lane lost")
        wait_until(lambda: sorted(owners(url).values()) == [2, 2], what="both with two lanes")
        load.drain()
    check(url, outbox_kafka.consume(topic))


def test_the_broker_restarts_under_load(outbox_postgres, private_kafka, outbox_relay):
    url, kind = outbox_postgres.url, "Order"
    cluster = private_kafka()
    topics = private_kafka.topics(cluster)
    topics.create_topic("order-events", 3)
    with Load(url, kind) as load:
        relay = outbox_relay(
            bootstrap_servers=cluster.bootstrap_servers,
            relay__lease_seconds=3,
            relay__max_backoff_seconds=0.5,
            kafka__reconnect_backoff_max_ms=500,
        )
        wait_until(lambda: load.committed() > 300, what="some load")
        cluster.kill_broker(0)
        relay.wait_for_log("waiting for a server")
        goal = load.committed() + 300
        wait_until(lambda: load.committed() > goal, what="load while the broker is away")
        assert backlog(url) > 0
        cluster.start_broker(0)
        relay.wait_for_log("publishing again", 60)
        load.drain()
        assert relay.running
    check(url, topics.consume("order-events"))


def test_postgres_is_killed_under_load(private_postgres, outbox_kafka, outbox_relay):
    server = private_postgres()
    database = private_postgres.database(server)
    kind = outbox_kafka.name("Order")
    topic = f"{kind.lower()}-events"
    outbox_kafka.create_topic(topic, 3)
    with Load(database.url, kind) as load:
        relay = outbox_relay(database_url=database.url, relay__lease_seconds=3)
        wait_until(lambda: load.committed() > 300, what="some load")
        server.kill()
        relay.wait_for_log("waiting for Postgres")
        server.start()
        relay.wait_for_log("Postgres is back")
        goal = load.committed() + 300
        wait_until(lambda: load.committed() > goal, what="load after the crash")
        server.restart()
        wait_until(lambda: load.committed() > goal + 300, what="load after the restart")
        load.drain()
        assert relay.running
    check(database.url, outbox_kafka.consume(topic))


def test_a_missing_topic_is_an_error_that_says_so_and_nothing_is_lost(outbox_postgres, outbox_kafka, outbox_relay):
    kind = outbox_kafka.name("Order")
    topic = f"{kind.lower()}-events"
    relay = outbox_relay(create_topics=False)
    with Load(outbox_postgres.url, kind, threads=1) as load:
        wait_until(lambda: load.committed() > 20, what="some load")
    relay.wait_for_log(f"topic '{topic}' does not exist")
    assert "OUTBOX_CREATE_TOPICS" in relay.log()
    assert backlog(outbox_postgres.url) == load.committed()
    outbox_kafka.create_topic(topic, 2)
    load.drain()
    check(outbox_postgres.url, outbox_kafka.consume(topic))


def test_a_relay_finishes_what_is_in_flight_and_frees_its_lanes_on_sigterm(
    outbox_postgres, outbox_kafka, outbox_relay, delivery
):
    url, kind = outbox_postgres.url, outbox_kafka.name("Order")
    relay = outbox_relay(**delivery)
    relay.wait_for_log("lane acquired")
    with Load(url, kind) as load:
        wait_until(lambda: load.committed() > 300, what="some load")
        relay.terminate()
        assert relay.wait() == 0
        assert owners(url) == {}
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT count(*) FROM outbox.relays").fetchone() == (0,)
    # What was sent was also settled: after a clean stop another relay repeats nothing.
    outbox_relay(**delivery)
    load.drain()
    assert check(url, outbox_kafka.consume(f"{kind.lower()}-events")) == 0


def test_settings_that_can_not_work_end_the_command_with_one_line(outbox_relay, outbox_postgres, outbox_kafka):
    wrong = (
        ({"delivery": "exactly-once", "kafka__retry_backoff_ms": 1}, "retry.backoff.ms"),
        ({"env": {"OUTBOX_FAILPOINTS": "no.such=kill"}}, "no.such=kill"),
        ({"kafka__acks": "1"}, "acks=1 would break at-least-once"),
        ({"kafka__no_such_option": "1"}, "no.such.option"),
        ({"topic_template": "events"}, "topic_template"),
    )
    for relay, shown in [(outbox_relay(**settings), shown) for settings, shown in wrong]:
        assert relay.wait() == 2
        assert shown in relay.log()
        assert "Traceback" not in relay.log()


def test_no_secret_is_logged(outbox_postgres, outbox_kafka, outbox_relay):
    url = outbox_postgres.url.replace("postgresql://postgres@", "postgresql://postgres:hunter2@")
    relay = outbox_relay(database_url=url, log_level="debug", kafka__sasl_password="hunter3")
    relay.wait_for_log("lane acquired")
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'outbox relay%%'"
        )
    relay.wait_for_log("waiting")
    relay.terminate()
    relay.wait()
    assert "hunter" not in relay.log()
