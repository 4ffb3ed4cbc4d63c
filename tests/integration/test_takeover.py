"""Postgres' side of taking a lane over: what a marker settles, and when the lane must stop."""

from __future__ import annotations

from dataclasses import replace

import psycopg
import pytest

from outbox import Event, Outbox
from relay import db
from relay.cli.wiring import build_router, build_topics
from relay.config import client_options, delivery_seconds, load, producer_options, state_topic_name
from relay.database import Connector
from relay.failures import FailurePolicy, Failures
from relay.lanes import LaneTable
from relay.marker import Marker, StateLost
from relay.polling import PollingSource
from relay.ports import PUBLISHED, LaneLost, Receipt, Unavailable
from relay.routing import Router
from relay.transactions import StateTopic, TransactionalPublisher, TransactionFigures


class Lane:
    """One lane of one database, taken by ``take``."""

    def __init__(self, database) -> None:
        self.url = database.url
        db.change_lanes(self.url, 1)
        self.table = LaneTable(database.connect(autocommit=True), "outbox", "me", "0", 30.0)
        self.opened: list[PollingSource] = []

    def take(self, *, archive: bool = False) -> PollingSource:
        self.run("UPDATE outbox.lanes SET lease_until = '-infinity'")
        failures = Failures("outbox", FailurePolicy(), Router())
        source = PollingSource(Connector(self.url, "test"), "outbox", self.table.acquire(), failures, archive=archive)
        self.opened.append(source)
        return source

    def add(self, *keys: str) -> None:
        with psycopg.connect(self.url) as connection:
            Outbox().add_many(connection, [Event("Order", key, "T", {}) for key in keys])

    def run(self, query: str, *values: object) -> list[tuple]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(query, values)
            return cursor.fetchall() if cursor.description else []

    def left(self) -> list[str]:
        return [key for (key,) in self.run("SELECT aggregate_id FROM outbox.events ORDER BY id")]


@pytest.fixture
def lane(outbox_postgres):
    lane = Lane(outbox_postgres)
    yield lane
    for source in lane.opened:
        source.close()


def marker(source: PollingSource, batch: int, claims=()) -> Marker:
    """The marker that this source's relay would write."""
    row = source._connection.execute("SELECT system_identifier::text FROM pg_control_system()").fetchone()
    ids, event_ids = tuple(claim.position for claim in claims), tuple(claim.event_id for claim in claims)
    return Marker(batch, source._lease.epoch, row[0], 1, ids, event_ids)


def test_a_lane_begins_with_an_empty_marker(lane):
    source = lane.take()
    adopted, identity = source.adopt(None)
    assert adopted is None
    first = Marker(1, source._lease.epoch, identity.system_identifier, identity.timeline)
    assert source.adopt(first)[0] == first
    assert lane.run("SELECT last_batch FROM outbox.lanes") == [(1,)]
    assert identity.timeline == 1


def test_the_marker_settles_what_was_committed_and_not_settled(lane):
    source = lane.take()
    source.adopt(marker(source, 1))
    lane.add("a", "b", "c")
    committed = source.fetch(2)
    second = marker(source, 2, committed)
    successor = lane.take()
    assert successor.adopt(second)[0] == second
    assert lane.left() == ["c"]
    assert lane.run("SELECT last_batch FROM outbox.lanes") == [(2,)]
    # Again: nothing more goes.
    assert successor.adopt(second)[0] == second
    assert [claim.aggregate_id for claim in successor.fetch(10)] == ["c"]


def test_the_marker_settles_into_the_archive_without_a_place(lane):
    source = lane.take(archive=True)
    source.adopt(marker(source, 1))
    lane.add("a")
    second = marker(source, 2, source.fetch(2))
    lane.take(archive=True).adopt(second)
    assert lane.run('SELECT aggregate_id, topic, "offset" FROM outbox.published') == [("a", None, None)]


def test_batches_are_counted_as_they_are_settled(lane):
    source = lane.take()
    source.adopt(marker(source, 1))
    for batch in (2, 3):
        lane.add("a")
        source.settle(Receipt([(claim, PUBLISHED) for claim in source.fetch(10)], batch=batch))
        assert lane.run("SELECT last_batch FROM outbox.lanes") == [(batch - 1,)]
        source.fetch(10)
        assert lane.run("SELECT last_batch FROM outbox.lanes") == [(batch,)]


@pytest.mark.parametrize(("settled", "found"), [(3, None), (3, 2), (1, 3)])
def test_table_and_marker_that_contradict_each_other_stop_the_lane(lane, settled, found):
    source = lane.take()
    lane.run("UPDATE outbox.lanes SET last_batch = %s", settled)
    lane.add("a")
    with pytest.raises(StateLost, match="reconcile"):
        source.adopt(None if found is None else marker(source, found))
    assert lane.left() == ["a"]
    assert lane.run("SELECT last_batch FROM outbox.lanes") == [(settled,)]


def test_a_marker_whose_rows_postgres_has_lost_stops_the_lane(lane):
    """A failover to a standby that was behind: last_batch fits, the rows of the batch are not there."""
    source = lane.take()
    source.adopt(marker(source, 1))
    lane.add("a", "b")
    second = marker(source, 2, source.fetch(10))
    lane.run("DELETE FROM outbox.events WHERE aggregate_id = 'a'")
    with pytest.raises(StateLost, match="only 1"):
        lane.take().adopt(second)
    assert lane.left() == ["b"]


def test_another_databases_marker_stops_the_lane(lane):
    source = lane.take()
    with pytest.raises(StateLost, match="OUTBOX_NAME"):
        source.adopt(Marker(5, 1, "12345", 1))


def test_a_stale_epoch_adopts_nothing(lane):
    source = lane.take()
    source.adopt(marker(source, 1))
    lane.add("a")
    second = marker(source, 2, source.fetch(10))
    lane.take()
    for call in (lambda: source.adopt(second), source.check_epoch, lambda: source.fetch(10)):
        with pytest.raises(LaneLost):
            call()
    assert lane.left() == ["a"]


def test_rows_that_vanish_between_reading_and_the_barrier_are_not_published(lane, monkeypatch):
    """Behind a pooler Postgres may crash in between, and the connection live on."""
    source = lane.take()
    lane.add("a", "b")
    real = PollingSource._settle

    def crash(self, rows=()):
        lane.run("DELETE FROM outbox.events WHERE aggregate_id = 'b'")
        return real(self, rows)

    monkeypatch.setattr(PollingSource, "_settle", crash)
    with pytest.raises(Unavailable, match="1 of 2 events"):
        source.fetch(10)
    monkeypatch.undo()
    # The same with a batch to settle before.
    source.settle(Receipt([(claim, PUBLISHED) for claim in source.fetch(10)]))
    lane.add("b")
    monkeypatch.setattr(PollingSource, "_settle", crash)
    with pytest.raises(Unavailable, match="1 of 1 events"):
        source.fetch(10)


def test_a_relay_that_sleeps_in_a_transaction_does_not_hold_its_lane(lane):
    """The session ends when the lease has run out, and the lane's row is free again."""
    source = lane.take()
    source._lease.ttl_seconds = 0.2

    def sleep_in_it() -> None:
        with source._transaction("sleeping"):
            source._connection.execute(source._queries.held, {"lane": 0, "epoch": source._lease.epoch})
            with psycopg.connect(lane.url) as other:
                other.execute("SET lock_timeout = '20s'")
                other.execute("SELECT FROM outbox.lanes FOR UPDATE")
            source._connection.execute("SELECT 1")

    with pytest.raises(Unavailable, match="idle-in-transaction"):
        sleep_in_it()


def test_the_relay_of_a_primary_from_before_a_failover_leaves_the_other_one_alone(lane, outbox_kafka):
    """It stops, and tries again for as long as it runs: it must not fence the one that goes on each time."""
    settings = load(
        database_url=lane.url,
        name=outbox_kafka.name("outbox"),
        delivery="exactly-once",
        create_topics=True,
        kafka={"bootstrap.servers": outbox_kafka.bootstrap_servers},
    )
    state = StateTopic(client_options(settings), state_topic_name(settings), replication=settings.state_replication)

    def publisher(source: PollingSource) -> TransactionalPublisher:
        return TransactionalPublisher(
            producer_options(settings),
            build_router(settings),
            build_topics(settings),
            "test",
            delivery_seconds(settings),
            transactional_id=f"{settings.name}.relay.0",
            lane=0,
            epoch=source._lease.epoch,
            lanes=1,
            state=state,
            ledger=source,
            figures=TransactionFigures(),
        )

    kind = outbox_kafka.name("Order")
    with psycopg.connect(lane.url) as connection:
        Outbox().add_many(connection, [Event(kind, key, "T", {}) for key in "ab"])
    source = lane.take()
    first, second = source.fetch(10)
    after = publisher(source)
    after._identity = replace(after._identity, timeline=2)
    assert after.publish([first]).failure is None
    with pytest.raises(StateLost, match="the primary from before a failover"):
        publisher(lane.take())
    assert after.publish([second]).failure is None
    after.close()
