"""The polling source on real Postgres: order, late commits, fencing, low-water marks, plans of hot queries, leases."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest
from one_lane import OneLane
from support import backlog, wait_until

from outbox import Event, Outbox, SchemaError
from relay.database import Connector
from relay.kafka.routing import Router
from relay.lanes import LaneTable
from relay.lease import Lease
from relay.marker import Marker
from relay.polling import low_water_mark, session
from relay.polling.low_water_mark import LOWEST, LowWaterMarks
from relay.polling.queries import Queries
from relay.polling.source import PollingSource
from relay.ports import PUBLISHED, Claim, LaneLost, Receipt, Refused, Unavailable
from relay.retries import FailurePolicy, Failures
from relay.settlement import Settlement, UnsettledBatch
from relay.statements import KEEP_TO_THE_INDEX


@pytest.fixture
def lanes(outbox_postgres):
    """One lane for the whole outbox, so that a test sees all its events."""
    from outbox._app import migrate as db

    db.change_lanes(outbox_postgres.url, 1)
    return table(outbox_postgres, "me")


def table(database, me: str, ttl: float = 30.0) -> LaneTable:
    return LaneTable(database.connect(autocommit=True), "outbox", me, "0", ttl)


def taken(table: LaneTable) -> Lease:
    (lease,) = table.acquire()
    return lease


def source(database, lease, schema: str = "outbox") -> OneLane:
    failures = Failures(schema, FailurePolicy(), Router())
    return OneLane(PollingSource(Connector(database.url, "test"), schema, failures), lease)


def add(database, *names: str) -> None:
    with psycopg.connect(database.url) as connection:
        Outbox().add_many(connection, [Event("Order", name, "T", {"n": name}) for name in names])


def fetched(claims: Any) -> list[str]:
    return [claim.aggregate_id for claim in claims]


def settle(source: OneLane, claims: Any) -> None:
    source.settle(Receipt([(claim, PUBLISHED) for claim in claims]))


def test_fetch_gives_the_same_until_settled(outbox_postgres, lanes):
    source_ = source(outbox_postgres, taken(lanes))
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
    source_ = source(outbox_postgres, taken(lanes))
    add(outbox_postgres, "a", "b")
    settle(source_, source_.fetch(1))
    source_.flush()
    source_.close()
    with outbox_postgres.connect() as connection:
        assert connection.execute("SELECT aggregate_id FROM outbox.events").fetchall() == [("b",)]


def test_nothing_is_given_that_postgres_could_still_lose(outbox_postgres, lanes):
    """A writer without synchronous commit, a role without it too: the fetch flushes what it read."""
    source_ = source(outbox_postgres, taken(lanes))
    source_.source.connection.execute("SET synchronous_commit = off")
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
    source_ = source(outbox_postgres, taken(lanes))
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
    lease = taken(lanes)
    source_ = source(outbox_postgres, lease)
    add(outbox_postgres, "a")
    claims = source_.fetch(10)
    lanes.release([lease])
    assert taken(table(outbox_postgres, "other")).epoch == lease.epoch + 1
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
    source_ = source(outbox_postgres, taken(lanes))
    first, second, third = source_.fetch(10)
    assert (first.event_id, first.aggregate_type, first.aggregate_id) == (str(event.event_id), "Order", "4711")
    assert (first.event_type, first.value, first.headers) == ("OrderPlaced", '{"ü": 1.5}'.encode(), {"tenant": "acme"})
    assert first.time.endswith("Z")
    assert "T" in first.time
    assert second.value == b"\x00\xff"
    assert third.value is None
    source_.close()


def test_an_idle_source_leaves_no_transaction_open(outbox_postgres, lanes):
    source_ = source(outbox_postgres, taken(lanes))
    add(outbox_postgres, "a")
    settle(source_, source_.fetch(10))
    source_.flush()
    with psycopg.connect(outbox_postgres.url) as connection:
        states = connection.execute("SELECT state FROM pg_stat_activity WHERE application_name = 'test'").fetchall()
    assert states == [("idle",)]
    source_.close()


def test_errors_of_the_server_are_told_apart_from_missing_tables(outbox_postgres, lanes):
    source_ = source(outbox_postgres, taken(lanes))
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


# --- low-water marks -------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Marks:
    """Low-water marks with a clock and a horizon that a test sets. A read of all lanes each 1.5 seconds."""

    def __init__(self, *lanes: int) -> None:
        self.lanes = lanes
        self.clock = Clock()
        self.marks = LowWaterMarks(self.clock)
        self.xmin, self.xid, self.drawn = 10, 20, 0
        self.read: low_water_mark.Marks

    def start(self, after: float = 1.5) -> dict[int, int]:
        """Begin a read; return above which ids it looks."""
        self.clock.now += after
        self.read = self.marks.start(self.lanes, draw_xid=self._draw, xmin=lambda: self.xmin)
        return self.read.above

    def seen(self, *lowest: int | None) -> None:
        """End the read: the lowest id that it found in each lane."""
        for lane, each in zip(self.lanes, lowest, strict=True):
            self.marks.seen(self.read, lane, each)

    def _draw(self) -> int:
        self.drawn += 1
        return self.xid


def test_a_mark_waits_for_every_transaction_that_could_commit_below_it():
    marks = Marks(0)
    low = {0: LOWEST}
    assert marks.start() == low
    marks.marks.settled(0, 100)
    assert marks.start() == low  # 100 becomes the candidate
    marks.seen(101)
    assert marks.start(6.0) == low  # the wait is over: xid 20 is drawn
    marks.seen(101)
    marks.xmin, marks.xid = 19, 30
    assert marks.start() == low  # transaction 19 still runs
    marks.seen(None)
    assert marks.start() == low
    marks.xmin = 20
    assert marks.start() == low  # they have ended; this read must find nothing up to 100
    marks.seen(57)
    assert marks.start() == low  # it found 57
    marks.seen(101)
    assert marks.start() == {0: 100}
    assert marks.start(61.0) == low  # the sweep
    assert marks.start() == {0: 100}
    assert marks.drawn == 1


def test_the_marks_of_many_lanes_rise_with_one_transaction_id_each_by_what_it_read_itself():
    marks = Marks(*range(256))
    for lane in range(256):
        marks.marks.settled(lane, 1000 + lane)
    marks.start()
    marks.start(6.0)
    marks.xmin = 20
    # Begun before the transactions had ended: proves nothing.
    stale = marks.read
    marks.start()
    for lane in range(256):
        marks.marks.seen(stale, lane, None)
    assert set(marks.start().values()) == {LOWEST}
    marks.seen(*([7, None] * 128))
    above = marks.start()
    assert above == {lane: 1000 + lane if lane % 2 else LOWEST for lane in range(256)}
    assert marks.drawn == 1
    marks.marks.reset(1)
    assert marks.start()[1] == LOWEST
    # What is settled meanwhile is the next round's; lanes that still have low rows do not hold the others up for good.
    marks.marks.settled(3, 5000)
    marks.start(61.0)
    marks.start()
    marks.seen(*([7] * 256))
    marks.start(6.0)
    marks.start(6.0)
    marks.start()
    marks.seen(*([None] * 256))
    assert marks.start()[3] == 5000


@pytest.fixture
def quick_marks(monkeypatch):
    """The waits between the steps of a mark are left out."""
    monkeypatch.setattr(low_water_mark, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(low_water_mark, "_SETTLE_SECONDS", 0.0)


def below(database, source_: OneLane, reads: int = 10) -> bool:
    """Return whether rows below what was settled last are still found after a few reads."""
    for _ in range(reads):
        settle(source_, source_.fetch(10))
    with database.connect(autocommit=True) as admin:
        admin.execute(
            "INSERT INTO outbox.events (id, aggregate_type, aggregate_id, event_type) OVERRIDING SYSTEM VALUE "
            "VALUES (-1, 'Order', 'probe', 'probe')"
        )
        claims = source_.fetch(10)
        admin.execute("DELETE FROM outbox.events WHERE id = -1")
    return "probe" in fetched(claims)


def test_a_forgotten_writer_holds_the_mark_and_a_reader_does_not(outbox_postgres, lanes, quick_marks):
    """The horizon that marks use, on a real server: a snapshot without transaction id does not hold it."""
    source_ = source(outbox_postgres, taken(lanes))
    add(outbox_postgres, "a")
    with outbox_postgres.connect() as reader, outbox_postgres.connect() as writer:
        writer.execute("SELECT pg_current_xact_id()")
        assert below(outbox_postgres, source_)
        add(outbox_postgres, "b")
        assert below(outbox_postgres, source_)
        reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        reader.execute("SELECT 1").fetchone()
        writer.rollback()
        wait_until(lambda: not below(outbox_postgres, source_), what="the mark to rise")
        assert reader.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
    source_.close()


def test_a_late_commit_under_a_rising_mark_is_found(outbox_postgres, lanes, quick_marks):
    source_ = source(outbox_postgres, taken(lanes))
    with outbox_postgres.connect() as late:
        Outbox().add(late, Event("Order", "late", "T"))
        for number in range(20):
            add(outbox_postgres, str(number))
            claims = source_.fetch(10)
            assert fetched(claims) == [str(number)]
            settle(source_, claims)
        late.commit()
    add(outbox_postgres, "last")
    assert fetched(source_.fetch(10)) == ["late", "last"]
    source_.close()


# --- plans -----------------------------------------------------------------------------------------------------------

ROWS = 200_000
DEAD = 5 * ROWS
"""Ids up to here are those of dead rows. What a test looks up for itself is above them, and found at once."""


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
            for _ in range(DEAD // ROWS):
                admin.execute(insert, (ROWS,))
                admin.execute("DELETE FROM outbox.events")
            admin.execute(insert, (ROWS,))
            assert admin.execute("SELECT min(id), max(id) FROM outbox.events").fetchone() == (DEAD + 1, DEAD + ROWS)
            yield database, admin
    outbox_postgres_server.drop_database(name)


# A connection keeps plans: after some executions the server may take one that fits any values.
PLANS = ["force_custom_plan", "force_generic_plan"]


@pytest.fixture(scope="module", params=["no statistics", "analyzed when it was empty", "analyzed"])
def statistics(crowded, request):
    """What the planner knows. Between two bursts, or under an old snapshot, the table has pages and no rows."""
    _, admin = crowded
    if request.param == "analyzed":
        admin.execute("ANALYZE outbox.events")
    elif request.param == "analyzed when it was empty":
        admin.execute(
            "UPDATE pg_class SET reltuples = 0, relpages = pg_relation_size(oid) / 8192 WHERE oid = ANY(ARRAY("
            "SELECT 'outbox.events'::regclass::oid UNION SELECT indexrelid FROM pg_index "
            "WHERE indrelid = 'outbox.events'::regclass))"
        )
    return crowded


def explain(connection: Any, query: Any, values: Any, *, plans: str = PLANS[0], to_the_index: bool) -> dict[str, Any]:
    connection.execute("BEGIN")
    connection.execute("SELECT set_config('plan_cache_mode', %s, true)", (plans,))
    if to_the_index:
        connection.execute(KEEP_TO_THE_INDEX, {"local": True})
    text = query.as_string(connection)
    plan = connection.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {text}", values).fetchone()[0][0]
    connection.execute("ROLLBACK")
    return plan["Plan"]


def nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan, *(node for child in plan.get("Plans", []) for node in nodes(child))]


def by_index_only(plan: dict[str, Any]) -> None:
    """No table is read from end to end, no backlog sorted or hashed."""
    found = nodes(plan)
    assert not [node for node in found if node["Node Type"] == "Seq Scan"], plan
    for node in found:
        if node["Node Type"] in {"Sort", "Incremental Sort", "Hash", "Materialize", "Bitmap Index Scan"}:
            # Of the lists that were bound, at most.
            assert node["Actual Rows"] * node["Actual Loops"] <= 2000, (node["Node Type"], plan)


def blocks(plan: dict[str, Any]) -> int:
    return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]


def before_the_first(admin: Any) -> int:
    return admin.execute("SELECT min(id) - 1 FROM outbox.events WHERE id > %s", (DEAD,)).fetchone()[0]


def read_values(admin: Any, each: int, **more: Any) -> dict[str, Any]:
    above = before_the_first(admin)
    every = "{" + ",".join([str(above)] * 4) + "}"
    return {
        "lanes": "{0,1,2,3}",
        "above": every,
        "after": every,
        "limits": "{" + ",".join([str(each)] * 4) + "}",
        "pending": "{}",
        "max_bytes": 4 << 20,
        "turn_bytes": 16 << 20,
        "left_types": ["Cart"],
        "left_copies": [False],
        "copy": "c",
    } | more


@pytest.mark.parametrize("plans", PLANS)
@pytest.mark.parametrize("name", ["read", "read_some"])
def test_reading_all_lanes_follows_the_index_and_stops(statistics, name, plans):
    _, admin = statistics
    plan = explain(admin, getattr(Queries("outbox"), name), read_values(admin, 500), plans=plans, to_the_index=True)
    assert plan["Actual Rows"] == 2000
    by_index_only(plan)
    # From the mark, the dead rows cost nothing: index pages and heap pages of 2,000 rows, read twice.
    assert blocks(plan) < 12_000, plan


@pytest.mark.parametrize("plans", PLANS)
@pytest.mark.parametrize("name", ["read_skip_blocked", "read_some_skip_blocked"])
def test_reading_around_failures_follows_the_index_and_stops(statistics, name, plans):
    _, admin = statistics
    above = before_the_first(admin)
    values = read_values(admin, 0, lane=1, above=above, after=above, limit=2000)
    plan = explain(admin, getattr(Queries("outbox"), name), values, plans=plans, to_the_index=True)
    assert plan["Actual Rows"] == 2000
    by_index_only(plan)


@pytest.mark.parametrize("plans", PLANS)
@pytest.mark.parametrize("name", ["read_skip_blocked", "read_due", "read_some_skip_blocked", "read_some_due"])
def test_whether_a_key_waits_is_looked_up_by_the_key(statistics, name, plans, request):
    """Among thousands of failed events, for each event that is read."""
    _, admin = statistics
    admin.execute(
        "INSERT INTO outbox.failures SELECT 1, %s - g, gen_random_uuid(), 'Order', "
        "'gone-' || g, true, 1, '', now(), now(), now() - interval '1 hour' FROM generate_series(0, 4999) g",
        (before_the_first(admin),),
    )
    # One that is due and stands behind all of these.
    admin.execute(
        "INSERT INTO outbox.failures SELECT lane, id, event_id, aggregate_type, aggregate_id, true, 1, '', now(), "
        "now(), now() FROM outbox.events WHERE lane = 1 AND id > %s ORDER BY id LIMIT 1",
        (DEAD,),
    )
    if "analyzed" in request.node.callspec.id:
        admin.execute("ANALYZE outbox.failures")
    values = read_values(admin, 0, lane=1, above=0, after=0, limit=1000, due=500)
    try:
        plan = explain(admin, getattr(Queries("outbox"), name), values, plans=plans, to_the_index=True)
    finally:
        admin.execute("TRUNCATE outbox.failures")
    assert plan["Actual Rows"] == (1 if "due" in name else 1000)
    assert not [node for node in nodes(plan) if node.get("Relation Name") == "events" and "Seq" in node["Node Type"]]
    by_key = [node for node in nodes(plan) if node.get("Index Name") == "failures_key_hash"]
    assert by_key, plan
    for node in by_key:
        # A few for each event, and not the 5,000.
        assert node["Actual Rows"] + node.get("Rows Removed by Filter", 0) <= 1, plan


def published_claims(admin: Any, each: int) -> dict[int, list[Claim]]:
    query = "SELECT id, event_id::text FROM outbox.events WHERE lane = %s AND id > %s ORDER BY id LIMIT %s"
    return {
        lane: [
            Claim(id_, event_id, "Order", "k", "T", "", None, None, lane=lane)
            for id_, event_id in admin.execute(query, (lane, DEAD, each)).fetchall()
        ]
        for lane in range(4)
    }


@pytest.mark.parametrize("plans", PLANS)
@pytest.mark.parametrize("archive", [False, True])
@pytest.mark.parametrize("each", [1, 500])
def test_settling_finds_the_rows_of_all_lanes_by_the_primary_key(statistics, each, archive, plans):
    database, admin = statistics
    settlement = Settlement(admin, "outbox", archive=archive)
    admin.execute("UPDATE outbox.lanes SET lease_until = '-infinity'")
    for lease in table(database, "planner").acquire(4):
        settlement.hold(lease)
    claims = published_claims(admin, each)
    for lane, rows in claims.items():
        settlement.lanes[lane].pending = UnsettledBatch.of(Receipt([(claim, PUBLISHED) for claim in rows]))
    rows = [claim for each_ in claims.values() for claim in each_]
    for query, read in ((settlement.statements.settle, ()), (settlement.statements.settle_and_count, rows)):
        values = settlement.values(range(4), read)
        plan = explain(admin, query, values, plans=plans, to_the_index=True)
        scans = [node for node in nodes(plan) if node["Node Type"].endswith("Scan") and "Actual Rows" in node]
        assert "Seq Scan" not in {scan["Node Type"] for scan in scans if scan.get("Relation Name") == "events"}, scans
        by_key = [scan for scan in scans if scan.get("Index Name") == "events_pkey"]
        found = [round(scan["Actual Rows"] * scan["Actual Loops"]) for scan in by_key]
        assert found == [len(rows)] * (2 if read else 1), scans


@pytest.mark.parametrize("archive", [False, True])
def test_behind_a_pooler_nothing_is_read_from_end_to_end(statistics, archive, monkeypatch):
    """Where no setting outlives its transaction: reading, settling, what is refused, and taking a lane over."""
    monkeypatch.setattr(session, "begin_session", lambda _: False)
    database, admin = statistics
    admin.execute("UPDATE outbox.lanes SET lease_until = '-infinity'")
    failures = Failures("outbox", FailurePolicy(1000, 600.0, 600.0), Router())
    source = PollingSource(Connector(database.url, "test"), "outbox", failures, archive=archive)
    leases = table(database, "pooled").acquire(4)
    for lease in leases:
        source.hold(lease)

    def rows_read() -> int:
        source.connection.execute("SELECT pg_stat_force_next_flush()")
        query = "SELECT seq_tup_read FROM pg_stat_user_tables WHERE relid = 'outbox.events'::regclass"
        return admin.execute(query).fetchone()[0]

    before = rows_read()
    limits = dict.fromkeys(range(4), 500)
    for _ in range(3):
        batches = source.fetch(limits).batches
        assert [len(batch) for batch in batches.values()] == [500] * 4
        receipts = {lane: [(claim, PUBLISHED) for claim in batch] for lane, batch in batches.items()}
        receipts[0][-1] = receipts[0][-1][0], Refused("bad")
        assert source.settle({lane: Receipt(results) for lane, results in receipts.items()}) == {}
    assert source.flush(range(4)) == {}
    claims = source.fetch(limits).batches[1]
    for batch, rows in ((1, ()), (2, claims)):
        ids = tuple(claim.position for claim in rows), tuple(claim.event_id for claim in rows)
        identity, _ = source.store.identity(leases)
        (lease,) = [lease for lease in leases if lease.lane == 1]
        assert identity is not None
        source.store.adopt(
            lease, Marker(batch, lease.epoch, identity.system_identifier, identity.timeline, *ids), "own"
        )
    assert rows_read() == before
    source.close()
    admin.execute("UPDATE outbox.lanes SET last_batch = NULL, transactional_id = NULL WHERE lane = 1")
    admin.execute("TRUNCATE outbox.failures")


@pytest.mark.parametrize("plans", PLANS)
@pytest.mark.parametrize("archive", [False, True])
def test_settling_by_a_marker_finds_its_rows_by_the_primary_key(statistics, archive, plans):
    _, admin = statistics
    rows = published_claims(admin, 2000)[1]
    values = {"lane": 1, "ids": [row.position for row in rows], "event_ids": [row.event_id for row in rows]}
    plan = explain(admin, Queries("outbox", archive=archive).settle_marker, values, plans=plans, to_the_index=True)
    scans = [node for node in nodes(plan) if node.get("Relation Name") == "events" and "Scan" in node["Node Type"]]
    assert "Seq Scan" not in {scan["Node Type"] for scan in scans}, scans
    by_key = [node for node in nodes(plan) if node.get("Index Name") == "events_pkey"]
    assert [round(node["Actual Rows"] * node["Actual Loops"]) for node in by_key] == [2000], plan


def test_a_lanes_row_is_found_at_once_among_its_dead_versions(outbox_postgres):
    """Exactly-once writes each lane's row in each turn, and a session that holds the xmin keeps all versions of it."""
    admin = outbox_postgres.connect(autocommit=True)
    control = table(outbox_postgres, "me", 600.0)
    leases = control.acquire(4)
    settlement = Settlement(outbox_postgres.connect(autocommit=True), "outbox")
    for lease in leases:
        settlement.hold(lease)

    def turns(first: int, count: int) -> None:
        for batch in range(first, first + count):
            for lane in settlement.lanes.values():
                lane.pending = UnsettledBatch(batch=batch)
            assert settlement.settle(range(4)) == {}

    def lanes_blocks(query: Any, values: dict[str, Any] | None = None) -> int:
        plan = explain(admin, query, values or settlement.values(range(4)), to_the_index=True)
        scans = [node for node in nodes(plan) if node.get("Relation Name") == "lanes" and "Scan" in node["Node Type"]]
        assert not [scan for scan in scans if scan["Node Type"] == "Seq Scan"], scans
        return sum(blocks(scan) for scan in scans)

    turns(1, 1)
    with outbox_postgres.connect() as old:
        old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        old.execute("SELECT 1 FROM outbox.lanes").fetchall()
        turns(2, 2000)
        # The pages of all versions, and of one.
        assert lanes_blocks(settlement.statements.settle) > 60
        assert lanes_blocks(settlement.statements.settle_by_version) <= 16
        assert lanes_blocks(*settlement.still_held(range(4))) <= 4
        # Whatever others write meanwhile: it is found again, and no lease or number is lost.
        admin.execute("UPDATE outbox.lanes SET streaming = NOT streaming")
        with outbox_postgres.connect() as look:
            found = look.execute(*settlement.still_held(range(4))).fetchall()
        assert found == []
        assert settlement.lost_of(range(4), found) == {}
        turns(2002, 1)
        for lane in settlement.lanes.values():
            lane.lease._until = 0.0
        assert list(control.renew(leases[:2]).lost) == []
        turns(2003, 2)
    assert admin.execute("SELECT DISTINCT last_batch FROM outbox.lanes").fetchall() == [(2004,)]
    assert all(lease.remaining_seconds > 500 for lease in leases)
    admin.execute("UPDATE outbox.lanes SET epoch = epoch + 1, protocol_epoch = epoch + 1 WHERE lane = 3")
    for lane in settlement.lanes.values():
        lane.pending = UnsettledBatch(batch=2005)
    assert {lane: type(error) for lane, error in settlement.settle(range(4)).items()} == {3: LaneLost}
    assert admin.execute("SELECT lane, last_batch FROM outbox.lanes ORDER BY lane").fetchall() == [
        (0, 2005),
        (1, 2005),
        (2, 2005),
        (3, 2004),
    ]


# --- leases ----------------------------------------------------------------------------------------------------------


def test_two_that_reach_for_lanes_at_once_never_get_the_same(outbox_postgres):
    found: list[tuple[int, int]] = []
    barrier = threading.Barrier(4)

    def reach(number: int) -> None:
        mine = table(outbox_postgres, f"r{number}")
        barrier.wait()
        while leases := mine.acquire(1):
            found.extend((lease.lane, lease.epoch) for lease in leases)

    threads = [threading.Thread(target=reach, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(found) == [(0, 1), (1, 1), (2, 1), (3, 1)]


def test_a_lane_locked_by_another_is_skipped_and_not_waited_for(outbox_postgres):
    with outbox_postgres.connect() as other:
        other.execute("SELECT 1 FROM outbox.lanes WHERE lane = 0 FOR UPDATE")
        mine = table(outbox_postgres, "me")
        assert [lease.lane for lease in mine.acquire(4)] == [1, 2, 3]
        assert mine.acquire(4) == []


@pytest.mark.parametrize("count", [4, 256])
def test_a_locked_lane_does_not_keep_the_others_from_being_renewed(outbox_postgres, count):
    from outbox._app import migrate as db

    db.change_lanes(outbox_postgres.url, count)
    connection = outbox_postgres.connect(autocommit=True)
    # Instead of waiting for the lock.
    connection.execute("SET lock_timeout = '1s'")
    mine = LaneTable(connection, "outbox", "me", "0", 30.0)
    leases = mine.acquire(count)
    # A lease that was prolonged lately is left to the worker.
    before = mine.renew(leases)
    assert (before.lost, before.switched) == ([], [])
    for lease in leases:
        lease._until -= 15.0
    until = "SELECT lane, lease_until FROM outbox.lanes"
    with outbox_postgres.connect() as other, outbox_postgres.connect(autocommit=True) as admin:
        before = dict(admin.execute(until).fetchall())
        other.execute("SELECT 1 FROM outbox.lanes WHERE lane = 2 FOR UPDATE")
        renewal = mine.renew(leases)
        assert (renewal.lost, renewal.switched) == ([], [])
        after = dict(admin.execute(until).fetchall())
        assert [lane for lane in after if after[lane] == before[lane]] == [2]
        other.rollback()
        mine.renew(leases)
        assert dict(admin.execute(until).fetchall())[2] > before[2]


def test_a_lease_runs_out_by_the_databases_clock_and_its_epoch_ends(outbox_postgres):
    mine, other = table(outbox_postgres, "me", ttl=30.0), table(outbox_postgres, "other")
    lease = taken(mine)
    assert lease.secure
    assert mine.renew([lease]).lost == []
    with outbox_postgres.connect(autocommit=True) as admin:
        admin.execute("UPDATE outbox.lanes SET lease_until = clock_timestamp() WHERE lane = %s", (lease.lane,))
        # Nobody took it: the epoch still stands, and so does the owner.
        assert mine.renew([lease]).lost == []
        admin.execute("UPDATE outbox.lanes SET lease_until = '-infinity'")
    epochs = {lease.lane: lease.epoch for lease in other.acquire(4)}
    assert epochs[lease.lane] == lease.epoch + 1
    assert mine.renew([lease]).lost == [lease]
    mine.release([lease])
    with outbox_postgres.connect() as admin:
        query = "SELECT owner FROM outbox.lanes WHERE lane = %s"
        assert admin.execute(query, (lease.lane,)).fetchone() == ("other",)


def test_the_census_counts_the_living(outbox_postgres):
    first, second = table(outbox_postgres, "first"), table(outbox_postgres, "second", ttl=0.0)
    first.beat()
    second.beat()
    taken(first)
    distribution = first.distribution()
    assert dict(distribution.held) == {"first": 1}
    assert (distribution.lanes, distribution.free) == (4, 3)
    first.leave()
    with outbox_postgres.connect(autocommit=True) as admin:
        admin.execute("UPDATE outbox.relays SET alive_until = alive_until - interval '2 days'")
        first.beat()
        first.forget_dead()
        assert admin.execute("SELECT instance FROM outbox.relays").fetchall() == [("first",)]
        admin.execute("DELETE FROM outbox.lanes")
    with pytest.raises(SchemaError, match="no lanes"):
        first.distribution()
