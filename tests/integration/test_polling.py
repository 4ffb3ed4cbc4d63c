"""The polling source on real Postgres: order, late commits, fencing, the floor, and the plans of the hot queries."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest
from support import backlog

from outbox import Event, Outbox, SchemaError
from relay.database import Connector
from relay.failures import FailurePolicy, Failures
from relay.lanes import LaneTable, Lease
from relay.polling import _LOWEST, KEEP_TO_THE_INDEX, Floor, PollingSource, Queries
from relay.ports import PUBLISHED, LaneLost, Receipt, Unavailable
from relay.routing import Router


@pytest.fixture
def lanes(outbox_postgres):
    """One lane for the whole outbox, so that a test sees all its events."""
    from relay import db

    db.change_lanes(outbox_postgres.url, 1)
    return table(outbox_postgres, "me")


def table(database, me: str, ttl: float = 30.0) -> LaneTable:
    return LaneTable(database.connect(autocommit=True), "outbox", me, "0", ttl)


def source(database, lease, schema: str = "outbox") -> PollingSource:
    failures = Failures(schema, FailurePolicy(), Router())
    return PollingSource(Connector(database.url, "test"), schema, lease, failures)


def add(database, *names: str) -> None:
    with psycopg.connect(database.url) as connection:
        Outbox().add_many(connection, [Event("Order", name, "T", {"n": name}) for name in names])


def fetched(claims: Any) -> list[str]:
    return [claim.aggregate_id for claim in claims]


def settle(source: PollingSource, claims: Any) -> None:
    source.settle(Receipt([(claim, PUBLISHED) for claim in claims]))


def test_fetch_gives_the_same_until_settled(outbox_postgres, lanes):
    source_ = source(outbox_postgres, lanes.acquire())
    add(outbox_postgres, "a", "b", "c")
    assert fetched(source_.fetch(2)) == ["a", "b"]
    claims = source_.fetch(10)
    assert fetched(claims) == ["a", "b", "c"]
    settle(source_, claims[:1])
    assert fetched(source_.fetch(10)) == ["b", "c"]
    settle(source_, source_.fetch(10))
    assert source_.fetch(10) == []
    source_.close()


def test_what_was_settled_is_durable_after_a_flush(outbox_postgres, lanes):
    source_ = source(outbox_postgres, lanes.acquire())
    add(outbox_postgres, "a", "b")
    settle(source_, source_.fetch(1))
    source_.flush()
    source_.close()
    with outbox_postgres.connect() as connection:
        assert connection.execute("SELECT aggregate_id FROM outbox.events").fetchall() == [("b",)]


def test_nothing_is_given_that_postgres_could_still_lose(outbox_postgres, lanes):
    """A writer without synchronous commit, a role without it too: the fetch flushes what it read."""
    source_ = source(outbox_postgres, lanes.acquire())
    source_._connection.execute("SET synchronous_commit = off")
    with outbox_postgres.connect(autocommit=True) as writer:
        writer.execute("SET synchronous_commit = off")
        for name in ("first", "second", "third"):
            with writer.transaction():
                Outbox().add(writer, Event("Order", name, "T"))
            written = writer.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
            claims = source_.fetch(10)
            assert fetched(claims) == [name]
            assert writer.execute("SELECT pg_current_wal_flush_lsn() >= %s::pg_lsn", written).fetchone() == (True,)
            settle(source_, claims)
    source_.close()


def test_a_late_commit_with_a_lower_id_is_found_and_comes_first(outbox_postgres, lanes):
    source_ = source(outbox_postgres, lanes.acquire())
    with psycopg.connect(outbox_postgres.url) as late:
        Outbox().add(late, Event("Order", "late", "T"))
        add(outbox_postgres, "early")
        claims = source_.fetch(10)
        assert fetched(claims) == ["early"]
        settle(source_, claims)
        add(outbox_postgres, "next")
    assert fetched(source_.fetch(10)) == ["late", "next"]
    source_.close()


def test_settling_under_an_old_epoch_deletes_nothing(outbox_postgres, lanes):
    lease = lanes.acquire()
    source_ = source(outbox_postgres, lease)
    add(outbox_postgres, "a")
    claims = source_.fetch(10)
    lanes.release(lease)
    assert table(outbox_postgres, "other").acquire().epoch == lease.epoch + 1
    settle(source_, claims)
    with pytest.raises(LaneLost, match="epoch"):
        source_.flush()
    with pytest.raises(LaneLost, match="epoch"):
        source_.fetch(10)
    source_.close()
    assert backlog(outbox_postgres.url) == 1
    newcomer = source(outbox_postgres, lease)
    with pytest.raises(LaneLost, match="epoch"):
        newcomer.fetch(10)
    newcomer.close()


def test_what_the_claim_holds(outbox_postgres, lanes):
    event = Event("Order", "4711", "OrderPlaced", {"ü": 1.50}, headers={"tenant": "acme"})
    with psycopg.connect(outbox_postgres.url) as connection:
        Outbox().add_many(connection, [event, Event("Order", "b", "B", b"\x00\xff"), Event("Order", "t", "T")])
    source_ = source(outbox_postgres, lanes.acquire())
    first, second, third = source_.fetch(10)
    assert (first.event_id, first.aggregate_type, first.aggregate_id) == (str(event.event_id), "Order", "4711")
    assert (first.event_type, first.value, first.headers) == ("OrderPlaced", '{"ü": 1.5}'.encode(), {"tenant": "acme"})
    assert first.time.endswith("Z")
    assert "T" in first.time
    assert second.value == b"\x00\xff"
    assert third.value is None
    source_.close()


def test_an_idle_source_leaves_no_transaction_open(outbox_postgres, lanes):
    source_ = source(outbox_postgres, lanes.acquire())
    add(outbox_postgres, "a")
    settle(source_, source_.fetch(10))
    source_.flush()
    with psycopg.connect(outbox_postgres.url) as connection:
        states = connection.execute("SELECT state FROM pg_stat_activity WHERE application_name = 'test'").fetchall()
    assert states == [("idle",)]
    source_.close()


def test_errors_of_the_server_are_told_apart_from_missing_tables(outbox_postgres, lanes):
    source_ = source(outbox_postgres, lanes.acquire())
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'test'")
    with pytest.raises(Unavailable, match="reading lane 0"):
        source_.fetch(1)
    source_.close()
    source_ = source(outbox_postgres, Lease(0, 1, 30.0, 0.0), "nowhere")
    with pytest.raises(SchemaError, match="outbox db"):
        source_.fetch(1)
    source_.close()
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1/"):
        Connector("postgresql://u:secret@127.0.0.1:1/db", "test")()


# --- the floor -------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_floor_waits_for_every_transaction_that_could_commit_below_it():
    clock = Clock()
    floor = Floor(clock)
    horizon = {"xmin": 10, "xid": 20}

    def start(after: float = 1.5) -> int:
        clock.now += after
        return floor.start(draw_xid=lambda: horizon["xid"], xmin=lambda: horizon["xmin"])

    assert start() == _LOWEST
    floor.settled(100)
    assert start() == _LOWEST  # 100 becomes the candidate
    assert start(6.0) == _LOWEST  # the wait is over: xid 20 is drawn
    horizon.update(xmin=19, xid=30)
    assert start() == _LOWEST  # transaction 19 still runs
    floor.seen(None)
    assert start() == _LOWEST
    horizon.update(xmin=20)
    assert start() == _LOWEST  # they have ended; this fetch must find nothing up to 100
    floor.seen(57)
    assert start() == _LOWEST  # it found 57
    floor.seen(101)
    assert start() == 100
    assert start(61.0) == _LOWEST  # the sweep
    assert start() == 100


def test_a_forgotten_writer_holds_the_floor_and_a_reader_does_not(outbox_postgres, lanes):
    """The horizon the floor uses, on a real server: a snapshot without transaction id does not hold it."""
    source_ = source(outbox_postgres, lanes.acquire())
    with outbox_postgres.connect() as reader, outbox_postgres.connect() as writer:
        reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        reader.execute("SELECT 1").fetchone()
        drawn = source_._draw_xid()
        assert source_._xmin() >= drawn
        writer.execute("SELECT pg_current_xact_id()")
        drawn = source_._draw_xid()
        assert source_._xmin() < drawn
        add(outbox_postgres, "b")
        assert source_._xmin() < drawn
        writer.rollback()
        assert source_._xmin() >= drawn
    source_.close()


# --- plans -----------------------------------------------------------------------------------------------------------

ROWS = 200_000


@pytest.fixture(scope="module")
def crowded(outbox_postgres_server, _outbox_template):
    """200,000 live rows, and as many dead ones as 20 lanes of them would have, under an old snapshot."""
    from outbox.testing.fixtures import Database, token

    name = f"crowded_{token()}"
    insert = (
        "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, payload) "
        "SELECT 'Order', 'order-' || g %% 5000, 'T', '{\"a\": 1}' FROM generate_series(1, %s) g"
    )
    with Database(outbox_postgres_server.create_database(name, template=_outbox_template), name) as database:
        with database.connect(autocommit=True) as admin, database.connect() as old:
            admin.execute("ALTER TABLE outbox.events SET (autovacuum_enabled = off)")
            old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            old.execute("SELECT 1 FROM outbox.lanes").fetchall()
            # 20 lanes' worth: a lane holds a quarter of the rows.
            for _ in range(5):
                admin.execute(insert, (ROWS,))
                admin.execute("DELETE FROM outbox.events")
            admin.execute(insert, (ROWS,))
            yield database, admin
    outbox_postgres_server.drop_database(name)


def explain(connection: Any, query: Any, values: Any, settings: str | None = None) -> dict[str, Any]:
    connection.execute("BEGIN")
    if settings is not None:
        connection.execute(settings)
    text = query.as_string(connection)
    plan = connection.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {text}", values).fetchone()[0][0]
    connection.execute("ROLLBACK")
    return plan["Plan"]


def nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan, *(node for child in plan.get("Plans", []) for node in nodes(child))]


@pytest.mark.parametrize("analyzed", [False, True])
def test_fetching_reads_the_index_in_order_and_stops(crowded, analyzed):
    _, admin = crowded
    if analyzed:
        admin.execute("ANALYZE outbox.events")
    floor = admin.execute("SELECT min(id) - 1 FROM outbox.events").fetchone()[0]
    bound = {"lane": 1, "floor": floor, "limit": 2000, "copy": "c", "pending": [], "after": floor}
    around = explain(admin, Queries("outbox").fetch_around, bound, KEEP_TO_THE_INDEX)
    kinds = [node["Node Type"] for node in nodes(around)]
    assert not {"Sort", "Seq Scan", "Hash Anti Join"} & set(kinds), kinds
    assert around["Actual Rows"] == 2000
    plan = explain(admin, Queries("outbox").fetch, bound, KEEP_TO_THE_INDEX)
    kinds = [node["Node Type"] for node in nodes(plan)]
    assert kinds == ["Limit", "Index Scan"], kinds
    assert plan["Actual Rows"] == 2000
    # From the floor, the dead rows cost nothing: index pages and heap pages of 2,000 rows spread over four lanes.
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 3000, plan


@pytest.mark.parametrize("analyzed", [False, True])
@pytest.mark.parametrize("name", ["fetch_around", "fetch_due"])
def test_whether_a_key_waits_is_looked_up_by_the_key(crowded, name, analyzed):
    """Among thousands of failed events, for each event that is read."""
    _, admin = crowded
    admin.execute(
        "INSERT INTO outbox.failures SELECT 1, (SELECT min(id) FROM outbox.events) - g, gen_random_uuid(), 'Order', "
        "'gone-' || g, true, 1, '', now(), now(), now() - interval '1 hour' FROM generate_series(1, 5000) g"
    )
    # One that is due and stands behind all of these.
    admin.execute(
        "INSERT INTO outbox.failures SELECT lane, id, event_id, aggregate_type, aggregate_id, true, 1, '', now(), "
        "now(), now() FROM outbox.events WHERE lane = 1 ORDER BY id LIMIT 1"
    )
    if analyzed:
        admin.execute("ANALYZE outbox.failures")
    bound = {"lane": 1, "floor": 0, "limit": 1000, "copy": "c", "pending": [], "after": 0}
    try:
        plan = explain(admin, getattr(Queries("outbox"), name), bound, KEEP_TO_THE_INDEX)
    finally:
        admin.execute("TRUNCATE outbox.failures")
    assert plan["Actual Rows"] == (1 if name == "fetch_due" else 1000)
    by_key = [node for node in nodes(plan) if node.get("Index Name") == "failures_key_hash"]
    assert [node["Actual Rows"] + node.get("Rows Removed by Filter", 0) for node in by_key] in ([0], [1]), plan


@pytest.mark.parametrize("archive", [False, True])
@pytest.mark.parametrize("count", [1, 2000])
def test_settling_finds_its_rows_by_the_primary_key(crowded, count, archive):
    database, admin = crowded
    lease = table(database, "planner").acquire()
    query = "SELECT id, event_id FROM outbox.events WHERE lane = %s ORDER BY id LIMIT %s"
    ids, event_ids = (list(column) for column in zip(*admin.execute(query, (lease.lane, count)), strict=True))
    values = {"ttl": 30.0, "lane": lease.lane, "epoch": lease.epoch, "ids": ids, "event_ids": event_ids, "batch": None}
    values |= {"commit_lsn": None, "commit_number": None}
    values |= {"next_ids": ids, "next_event_ids": event_ids}
    values |= {"topics": ["t"] * count, "partitions": [0] * count, "offsets": list(range(count))}
    plan = explain(admin, Queries("outbox", archive=archive).settle, values)
    scans = [node for node in nodes(plan) if node["Node Type"].endswith("Scan") and "Actual Rows" in node]
    assert "Seq Scan" not in {scan["Node Type"] for scan in scans if scan.get("Relation Name") == "events"}, scans
    by_key = [scan for scan in scans if scan.get("Index Name") == "events_pkey"]
    assert [scan["Actual Rows"] * scan["Actual Loops"] for scan in by_key] == [count, count], scans


# --- leases ----------------------------------------------------------------------------------------------------------


def test_two_that_reach_for_lanes_at_once_never_get_the_same(outbox_postgres):
    taken: list[tuple[int, int]] = []
    barrier = threading.Barrier(4)

    def reach(number: int) -> None:
        mine = table(outbox_postgres, f"r{number}")
        barrier.wait()
        while (lease := mine.acquire()) is not None:
            taken.append((lease.lane, lease.epoch))

    threads = [threading.Thread(target=reach, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(taken) == [(0, 1), (1, 1), (2, 1), (3, 1)]


def test_a_lane_locked_by_another_is_skipped_and_not_waited_for(outbox_postgres):
    with outbox_postgres.connect() as other:
        other.execute("SELECT 1 FROM outbox.lanes WHERE lane = 0 FOR UPDATE")
        mine = table(outbox_postgres, "me")
        assert [mine.acquire().lane for _ in range(3)] == [1, 2, 3]
        assert mine.acquire() is None


def test_a_lease_runs_out_by_the_databases_clock_and_its_epoch_ends(outbox_postgres):
    mine, other = table(outbox_postgres, "me", ttl=30.0), table(outbox_postgres, "other")
    lease = mine.acquire()
    assert lease.secure
    assert mine.renew([lease]).lost == []
    with outbox_postgres.connect(autocommit=True) as admin:
        admin.execute("UPDATE outbox.lanes SET lease_until = clock_timestamp() WHERE lane = %s", (lease.lane,))
        # Nobody took it: the epoch still stands, and so does the owner.
        assert mine.renew([lease]).lost == []
        admin.execute("UPDATE outbox.lanes SET lease_until = '-infinity'")
    epochs = {taken.lane: taken.epoch for taken in iter(other.acquire, None)}
    assert epochs[lease.lane] == lease.epoch + 1
    assert mine.renew([lease]).lost == [lease]
    mine.release(lease)
    with outbox_postgres.connect() as admin:
        query = "SELECT owner FROM outbox.lanes WHERE lane = %s"
        assert admin.execute(query, (lease.lane,)).fetchone() == ("other",)


def test_the_census_counts_the_living(outbox_postgres):
    first, second = table(outbox_postgres, "first"), table(outbox_postgres, "second", ttl=0.0)
    first.beat()
    second.beat()
    first.acquire()
    census = first.census()
    assert dict(census.held) == {"first": 1}
    assert (census.lanes, census.free) == (4, 3)
    first.leave()
    with outbox_postgres.connect(autocommit=True) as admin:
        admin.execute("UPDATE outbox.relays SET alive_until = alive_until - interval '2 days'")
        first.beat()
        assert admin.execute("SELECT instance FROM outbox.relays").fetchall() == [("first",)]
        admin.execute("DELETE FROM outbox.lanes")
    with pytest.raises(SchemaError, match="no lanes"):
        first.census()
