"""A turn that was read while the one before was published: only what that one has published makes it the next."""

from __future__ import annotations

import gc
import socket
import threading

import psycopg
import pytest
from polling_support import add, polling, table

from outbox import Event, Outbox
from outbox._app import migrate as db
from relay.core.ports import Batches, Receipt, UnsettledBatch
from relay.polling.source import PollingSource

LANES = 3


@pytest.fixture
def source(outbox_postgres, monkeypatch):
    """A source over three lanes with 40 events each; a turn of 5 of each reads the next 5 ahead.

    Always: a turn that looks at failures, once a second, is not read ahead.
    """
    monkeypatch.setattr("relay.polling.reader._LOOK_SECONDS", 3600.0)
    url = outbox_postgres.url
    db.change_lanes(url, LANES)
    add(outbox_postgres, *(f"k{n}" for n in range(300)))
    with psycopg.connect(url) as connection:
        connection.execute("DELETE FROM outbox.events AS e WHERE (SELECT count(*) FROM outbox.events AS f "
                           "WHERE f.lane = e.lane AND f.id < e.id) >= 40")  # fmt: skip
    source = polling(url, table(outbox_postgres, "me").acquire(LANES))
    yield source
    source.close()


@pytest.fixture
def rows(outbox_postgres, source):
    """The ids of every lane, in order."""
    with psycopg.connect(outbox_postgres.url) as connection:
        found = connection.execute("SELECT lane, array_agg(id ORDER BY id) FROM outbox.events GROUP BY lane").fetchall()
    assert [len(ids) for _, ids in found] == [40] * LANES
    return dict(found)


def ids(batches: Batches) -> dict[int, list[int]]:
    return {lane: [claim.position for claim in claims] for lane, claims in batches.items()}


def read(source: PollingSource, limit: int = 5, lanes=range(LANES)) -> Batches:
    fetched = source.fetch(dict.fromkeys(lanes, limit))
    assert fetched.failed == {}
    return fetched.batches


def published(batches: Batches, count: int = 1000) -> dict[int, Receipt]:
    return {lane: Receipt(UnsettledBatch(claims[:count])) for lane, claims in batches.items()}


def test_what_was_read_ahead_is_the_next_turn(source, rows):
    for turn in range(8):
        batches = read(source)
        assert (source.session.ahead is not None) is (turn < 8)
        assert ids(batches) == {lane: each[5 * turn : 5 * turn + 5] for lane, each in rows.items()}
        assert source.settle(published(batches)) == {}
    assert read(source) == {}


@pytest.mark.parametrize(
    ("receipts", "flushes"), [("none", True), ("empty", False), ("some", True), ("some", False), ("one lane", False)]
)
def test_what_was_not_published_comes_again_before_what_was_read_ahead(source, rows, receipts, flushes):
    """As after a batch that the broker refused as a whole, or an event whose topic can't be written to."""
    batches = read(source)
    assert source.session.ahead is not None
    match receipts:
        case "none":
            told, done = {}, dict.fromkeys(rows, 0)
        case "empty":
            told, done = published(batches, 0), dict.fromkeys(rows, 0)
        case "some":
            told, done = published(batches, 2), dict.fromkeys(rows, 2)
        case _:
            told, done = {1: published(batches)[1]}, {0: 0, 1: 5, 2: 0}
    assert source.settle(told) == {}
    if flushes:
        assert source.flush(list(batches)) == {}
    assert ids(read(source, 2, [0])) == {0: rows[0][done[0] : done[0] + 2]}
    assert ids(read(source)) == {lane: each[done[lane] : done[lane] + 5] for lane, each in rows.items()}


def test_an_event_in_the_middle_that_was_left_out_comes_again_first(source, rows):
    batches = read(source)
    receipts = {
        lane: Receipt(UnsettledBatch([claim for n, claim in enumerate(claims) if n != 2]), left_out=True)
        for lane, claims in batches.items()
    }
    assert source.settle(receipts) == {}
    assert ids(read(source)) == {lane: [each[2], *each[5:9]] for lane, each in rows.items()}


def test_in_a_backlog_too_a_row_that_is_committed_late_comes_before_later_ones_of_its_key(outbox_postgres, source):
    """The first writer of a key draws its id and commits late; the second one waits for it.

    By the second's commit, rows of other keys with ids between the two are published.
    """
    url = outbox_postgres.url
    with psycopg.connect(url) as slow, psycopg.connect(url) as other:
        Outbox().add(slow, Event("Order", "slow", "First", {}))
        Outbox().add_many(other, [Event("Order", f"k{n}", "T", {}) for n in range(300)])
        other.commit()
        for _ in range(12):
            batches = read(source)
            assert source.session.ahead is not None
            assert source.settle(published(batches)) == {}
        slow.commit()
        Outbox().add(other, Event("Order", "slow", "Second", {}))
        other.commit()
    found = []
    while batches := read(source):
        found += [claim.event_type for claims in batches.values() for claim in claims if claim.aggregate_id == "slow"]
        assert source.settle(published(batches)) == {}
    assert found == ["First", "Second"]


def test_lanes_that_come_and_go_between_two_turns(source, rows):
    batches = read(source, lanes=[0, 1])
    assert source.session.ahead is not None
    assert source.settle(published(batches)) == {}
    # One more lane than were read ahead: it is read with the others from the next turn on.
    batches = read(source)
    assert ids(batches) == {0: rows[0][5:10], 1: rows[1][5:10]}
    assert source.session.ahead is not None
    assert source.settle(published(batches)) == {}
    batches = read(source)
    assert ids(batches) == {0: rows[0][10:15], 1: rows[1][10:15], 2: rows[2][:5]}
    assert source.session.ahead is not None
    source.drop(1)
    assert ids(read(source, lanes=[0, 2])) == {0: rows[0][10:15], 2: rows[2][:5]}


def test_a_source_that_is_closed_while_it_reads_ahead_says_nothing(source, rows, caplog):
    read(source)
    assert source.session.ahead is not None
    source.close()
    source.close()
    gc.collect()
    assert caplog.records == []


def test_a_source_that_is_closed_before_its_thread_has_sent_anything_says_nothing(source, rows, caplog, monkeypatch):
    entered, closing, connection = threading.Event(), threading.Event(), source.session.connection
    cursor = connection.cursor

    def late(**options):
        if threading.current_thread().name.startswith("background"):
            entered.set()
            assert closing.wait(30)
        return cursor(**options)

    monkeypatch.setattr(connection, "cursor", late)
    shutdown = socket.socket.shutdown

    def shut(self, how):
        shutdown(self, how)
        closing.set()

    monkeypatch.setattr(socket.socket, "shutdown", shut)
    read(source)
    assert entered.wait(30)
    source.close()
    gc.collect()
    assert closing.is_set()
    assert caplog.records == []


def test_a_long_list_of_what_is_in_hand_needs_no_plan_of_its_own(outbox_postgres, monkeypatch):
    """256 lanes with thousands of events in hand at each read ahead; test_plans.py shows how they are looked up."""
    monkeypatch.setattr("relay.polling.reader._LOOK_SECONDS", 3600.0)
    url = outbox_postgres.url
    db.change_lanes(url, 256)
    add(outbox_postgres, *(f"k{n}" for n in range(15_000)))
    source = polling(url, table(outbox_postgres, "me", 60.0).acquire(256))
    turns = in_hand = done = 0
    while batches := read(source, 4, range(256)):
        turns += 1
        ahead = source.session.ahead
        if ahead is not None:
            in_hand = max(in_hand, sum(len(one.values["unsettled"].split(",")) for one in ahead.reads))
        done += sum(map(len, batches.values()))
        assert source.settle(published(batches)) == {}
    assert (done, turns > 12, in_hand > 500) == (15_000, True, True)
    plans = source.connection.execute(
        "SELECT sum(custom_plans), sum(generic_plans) > 10 FROM pg_prepared_statements "
        "WHERE statement LIKE '%AS running%'"
    ).fetchone()
    source.close()
    assert plans == (0, True)
