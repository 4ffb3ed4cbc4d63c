"""Pages of events and of failed ones: each once and in order, however many there are, while rows come and go."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import psycopg
import pytest
from plans import nodes
from psycopg import sql

from outbox import Event, Outbox
from outbox._app.migrate import upgrade
from outbox.testing.fixtures import token
from relay import insights
from relay.config import load
from relay.core.ports import Unavailable
from relay.operations import event_search
from relay.operations.dead_letters import DeadLetters, Filter
from relay.operations.event_search import Contents, EventSearch, EventState
from relay.pipeline.topics import topics
from relay.settle.statements import KEEP_TO_THE_INDEX

EVENTS = 12_000  # more than insights.COUNTED
LANES = 256
SCHEMA = "outbox"

FILL = """
INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, payload)
SELECT CASE WHEN g %% 100 = 0 THEN 'Rare' ELSE 'Order' END, 'o' || g, 'T', '{}' FROM generate_series(1, %s) AS g"""

PUBLISH = """
WITH gone AS (DELETE FROM outbox.events RETURNING *)
INSERT INTO outbox.published (lane, id, event_id, aggregate_type, aggregate_id, event_type, payload, created_at,
                              published_at)
SELECT lane, id, event_id, aggregate_type, aggregate_id, event_type, payload, created_at,
       clock_timestamp() - make_interval(secs => id % 3 * 86400 + id / 10) FROM gone"""

DIE = """
WITH gone AS (DELETE FROM outbox.events RETURNING *)
INSERT INTO outbox.dead_letters (lane, id, event_id, aggregate_type, aggregate_id, event_type, payload, created_at,
                                 attempts, last_error, first_failed_at, dead_at)
SELECT lane, id, event_id, aggregate_type, aggregate_id, event_type, payload, created_at, 3,
       CASE WHEN id % 2 = 0 THEN 'too large: ' || id || ' bytes of ' || event_id ELSE 'refused' END,
       now() + make_interval(secs => id / 7), now() + make_interval(secs => id / 5) FROM gone"""


@pytest.fixture(scope="module")
def wide(outbox_postgres_server) -> Iterator[str]:
    """A database with 256 lanes."""
    name = f"wide_{token()}"
    url = outbox_postgres_server.create_database(name)
    upgrade(url, lanes=LANES)
    yield url
    outbox_postgres_server.drop_database(name)


@pytest.fixture
def connection(wide) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(wide, autocommit=True) as opened:
        for table in ("events", "published", "dead_letters", "failures"):
            opened.execute(sql.SQL("TRUNCATE {}").format(sql.Identifier(SCHEMA, table)))
        yield opened


def walk(search: EventSearch, state: EventState, limit: int = 700, **options: Any) -> list[Any]:
    found, place = [], None
    while True:
        rows, place = search.page(state, after=place, limit=limit, **options)
        assert len(rows) <= limit
        found += rows
        if place is None:
            return found
        assert len(rows) == limit


def test_waiting_events_of_256_lanes_come_newest_first(connection):
    connection.execute(FILL, (EVENTS,))
    search = EventSearch(connection, SCHEMA)
    ids = [row["id"] for row in walk(search, EventState.WAITING)]
    assert len(ids) == EVENTS
    assert ids == sorted(ids, reverse=True)
    rare = walk(search, EventState.WAITING, 30, aggregate_type="Rare")
    assert len(rare) == EVENTS // 100
    assert {row["aggregate_type"] for row in rare} == {"Rare"}
    assert search.page(EventState.WAITING, "Nothing") == ([], None)
    # A page reads no more than it shows, of each lane.
    connection.execute("ANALYZE outbox.events")
    with connection.transaction():
        connection.execute(KEEP_TO_THE_INDEX, {"local": True})
        query = sql.SQL("EXPLAIN (ANALYZE, FORMAT JSON) ") + sql.SQL(event_search._WAITING).format(**search._names)
        ((plan,),) = connection.execute(query, {"id": max(ids), "type": None, "limit": 11}).fetchall()
    found = nodes(plan[0]["Plan"])
    assert not [node for node in found if node["Node Type"] == "Seq Scan" and node["Relation Name"] == "events"]
    (read,) = [node for node in found if node.get("Relation Name") == "events"]
    assert 0 < read["Actual Rows"] * read["Actual Loops"] <= LANES * 11
    # While somebody turns the pages, relays publish and services write: what stays is still shown once.
    first, place = search.page(EventState.WAITING, limit=100)
    connection.execute("DELETE FROM outbox.events WHERE id % 2 = 0")
    connection.execute(FILL, (1_000,))
    second, _ = search.page(EventState.WAITING, after=place, limit=100)
    assert second[0]["id"] < first[-1]["id"]
    assert all(row["id"] % 2 for row in second)
    types = {row["aggregate_type"]: row["events"] for row in search.waiting_types()}
    assert (types.keys(), sum(types.values())) == ({"Order", "Rare"}, EVENTS // 2 + 1_000)


def test_copies_wait_for_the_dead_letter_topic(connection, monkeypatch):
    """Here Kafka is away, and is not waited for."""
    monkeypatch.setattr("relay.pipeline.topics._SECONDS", 0.2)
    connection.execute(FILL, (4,))
    connection.execute(
        "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, payload, headers, from_relay) "
        """SELECT 'Order', 'o' || g, 'T', '{}', '{"outbox-dead-letter": "bad"}', true FROM generate_series(1, 2) AS g"""
    )
    search = EventSearch(connection, SCHEMA)
    routes = {"Order": {"topic": "orders", "dead_letter_topic": "orders-dead", "on_failure": "skip"}}
    shown, _ = topics(load(kafka={"bootstrap.servers": "127.0.0.1:1"}, routes=routes), search.waiting_types())
    assert {one.topic: (one.waiting, one.types) for one in shown} == {
        "orders": (4, ["Order"]),
        "orders-dead": (2, ()),
    }
    # For a role without payloads and headers all are events.
    with connection.transaction(force_rollback=True):
        role = sql.Identifier(f"monitor_{token()}")
        for text in (
            "CREATE ROLE {}",
            "GRANT USAGE ON SCHEMA outbox TO {}",
            "GRANT SELECT (aggregate_type, created_at) ON outbox.events TO {}",
            "SET LOCAL ROLE {}",
        ):
            connection.execute(sql.SQL(text).format(role))
        [row] = search.waiting_types()
        assert (row["copy"], row["events"]) == (False, 6)


def test_published_events_by_the_time_of_publishing(connection):
    connection.execute(FILL, (EVENTS,))
    connection.execute(PUBLISH)
    search = EventSearch(connection, SCHEMA)
    rows = walk(search, EventState.PUBLISHED, days=10)
    assert len(rows) == EVENTS
    places = [(row["moved_at"], row["id"]) for row in rows]
    assert places == sorted(places, reverse=True)
    since = dt.datetime.now(dt.UTC) - dt.timedelta(days=1)
    assert len(walk(search, EventState.PUBLISHED)) == sum(at >= since for at, _ in places)
    assert 0 < len(walk(search, EventState.PUBLISHED)) < EVENTS


def test_dead_events_and_groups_of_their_errors(connection):
    connection.execute(FILL, (EVENTS,))
    connection.execute(DIE)
    # Some wait for another attempt.
    connection.execute(FILL, (300,))
    connection.execute(
        "INSERT INTO outbox.failures (lane, id, event_id, aggregate_type, aggregate_id, blocks, attempts, last_error, "
        "first_failed_at, last_failed_at, next_attempt_at) SELECT lane, id, event_id, aggregate_type, aggregate_id, "
        "true, 1, 'refused', now(), now(), now() + interval '1 hour' FROM outbox.events"
    )
    search, pages = EventSearch(connection, SCHEMA), DeadLetters(connection, SCHEMA)
    assert len(walk(search, EventState.DEAD)) == EVENTS
    assert len(walk(search, EventState.DEAD, aggregate_type="Rare")) == EVENTS // 100
    groups = pages.groups()
    # Errors that differ in numbers and ids alone are one; only so many are looked at.
    kinds = {"too large: N bytes of …", "refused"}
    assert {group["kind"] for group in groups} == kinds
    dead = [group for group in groups if group["state"] == "dead"]
    assert sum(group["events"] for group in dead) == insights.COUNTED
    waiting = {group["aggregate_type"]: group["events"] for group in groups if group["state"] == "retrying"}
    assert waiting == {"Order": 297, "Rare": 3}
    seen, place = [], None
    chosen = Filter("too large: N bytes of …", "Order", "dead")
    while True:
        rows, place = pages.page(chosen, place, 900)
        seen += rows
        if place is None:
            break
    # An even id: every hundredth of them is of the other type.
    assert len(seen) == EVENTS // 2 - EVENTS // 100
    assert len({row["event_id"] for row in seen}) == len(seen)
    assert seen == sorted(seen, key=lambda row: (row["first_failed_at"], row["lane"], row["id"]))
    assert len(pages.rows(Filter(state="dead"))) == insights.COUNTED
    assert len(pages.rows(Filter("refused", state="retrying"))) == 300
    assert pages.rows(Filter("nothing like it")) == []


def test_contents_of_an_event_wherever_it_is(connection):
    events = [
        Event("Order", "a", "T", {"n": 1}, headers={"h": "1"}),
        Event("Order", "b", "T", b"\x00\x01"),
        Event("Order", "c", "T", None),
    ]
    with connection.transaction():
        ids = Outbox().add_many(connection, events)
    search = EventSearch(connection, SCHEMA)
    binary = {"content-type": "application/octet-stream"}
    wanted = [Contents('{"n": 1}', None, {"h": "1"}), Contents(None, b"\x00\x01", binary), Contents(None, None, None)]
    assert [search.contents(event_id) for event_id in ids] == wanted
    connection.execute(DIE)
    assert [found and found.payload for found in map(search.contents, ids)] == ['{"n": 1}', None, None]
    assert search.contents(UUID(int=0)) is None


def test_times_that_python_has_not_break_no_page(connection):
    """A writer may set created_at."""
    for number, time in enumerate(("infinity", "-infinity", "0044-03-15 BC", "294276-12-31", "2026-11-23")):
        connection.execute(
            "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, created_at) "
            "VALUES ('Order', %s, 'T', %s)",
            (f"o{number}", time),
        )
    search = EventSearch(connection, SCHEMA)
    assert len(search.page(EventState.WAITING)[0]) == 5
    assert [row["events"] for row in search.waiting_types()] == [5]
    connection.execute(DIE)
    assert len(search.page(EventState.DEAD)[0]) == 5


def test_a_search_that_takes_too_long_ends_with_an_error(connection, wide, monkeypatch):
    monkeypatch.setattr(insights, "_STATEMENT_SECONDS", 0.2)
    with psycopg.connect(wide) as other:
        other.execute("LOCK TABLE outbox.events IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(Unavailable, match="looking through the events"):
            EventSearch(connection, SCHEMA).page(EventState.WAITING)
