"""How old each topic's first event is: read by the watch of the outbox, from a real Postgres."""

from __future__ import annotations

import json

import psycopg
import pytest
from alerting import firing, scraped
from psycopg.types.json import Jsonb
from support import IMPATIENT, wait_until

from outbox.event import DEAD_LETTER
from outbox.sandbox._ports import free_ports
from relay.insights import look_at_tables
from relay.kafka.routing import Route, Router
from relay.metrics import topics
from relay.metrics.topics import TopicBacklogs

ROUTES = {"Order": Route("orders", dead_letter_topic="orders-dead"), "Bill": Route("bills"), "Stock": Route("stock")}


class Waiting:
    """An outbox whose events nothing publishes, and what is seen of their topics."""

    def __init__(self, connection: psycopg.Connection, routes: dict[str, Route] | None = ROUTES) -> None:
        self.connection = connection
        self.ages = TopicBacklogs("outbox", Router(routes))

    def add(self, kind: str, age: int, count: int = 1, key: str = "k", copy: bool = False) -> None:
        """Write events that are so old, in tens of seconds."""
        self.connection.execute(
            "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, created_at, headers, from_relay)"
            " SELECT %s, %s, 'T', now() - %s * interval '10 seconds', %s, %s FROM generate_series(1, %s)",
            (kind, key, age, Jsonb({DEAD_LETTER: "reason"}) if copy else None, copy, count),
        )

    def pause(self, scope: str, name: str) -> None:
        self.connection.execute("INSERT INTO outbox.pauses (scope, name) VALUES (%s, %s)", (scope, name))

    def resume(self) -> None:
        self.connection.execute("DELETE FROM outbox.pauses")

    def look(self) -> dict[str, int] | None:
        """Return the age of each topic, in hundreds of seconds: a slow machine has time."""
        found = self.ages.look(self.connection, look_at_tables(self.connection, "outbox"))
        self.found = found
        return None if found is None else {topic: int(one.seconds // 100) for topic, one in found.items()}

    def events(self) -> dict[str, int]:
        """Return how many events of each topic the last look has met."""
        return {topic: one.events for topic, one in self.found.items()}

    def lane(self, kind: str, key: str = "k") -> int:
        (row,) = self.connection.execute(
            "SELECT DISTINCT lane FROM outbox.events WHERE aggregate_type = %s AND aggregate_id = %s", (kind, key)
        )
        return row[0]

    def key_beside(self, kind: str, lane: int) -> str:
        """Return a key of this type that is in the lane."""
        for n in range(1_000):
            with self.connection.transaction(force_rollback=True):
                self.add(kind, 0, key=f"beside-{n}")
                if self.lane(kind, f"beside-{n}") == lane:
                    return f"beside-{n}"
        raise AssertionError(f"no key in lane {lane}")


@pytest.fixture
def waiting(outbox_postgres):
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        yield Waiting(connection)


def test_the_first_event_of_each_topic_counts(waiting):
    assert waiting.look() == {}
    waiting.add("Order", 125)
    waiting.add("Order", 300)
    for n in range(20):
        waiting.add("Bill", 55, key=f"k{n}")
    waiting.add("Bill", 75, key="k7")
    waiting.add("Order", 45, copy=True)
    waiting.add("Unknown", 35)
    assert waiting.look() == {"orders": 12, "bills": 5, "orders-dead": 4, "": 3}
    assert waiting.events() == {"orders": 2, "bills": 21, "orders-dead": 1, "": 1}


def test_the_events_of_each_topic_are_counted_up_to_a_limit_in_each_lane(waiting, monkeypatch):
    """Not those of paused topics, nor of paused lanes: a look reads past the former."""
    monkeypatch.setattr(topics, "COUNTED", 100)
    monkeypatch.setattr(topics, "_WALK_SECONDS", 60.0)
    waiting.add("Order", 500, 150)
    lane = waiting.lane("Order")
    waiting.add("Bill", 55, 60, key=waiting.key_beside("Bill", lane))
    waiting.add("Bill", 55, 7, key=waiting.key_beside("Bill", (lane + 1) % 4))
    waiting.look()
    assert waiting.events() == {"orders": 100, "bills": 7}
    waiting.pause("topic", "orders")
    for _ in range(2):
        waiting.look()
        assert waiting.events() == {"bills": 67}
    waiting.pause("lane", str((lane + 1) % 4))
    waiting.look()
    assert waiting.events() == {"bills": 60}


def test_what_is_paused_does_not_count_and_hides_nothing(waiting):
    waiting.add("Order", 125)
    lane = waiting.lane("Order")
    waiting.add("Bill", 55, key=waiting.key_beside("Bill", lane))
    waiting.add("Stock", 75, key=waiting.key_beside("Stock", (lane + 1) % 4))
    waiting.pause("topic", "orders")
    assert waiting.look() == {"bills": 5, "stock": 7}
    waiting.pause("lane", str(lane))
    assert waiting.look() == {"stock": 7}
    waiting.resume()
    assert waiting.look() == {"orders": 12, "bills": 5, "stock": 7}


def test_more_events_of_a_paused_topic_than_are_counted_hide_nothing(waiting, monkeypatch):
    """The walk goes on where the last one ended; anew from time to time, for what was committed late."""
    monkeypatch.setattr(topics, "COUNTED", 100)
    waiting.add("Order", 500, 205)
    waiting.add("Bill", 55, key=waiting.key_beside("Bill", waiting.lane("Order")))
    waiting.pause("topic", "orders")
    # No time but for one step in each look.
    monkeypatch.setattr(topics, "_WALK_SECONDS", 0.0)
    assert [waiting.look() for _ in range(3)] == [{}, {}, {"bills": 5}]
    assert waiting.look() == {"bills": 5}
    # One that has not ended does not begin anew.
    waiting.ages = TopicBacklogs("outbox", Router(ROUTES))
    with monkeypatch.context() as patched:
        patched.setattr(topics, "_ANEW_SECONDS", 0.0)
        assert [waiting.look() for _ in range(3)] == [{}, {}, {"bills": 5}]
    monkeypatch.setattr(topics, "_WALK_SECONDS", 60.0)
    waiting.ages = TopicBacklogs("outbox", Router(ROUTES))
    assert waiting.look() == {"bills": 5}
    # Committed late: below the place that was reached.
    waiting.connection.execute(
        "INSERT INTO outbox.events (id, aggregate_type, aggregate_id, event_type, created_at) OVERRIDING SYSTEM VALUE"
        " VALUES (-1, 'Stock', %s, 'T', now() - interval '950 seconds')",
        (waiting.key_beside("Stock", waiting.lane("Order")),),
    )
    assert waiting.look() == {"bills": 5}
    monkeypatch.setattr(topics, "_ANEW_SECONDS", 0.0)
    assert waiting.look() == {"bills": 5, "stock": 9}


def test_an_event_in_front_of_many_paused_ones_does_not_keep_a_walk_from_beginning_anew(waiting, monkeypatch):
    waiting.add("Order", 500, 10)
    key = waiting.key_beside("Bill", waiting.lane("Order"))
    waiting.add("Bill", 55, key=key)
    monkeypatch.setattr(topics, "COUNTED", 100)
    waiting.add("Order", 500, 105)
    waiting.pause("topic", "orders")
    monkeypatch.setattr(topics, "_WALK_SECONDS", 0.0)
    assert waiting.look() == {"bills": 5}
    waiting.connection.execute(
        "INSERT INTO outbox.events (id, aggregate_type, aggregate_id, event_type, created_at) OVERRIDING SYSTEM VALUE"
        " VALUES (-1, 'Bill', %s, 'T', now() - interval '950 seconds')",
        (key,),
    )
    monkeypatch.setattr(topics, "_ANEW_SECONDS", 0.0)
    assert waiting.look() == {"bills": 9}


def test_a_look_that_takes_too_long_shows_nothing(waiting, monkeypatch):
    waiting.add("Order", 125)
    state = look_at_tables(waiting.connection, "outbox")
    with psycopg.connect(waiting.connection.info.dsn) as other, monkeypatch.context() as patched:
        patched.setattr(topics, "_STATEMENT_SECONDS", 0.2)
        other.execute("LOCK TABLE outbox.events")
        assert waiting.ages.look(waiting.connection, state) is None
    assert waiting.look() == {"orders": 12}


def test_there_are_not_more_topics_than_a_prometheus_can_take(waiting, monkeypatch):
    waiting.ages = TopicBacklogs("outbox", Router())
    for n in range(9):
        waiting.add(f"type-{n}", 100 + 10 * n)
    monkeypatch.setattr(topics, "MOST_TOPICS", 3)
    assert waiting.look() == {f"type-{n}-events": 10 + n for n in (8, 7, 6)}


def test_a_topic_that_stands_still_beside_a_paused_one_is_an_alert(outbox_postgres, outbox_kafka, outbox_relay):
    """It has no topic in Kafka; the paused one has older events. Of what a real relay shows."""
    orders, missing = outbox_kafka.create_topic(outbox_kafka.name("orders")), outbox_kafka.name("missing")
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        waiting = Waiting(connection)
        waiting.pause("topic", orders)
        waiting.add("Order", 5_000, 10)
        waiting.add("Bill", 100)
    outbox_relay(
        program=IMPATIENT,
        relay__metrics_address=address,
        routes=json.dumps({"Order": {"topic": orders}, "Bill": {"topic": missing}}),
        create_topics=False,
    )
    wanted = {"OutboxPaused", "OutboxTopicUnusable", "OutboxBacklogOld"}
    wait_until(lambda: firing(scraped(address)) == wanted, what="the alerts")
    ages = [series for series in scraped(address) if "topic_oldest_age" in series]
    assert [f'topic="{missing}"' in series for series in ages] == [True]
    counts = {series: value for series, value in scraped(address).items() if "backlog_topic_events" in series}
    assert [(f'topic="{missing}"' in series, value) for series, value in counts.items()] == [(True, 1)]
    outbox_kafka.create_topic(missing)
    wait_until(lambda: firing(scraped(address)) == {"OutboxPaused"}, what="the other topic to be published")
