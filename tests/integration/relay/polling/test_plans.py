"""Plans of the polling source's hot queries, with statistics, without them and with wrong ones."""

from __future__ import annotations

from typing import Any

import pytest
from plans import PLANS, blocks, by_index_only, explain, forget_rows, nodes
from polling_support import polling, table
from support import tried

from relay.core.marker import Marker
from relay.core.ports import Claim, LaneLost, Receipt
from relay.polling import session
from relay.polling.queries import Queries
from relay.settle.settlement import Settlement, UnsettledBatch
from relay.settle.statements import array

ROWS = 34_000
DEAD = 5 * ROWS
"""Ids up to here are those of dead rows. What a test looks up for itself is above them, and found at once."""


@pytest.fixture(scope="module")
def crowded(outbox_postgres_server, _outbox_template):
    """34,000 live rows, and as many dead ones as 20 lanes of them would have, under an old snapshot."""
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


@pytest.fixture(scope="module", params=["analyzed when it was empty", "analyzed"])
def statistics(crowded, request):
    """What the planner knows. Between two bursts, or under an old snapshot, the table has pages and no rows."""
    _, admin = crowded
    if request.param == "analyzed":
        admin.execute("ANALYZE outbox.events")
    elif request.param == "analyzed when it was empty":
        forget_rows(admin, "outbox.events")
    return crowded


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
        "unsettled": "{}",
        "max_bytes": 4 << 20,
        "turn_bytes": 16 << 20,
        "left_types": ["Cart"],
        "left_copies": [False],
        "copy": "c",
    } | more


@pytest.mark.parametrize(("name", "plans"), list(zip(["read", "read_some"], PLANS, strict=True)))
def test_reading_all_lanes_follows_the_index_and_stops(statistics, name, plans):
    _, admin = statistics
    plan = explain(admin, getattr(Queries("outbox"), name), read_values(admin, 500), plans=plans, to_the_index=True)
    assert plan["Actual Rows"] == 2000
    by_index_only(plan)
    # From the mark, the dead rows cost nothing: index pages and heap pages of 2,000 rows, read twice.
    assert blocks(plan) < 4000, plan


@pytest.mark.parametrize("plans", PLANS)
@pytest.mark.parametrize("name", ["read", "read_skip_blocked", "read_late", "read_due"])
def test_thousands_of_unsettled_events_are_passed_over_by_hash(statistics, name, plans, request):
    """The turn before, which is being published: each row is looked up once, whatever plan is kept."""
    _, admin = statistics
    above = before_the_first(admin)
    query = "SELECT id FROM outbox.events WHERE lane = 1 AND id > %s ORDER BY id LIMIT 6000"
    ids = [id_ for (id_,) in admin.execute(query, (DEAD,))]
    values = read_values(admin, 0, unsettled=array(ids[:5000]))
    values |= {"lane": 1, "limit": 500, "due": 500, "late": array(ids[4000:])}
    values |= {"above": above, "after": ids[4999]} if name != "read" else {}
    if name == "read":
        values |= {"lanes": "{1}", "above": array([above]), "after": array([ids[4999]]), "limits": "{500}"}
    if name == "read_due":
        request.addfinalizer(lambda: admin.execute("TRUNCATE outbox.failures"))
        admin.execute(
            "INSERT INTO outbox.failures SELECT lane, id, event_id, aggregate_type, aggregate_id, true, 1, '', now(), "
            "now(), now() FROM outbox.events WHERE lane = 1 AND id = %s",
            (ids[5500],),
        )
    plan = explain(admin, getattr(Queries("outbox"), name), values, plans=plans, to_the_index=True)
    filters = [str(node.get("Filter")) for node in nodes(plan) if "SubPlan" in str(node.get("Filter"))]
    lists = [node for node in nodes(plan) if node["Node Type"] == "ProjectSet" and node["Actual Rows"] == 5000]
    assert any("hashed" in text for text in filters), filters
    # A hash table for each place in the statement, and not a pass for each row.
    assert {node["Actual Loops"] for node in lists} == {1}, lists


def test_a_session_keeps_its_plans(statistics):
    """Postgres would plan each small turn anew, which takes longer than to execute it."""
    database, admin = statistics
    admin.execute("UPDATE outbox.lanes SET lease_until = '-infinity'")
    source = polling(database.url, table(database, "kept").acquire(4))
    for _ in range(12):
        batches = source.fetch(dict.fromkeys(range(4), 2)).batches
        assert source.settle({lane: Receipt(UnsettledBatch(batch)) for lane, batch in batches.items()}) == {}
    assert source.flush(range(4)) == {}
    query = "SELECT custom_plans, generic_plans FROM pg_prepared_statements"
    kept = source.connection.execute(query).fetchall()
    assert len(kept) >= 3
    assert all(custom == 0 for custom, _ in kept), kept
    source.close()


@pytest.mark.parametrize(
    ("name", "plans"), list(zip(["read_skip_blocked", "read_some_skip_blocked"], PLANS, strict=True))
)
def test_reading_around_failures_follows_the_index_and_stops(statistics, name, plans):
    _, admin = statistics
    above = before_the_first(admin)
    values = read_values(admin, 0, lane=1, above=above, after=above, limit=2000)
    plan = explain(admin, getattr(Queries("outbox"), name), values, plans=plans, to_the_index=True)
    assert plan["Actual Rows"] == 2000
    by_index_only(plan)


def test_a_window_of_a_sweep_follows_the_index_and_stops(statistics):
    _, admin = statistics
    values = read_values(admin, 0, lane=1, window=5000, most=500, mark=1 << 40)
    values["above"] = before_the_first(admin)
    plan = explain(admin, Queries("outbox").sweep, values, plans=PLANS[1], to_the_index=True)
    scans = [node for node in nodes(plan) if node.get("Relation Name") == "events"]
    assert [(scan["Node Type"], scan["Actual Rows"]) for scan in scans] == [("Index Scan", 5000)], scans
    # Index pages, and heap pages of 5,000 rows of one of four lanes, many of them on each.
    assert sum(blocks(scan) for scan in scans) < 500


def test_late_events_are_read_by_their_ids(statistics):
    _, admin = statistics
    query = "SELECT id FROM outbox.events WHERE lane = 1 AND id > %s ORDER BY id OFFSET 5000 LIMIT 500"
    late = "{" + ",".join(str(id_) for (id_,) in admin.execute(query, (DEAD,))) + "}"
    values = read_values(admin, 0, lane=1, late=late, limit=2000)
    plan = explain(admin, Queries("outbox").read_late, values, plans=PLANS[1], to_the_index=True)
    assert plan["Actual Rows"] == 500
    by_index_only(plan)
    assert blocks(plan) < 6000, plan


@pytest.mark.parametrize(
    ("name", "plans"),
    list(zip(["read_skip_blocked", "read_due", "read_some_due", "read_some_skip_blocked"], PLANS * 2, strict=True)),
)
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
    # Nor is each failure compared with each event, which took 15 s; an event is with the types that are left out.
    assert sum(node.get("Rows Removed by Join Filter", 0) for node in nodes(plan)) < 5000, plan
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


@pytest.mark.parametrize(
    ("each", "archive", "plans"), [(1, False, PLANS[1]), (500, True, PLANS[0]), (500, False, PLANS[1])]
)
def test_settling_finds_the_rows_of_all_lanes_by_the_primary_key(statistics, each, archive, plans):
    database, admin = statistics
    settlement = Settlement(admin, "outbox", archive=archive)
    admin.execute("UPDATE outbox.lanes SET lease_until = '-infinity'")
    for lease in table(database, "planner").acquire(4):
        settlement.hold(lease)
    claims = published_claims(admin, each)
    for lane, rows in claims.items():
        settlement.lanes[lane].unsettled = UnsettledBatch(rows)
    plan = explain(
        admin,
        settlement.statements.settle,
        settlement._values(settlement._new(range(4))),
        plans=plans,
        to_the_index=True,
    )
    scans = [node for node in nodes(plan) if node["Node Type"].endswith("Scan") and "Actual Rows" in node]
    assert "Seq Scan" not in {scan["Node Type"] for scan in scans if scan.get("Relation Name") == "events"}, scans
    by_key = [scan for scan in scans if scan.get("Index Name") == "events_pkey"]
    assert [round(scan["Actual Rows"] * scan["Actual Loops"]) for scan in by_key] == [sum(map(len, claims.values()))]
    # No list is compared with each row of another one.
    compared = sum(node.get("Rows Removed by Join Filter", 0) * node["Actual Loops"] for node in nodes(plan))
    assert compared <= 4 * sum(map(len, claims.values())), plan


def test_behind_a_pooler_nothing_is_read_from_end_to_end(statistics, monkeypatch):
    """Where no setting outlives its transaction: reading, settling, what is refused, and taking a lane over."""
    monkeypatch.setattr(session, "begin_session", lambda *_: False)
    database, admin = statistics
    admin.execute("UPDATE outbox.lanes SET lease_until = '-infinity'")
    leases = table(database, "pooled").acquire(4)
    source = polling(database.url, leases, policy=tried(1000, 600.0, 600.0), archive=True)

    def rows_read() -> int:
        # What a session has counted is shown a second later, or with its next statement: that of earlier tests too.
        for one in (source.connection, admin):
            one.execute("SELECT pg_stat_force_next_flush()")
        query = "SELECT seq_tup_read FROM pg_stat_user_tables WHERE relid = 'outbox.events'::regclass"
        return admin.execute(query).fetchone()[0]

    before = rows_read()
    limits = dict.fromkeys(range(4), 500)
    for _ in range(3):
        batches = source.fetch(limits).batches
        assert [len(batch) for batch in batches.values()] == [500] * 4
        receipts = {lane: Receipt(UnsettledBatch(batch)) for lane, batch in batches.items()}
        *fine, last = batches[0]
        receipts[0] = Receipt(UnsettledBatch(fine), [(last, "bad")])
        assert source.settle(receipts) == {}
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


@pytest.mark.parametrize(("archive", "plans"), list(zip([False, True], PLANS, strict=True)))
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
                lane.unsettled = UnsettledBatch(number=batch)
            assert settlement.settle(range(4)) == {}

    def lanes_blocks(query: Any, values: dict[str, Any] | None = None) -> int:
        plan = explain(admin, query, values or settlement._values(settlement._new(range(4))), to_the_index=True)
        scans = [node for node in nodes(plan) if node.get("Relation Name") == "lanes" and "Scan" in node["Node Type"]]
        assert not [scan for scan in scans if scan["Node Type"] == "Seq Scan"], scans
        return sum(blocks(scan) for scan in scans)

    turns(1, 1)
    with outbox_postgres.connect() as old:
        old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        old.execute("SELECT 1 FROM outbox.lanes").fetchall()
        turns(2, 1000)
        # The pages of all versions, and of one.
        assert lanes_blocks(settlement.statements.settle) > 30
        assert lanes_blocks(settlement.statements.settle_by_version) <= 16
        assert lanes_blocks(*settlement.still_held_query(range(4))) <= 4
        # Whatever others write meanwhile: it is found again, and no lease or number is lost.
        admin.execute("UPDATE outbox.lanes SET streaming = NOT streaming")
        with outbox_postgres.connect() as look:
            found = look.execute(*settlement.still_held_query(range(4))).fetchall()
        assert found == []
        assert settlement.lost_lanes(range(4), found) == {}
        turns(1002, 1)
        for lane in settlement.lanes.values():
            lane.lease._until = 0.0
        assert list(control.renew(leases[:2]).lost) == []
        turns(1003, 2)
    assert admin.execute("SELECT DISTINCT last_batch FROM outbox.lanes").fetchall() == [(1004,)]
    assert all(lease.remaining_seconds > 500 for lease in leases)
    admin.execute("UPDATE outbox.lanes SET epoch = epoch + 1 WHERE lane = 3")
    for lane in settlement.lanes.values():
        lane.unsettled = UnsettledBatch(number=1005)
    assert {lane: type(error) for lane, error in settlement.settle(range(4)).items()} == {3: LaneLost}
    assert admin.execute("SELECT lane, last_batch FROM outbox.lanes ORDER BY lane").fetchall() == [
        (0, 1005),
        (1, 1005),
        (2, 1005),
        (3, 1004),
    ]
