"""A relay at the sizes, and with the settings, that users have. Real processes, killed in the middle."""

from __future__ import annotations

import json
import signal
from collections import defaultdict
from pathlib import Path

import psycopg
from support import (
    Crashes,
    backlog,
    drained,
    end_leases,
    ends,
    halted,
    look_up,
    numbers_by_key,
    owners,
    wait_until,
    write,
)

from outbox import Event
from outbox._app import migrate as db
from relay.failpoints import VARIABLE
from relay.kafka.state_topic import StateTopic

_LANES = 256
_EVENTS = 14_000
_KEYS = 3_000


_CONNECTIONS = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    " AND application_name LIKE 'outbox relay%' AND client_port IS NOT NULL"
)


def _status(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name + ":")))


def test_256_lanes_take_one_relays_connections_and_survive_its_kill(outbox_postgres, outbox_kafka, outbox_relay):
    """Threads, connections and producers do not grow with the lanes; nothing is lost, and nothing is out of order."""
    db.change_lanes(outbox_postgres.url, _LANES)
    kind = outbox_kafka.name("Order")
    topic = outbox_kafka.create_topic(f"{kind.lower()}-events", 6)
    settings = {"delivery": "exactly-once", "name": outbox_kafka.name("outbox"), "relay__lease_seconds": 20}
    write(outbox_postgres.url, (Event(kind, f"key-{n % _KEYS}", "T", {"n": n}) for n in range(_EVENTS)))
    # Halted in the middle, with all that it will ever have. The first acknowledgement is of the markers.
    first = outbox_relay(env={VARIABLE: "batch.acknowledged=pause@3"}, **settings)
    wait_until(lambda: halted(first), 120, "the middle of the work")
    assert 0 < backlog(outbox_postgres.url) < _EVENTS - 2_000
    assert look_up(outbox_postgres.url, _CONNECTIONS)[0][0] <= 4
    # Librdkafka has a thread for each broker it knows and some of its own, in each of three clients at most.
    assert _status(first.pid, "Threads") < 60
    first.kill()
    end_leases(outbox_postgres.url)
    second = outbox_relay(**settings)
    drained(outbox_postgres.url, 180)
    assert list(owners(outbox_postgres.url).values()) == [_LANES]
    ends(second)
    seen, repeats = numbers_by_key(outbox_kafka.consume(topic), "n")
    assert repeats == 0
    assert seen == {f"key-{key}": list(range(key, _EVENTS, _KEYS)) for key in range(_KEYS)}


def test_events_near_the_limit_take_a_bounded_amount_of_memory(outbox_postgres, outbox_kafka, outbox_relay):
    """600 events of 900 kB each took 1.4 GB: a turn is bounded by its bytes. A third of them would take 470 MB."""
    kind = outbox_kafka.name("Blob")
    outbox_kafka.create_topic(f"{kind.lower()}-events", 3, {"retention.bytes": str(64 << 20)})
    with psycopg.connect(outbox_postgres.url) as connection:
        connection.execute(
            "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, payload)"
            " SELECT %s, 'k' || n %% 40, 'T', jsonb_build_object('n', n, 'pad', repeat(md5(n::text), 28000))"
            " FROM generate_series(1, 200) AS n",
            (kind,),
        )
    relay = outbox_relay(delivery="exactly-once", name=outbox_kafka.name("outbox"))
    drained(outbox_postgres.url, 180)
    # In kB: the largest amount of memory that was ever resident.
    assert _status(relay.pid, "VmHWM") < 300_000
    ends(relay)


def test_a_backlog_with_nothing_set_but_what_must_be(private_postgres, outbox_kafka, outbox_relay):
    """17,000 events of 2 kB, in turns of 2,000 of a lane; fsync; topics that are there; a lease of 15 seconds.

    Both deliveries beside each other, each killed with a turn in hand, when it is acknowledged and not settled.
    """
    count, keys = 17_000, 600
    server = private_postgres()
    points = {"at-least-once": "batch.acknowledged=kill@2", "exactly-once": "txn.committed=kill@2"}
    urls, topics, killed, settings = {}, {}, {}, {}
    for number, delivery in enumerate(points):
        urls[delivery] = url = private_postgres.database(server, f"outbox{number}").url
        kind = outbox_kafka.name(f"Order{number}")
        topics[delivery] = outbox_kafka.create_topic(f"{kind.lower()}-events", 6)
        with psycopg.connect(url) as connection:
            connection.execute(
                "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, payload)"
                " SELECT %s, 'k' || n %% %s, 'T', jsonb_build_object('n', n, 'pad', repeat(md5(n::text), 60))"
                " FROM generate_series(0, %s) AS n",
                (kind, keys, count - 1),
            )
        settings[delivery] = {"database_url": url, "delivery": delivery, "create_topics": False}
        if delivery == "exactly-once":
            # Of the outboxes of one Kafka.
            settings[delivery]["name"] = outbox_kafka.name("outbox")
    relays = {delivery: outbox_relay(env={VARIABLE: point}, **settings[delivery]) for delivery, point in points.items()}
    for delivery, relay in relays.items():
        assert relay.wait(60) == -signal.SIGKILL
        killed[delivery] = look_up(urls[delivery], "SELECT max(lease_until) FROM outbox.lanes")[0][0]
        assert backlog(urls[delivery]) >= count - 8_000
    relays = {delivery: outbox_relay(**settings[delivery]) for delivery in points}
    for delivery, relay in relays.items():
        url = urls[delivery]
        relay.wait_for_log("lanes acquired")
        assert look_up(url, "SELECT clock_timestamp()")[0][0] >= killed[delivery]
        drained(url, 90)
        ends(relay)
        seen, repeats = numbers_by_key(outbox_kafka.consume(topics[delivery]), "n")
        assert seen == {f"k{key}": list(range(key, count, keys)) for key in range(keys)}
        # The turn in hand, of 16 MiB or of 2,000 events of each of the four lanes.
        assert 4_000 < repeats <= 8_000 if delivery == "at-least-once" else repeats == 0, repeats


def test_a_transaction_of_20000_events_in_100_partitions(outbox_postgres, outbox_kafka, outbox_relay):
    """One relay is killed when all of it is acknowledged and nothing committed; one, when all of it is committed: the
    lane's marker alone tells the next one which 20,000 rows to settle.
    """
    url, name = outbox_postgres.url, outbox_kafka.name("outbox")
    db.change_lanes(url, 1)
    kinds = [outbox_kafka.name(f"Kind{number}-") for number in range(10)]
    topics = [outbox_kafka.create_topic(f"{kind.lower()}-events", 10) for kind in kinds]
    keys, most, count = 2_000, 20_000, 24_000
    with psycopg.connect(url) as connection:
        connection.execute(
            "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, payload)"
            " SELECT (%s::text[])[1 + n %% 10], 'k' || n %% %s, 'T', to_jsonb(n) FROM generate_series(0, %s) AS n",
            (kinds, keys, count - 1),
        )
    settings = {"delivery": "exactly-once", "name": name, "relay__batch_size": most, "relay__lease_seconds": 60}
    crashes = Crashes(url, kinds[0], most, lanes=1)
    # The first marker of the lane is acknowledged before.
    for point in ("batch.acknowledged=kill@2", "txn.committed=kill"):
        relay = outbox_relay(env={VARIABLE: point}, **settings)
        assert relay.wait(60) == -signal.SIGKILL
        crashes.note()
        assert backlog(url) == count
    state = StateTopic({"bootstrap.servers": outbox_kafka.bootstrap_servers}, f"{name}.relay.state")
    marker = state.last_markers([0])[0]
    assert marker is not None
    assert len(marker.positions) == most
    relay = outbox_relay(**settings)
    drained(url, 90)
    ends(relay)
    messages = outbox_kafka.consume(topics)
    assert len({(message.topic(), message.partition()) for message in messages}) == 100
    order: dict[int, list[int]] = defaultdict(list)
    for message in messages:
        number = json.loads(message.value())
        order[number % keys].append(number)
    assert order == {key: list(range(key, count, keys)) for key in range(keys)}
