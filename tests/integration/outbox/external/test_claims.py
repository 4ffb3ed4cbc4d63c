"""What a claim of reservations looks at where 20,000 wait behind one call, or behind many that are stuck."""

from __future__ import annotations

from collections import Counter
from typing import Any, LiteralString

import psycopg
import pytest
from external_support import in_thread, lease_runs_out, payments, provider, sink
from plans import blocks, nodes
from psycopg import sql
from support import wait_until

from outbox.consumer import statements
from outbox.external import External, reservations
from outbox.external.caller import Caller
from outbox.external.reservations import Answered, Chosen, ReservationAdmin, Reservations
from outbox.external.state_machine import Answer

__all__ = ["provider", "sink"]

MANY = 20_000
INSERT = """
INSERT INTO consumer.reservations (grp, name, message_id, topic, part, message_offset, order_key, request, state)
SELECT 'orders', 'payments', gen_random_uuid(), 't', 0, n, CASE %(key)s WHEN 'own' THEN 'k' || n ELSE %(key)s END,
       jsonb_build_object('order', %(kind)s || n), %(state)s
  FROM generate_series(1, %(count)s) AS n"""
PARK_MOST = """
UPDATE consumer.reservations SET parked = true, next_attempt_at = now() + interval '1 hour'
 WHERE order_key = 'hot' AND state = 'reserved' AND message_offset > 1 AND message_offset < %s"""
WAITING = {"grp": "orders", "name": "payments", "window": reservations._WINDOW, "most": 4, "lease": 30, "clock": 0.0}


def insert(connection: psycopg.Connection[Any], kind: str, count: int, key: str, state: str = "reserved") -> None:
    connection.execute(INSERT, {"kind": kind, "count": count, "key": key, "state": state})


def statement(query: LiteralString) -> sql.Composed:
    parts = {"front": reservations._FRONT, "earlier": reservations._EARLIER}
    composed = {name: statements.statement("consumer", part) for name, part in parts.items()}
    return statements.statement("consumer", query, **composed)


def explain(connection: psycopg.Connection[Any], query: str, **values: Any) -> tuple[int, dict[str, int]]:
    """Return the blocks that a statement reads, and the rows of each of its nodes, by index; and roll it back."""
    with connection.transaction(force_rollback=True):
        explained = sql.SQL("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) ") + statement(query)
        ((plan,),) = connection.execute(explained, WAITING | values).fetchone()
    assert "Seq Scan" not in str(plan)
    rows: Counter[str] = Counter()
    for node in nodes(plan["Plan"]):
        name = node.get("Index Name", node["Node Type"])
        rows[name] += (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
    # Without what an UPDATE itself does: each of its rows has an entry in several indexes.
    top = plan["Plan"]
    if top["Node Type"] == "ModifyTable":
        (top,) = (node for node in top["Plans"] if node["Parent Relationship"] == "Outer")
    return blocks(top), rows


@pytest.fixture(params=["no statistics", "analyzed when it was empty", "analyzed"])
def behind_one(sink, request) -> External:
    """One key with 20,000 calls, and ten of other keys that were reserved after them."""
    with sink.connect() as connection:
        connection.execute("ALTER TABLE consumer.reservations SET (autovacuum_enabled = off)")
        if request.param == "analyzed when it was empty":
            connection.execute("VACUUM ANALYZE consumer.reservations")
        insert(connection, "hot", MANY, "hot")
        insert(connection, "free", 10, "own")
        if request.param == "analyzed":
            connection.execute("ANALYZE consumer.reservations")
    return payments("http://localhost", lease=3600.0, on_confirmed=None)


def claim_all(book: Reservations, connection: psycopg.Connection[Any], most: int = 4) -> list[reservations.ClaimedCall]:
    """Claim as a caller does: again without a pause while more may be due. Returns the claims."""
    claims: list[reservations.ClaimedCall] = []
    while len(claims) < most:
        more, stuck = book.claim(connection, most - len(claims))
        assert stuck == 0
        claims += more
        if not book.more_due:
            break
    return claims


def settle(book: Reservations, connection: psycopg.Connection[Any], claim: reservations.ClaimedCall) -> None:
    change, failed = book.settle(connection, Answered(claim, claim.step, Answer("done"), until=0.0, jitter=0.5))
    assert (change is not None and change.state, failed) == ("confirmed", None)


def test_few_of_20_000_behind_one_key_are_looked_at_and_one_is_released_at_a_time(sink, behind_one):
    """A claim parks them, and the next one is released when the one before is settled."""
    book = Reservations(behind_one)
    hot: list[reservations.ClaimedCall] = []
    with sink.connect() as connection:
        # Before the first call is claimed, and while it is under way.
        for expected in (["hot1"], []):
            for query in (reservations._DUE, reservations._PARK, reservations._UNPARK):
                read, rows = explain(connection, query)
                # The 20,000 are on more pages.
                assert read < 9 * reservations._WINDOW
                assert max(rows.values()) <= 2 * reservations._WINDOW, (query, rows)
            claims, _ = book.claim(connection, 1)
            assert [claim.request["order"] for claim in claims] == expected
            hot += claims
        # A claim that finds too few parks a window, and the next one looks at the next.
        assert book.more_due
        count = "SELECT count(*) FROM consumer.reservations WHERE parked"
        assert sink.rows(count) == [(reservations._WINDOW,)]
        connection.execute(PARK_MOST, [MANY - 1000])
        found = claim_all(book, connection)
        assert [claim.request["order"] for claim in found] == [f"free{n}" for n in range(1, 5)]
        assert len(claim_all(book, connection, 100)) == 6
        assert sink.rows(count) == [(MANY - 1,)]
        # From now on what waits costs nothing, also while the dead versions of its rows are still there.
        for query in (reservations._DUE, reservations._PARK, reservations._NEXT_DUE):
            read, rows = explain(connection, query)
            assert max(rows.values()) <= 10, (query, rows)
        for number in range(1, 6):
            (claim,) = hot
            assert claim.request["order"] == f"hot{number}"
            (row,) = sink.rows("SELECT id FROM consumer.reservations WHERE message_id = %s", claim.message_id)
            read, rows = explain(connection, reservations._RELEASE, order_key="hot", id=row[0])
            assert (read < 100, max(rows.values())) == (True, 1)
            settle(book, connection, claim)
            # Exactly one is released, and no other is looked at.
            due = "SELECT request ->> 'order' FROM consumer.reservations WHERE state = 'reserved' AND NOT parked"
            assert sink.rows(due) == [(f"hot{number + 1}",)]
            hot, _ = book.claim(connection, 4)


@pytest.fixture
def stuck_keys(sink, provider) -> External:
    """2,000 keys, of each one that is stuck and one behind it; and after these ten of other keys."""
    with sink.connect() as connection:
        insert(connection, "bad", 2_000, "own", "stuck")
        insert(connection, "behind", 2_000, "own")
        insert(connection, "free", 10, "own")
        connection.execute(
            "UPDATE consumer.reservations SET order_key = request ->> 'order' WHERE message_offset > 0 "
            "AND request ->> 'order' LIKE 'free%'"
        )
    return payments(provider.url, cancel=True)


def test_what_waits_behind_stuck_ones_is_parked_and_follows_them(sink, provider, stuck_keys):
    book = Reservations(stuck_keys)
    with sink.connect() as connection:
        claims = claim_all(book, connection)
        assert [claim.request["order"] for claim in claims] == [f"free{n}" for n in range(1, 5)]
        assert max(explain(connection, reservations._DUE)[1].values()) <= 10
    lease_runs_out(sink)
    # However a stuck one is released, what is behind it is due with its settlement, and goes out after it.
    ids = dict(sink.rows("SELECT request ->> 'order', message_id FROM consumer.reservations"))
    with sink.connect() as connection:
        desk = ReservationAdmin(connection, "consumer")
        assert desk.retry(Chosen("orders", "payments", [ids["bad1"]])) == [str(ids["bad1"])]
        assert desk.cancel(Chosen("orders", "payments", [ids["bad2"]]), "no") == [str(ids["bad2"])]
    for number, confirmed in ((3, True), (4, False)):
        Caller(stuck_keys, sink.connect).settle_by_hand(ids[f"bad{number}"], confirmed=confirmed, why="asked")
    done = sink.drain(stuck_keys)
    assert (done["confirmed"], done["cancelled"]) == (10 + 1 + 4, 1)
    states = sink.states()
    assert {states[f"behind{number}"] for number in range(1, 5)} == {"confirmed"}
    assert (states["behind5"], states["bad5"]) == ("reserved", "stuck")
    assert [name for name in provider.effects() if name.endswith("1") and name != "free1"] == ["bad1", "behind1"]
    assert {state for order, state in states.items() if order.startswith("free")} == {"confirmed"}


def test_a_parked_call_that_is_cancelled_is_not_parked_any_more(sink):
    """No call is behind one that is not there: a caller must find it due at once."""
    external = payments("http://localhost", cancel=True)
    sink.reserve(external, [(f"o{n}", "k") for n in range(2)])
    with sink.connect() as connection:
        with connection.transaction():
            assert connection.execute(statement(reservations._PARK), WAITING).rowcount == 1
        ((parked,),) = sink.rows("SELECT message_id FROM consumer.reservations WHERE parked")
        desk = ReservationAdmin(connection, "consumer")
        assert desk.cancel(Chosen("orders", "payments", [parked]), "no") == [str(parked)]
        assert sink.rows("SELECT state, parked FROM consumer.reservations ORDER BY id") == [
            ("reserved", False),
            ("cancelling", False),
        ]
        connection.execute("UPDATE consumer.reservations SET state = 'stuck', parked = true WHERE state = 'cancelling'")
        assert desk.retry(Chosen("orders", "payments", [parked])) == [str(parked)]
        assert sink.rows("SELECT count(*) FROM consumer.reservations WHERE parked") == [(0,)]


def test_one_that_is_settled_while_others_are_parked_leaves_none_behind(sink):
    """In either order of the two: the next one is due when both have ended."""
    external = payments("http://localhost", lease=3600.0, on_confirmed=None)
    sink.reserve(external, [(f"o{n}", "k") for n in range(3)])
    book = Reservations(external)
    due = "SELECT request ->> 'order' FROM consumer.reservations WHERE state = 'reserved' AND NOT parked ORDER BY id"
    park = statement(reservations._PARK)
    with sink.connect() as one, sink.connect() as other:
        (first,) = sink.rows("SELECT message_id FROM consumer.reservations ORDER BY id LIMIT 1")
        one.execute(
            "UPDATE consumer.reservations SET state = 'calling', attempts = 1, next_attempt_at = now() + "
            "interval '1 hour' WHERE message_id = %s",
            first,
        )
        claim = reservations.ClaimedCall("call", first[0], 1, {}, None, "t", 0, 0)
        with one.transaction():
            settle(book, one, claim)
            # What is being settled can't be relied on, but the one after it, which is open, can.
            assert other.execute(park, WAITING).rowcount == 1
        assert sink.rows(due) == [("o1",)]
        (second,), _ = book.claim(one, 1)
        one.execute("UPDATE consumer.reservations SET parked = false, next_attempt_at = now() WHERE parked")
        with one.transaction():
            assert one.execute(park, WAITING).rowcount == 1
            waiting = in_thread(lambda: settle(book, other, second))
            blocked = "SELECT count(*) FROM pg_locks WHERE NOT granted"
            wait_until(lambda: sink.rows(blocked) == [(1,)], what="the settlement to wait for the other")
        waiting.join(30)
        assert sink.rows(due) == [("o2",)]


def test_two_settlements_of_a_key_at_once_release_what_is_behind_both(sink):
    """A call that was committed late goes out beside a later one of its key; see _DUE."""
    external = payments("http://localhost", lease=3600.0, on_confirmed=None)
    sink.reserve(external, [(f"o{n}", "k") for n in range(3)])
    book = Reservations(external)
    with sink.connect() as one, sink.connect() as other:
        one.execute(
            "UPDATE consumer.reservations SET parked = (message_offset = 2), attempts = 1, "
            "state = CASE message_offset WHEN 2 THEN 'reserved' ELSE 'calling' END"
        )
        ids = [row[0] for row in sink.rows("SELECT message_id FROM consumer.reservations ORDER BY id")]
        first, second = (reservations.ClaimedCall("call", ids[n], 1, {}, None, "t", 0, n) for n in range(2))
        with one.transaction():
            settle(book, one, second)
            waiting = in_thread(lambda: settle(book, other, first))
            blocked = "SELECT count(*) FROM pg_locks WHERE NOT granted"
            wait_until(lambda: sink.rows(blocked) == [(1,)], what="the settlement to wait for the other")
        waiting.join(30)
        assert sink.states() == {"o0": "confirmed", "o1": "confirmed", "o2": "reserved"}
        assert sink.rows("SELECT count(*) FROM consumer.reservations WHERE parked") == [(0,)]


def test_what_was_parked_behind_a_deleted_call_is_due_again(sink, provider):
    external = payments(provider.url)
    sink.reserve(external, [(f"o{n}", "k") for n in range(3)])
    with sink.connect() as connection:
        claim_all(Reservations(external), connection)
        assert connection.execute("DELETE FROM consumer.reservations WHERE state = 'calling'").rowcount == 1
        assert sink.drain(external) == {}
        connection.execute("UPDATE consumer.reservations SET next_attempt_at = now() WHERE parked")
    # Not by what is left, which ends the run before: as the next run sees it, an hour later.
    sink.drain(external, until="due")
    sink.drain(external)
    assert sink.states() == {"o1": "confirmed", "o2": "confirmed"}
    assert provider.effects() == ["o1", "o2"]


def test_two_callers_work_through_keys_with_hundreds_of_calls_in_order(sink, provider):
    """Some are retried, some are refused and some taken back: each releases the next of its key."""
    external = payments(provider.url, cancel=True, workers=3)
    names = [(f"o{n}", f"key{n % 3}") for n in range(60)]
    for n in (3, 4, 5):
        provider.tell(f"o{n}", "500", "drop")
        provider.tell(f"o{n + 3}", "refuse")
        provider.tell(f"o{n + 6}", "done-drop", "refuse")
    sink.reserve(external, names)
    counts: list[dict[str, int]] = []
    threads = [in_thread(lambda: counts.append(sink.drain(external))) for _ in range(2)]
    for thread in threads:
        thread.join(120)
    assert sum(count.get("confirmed", 0) for count in counts) == 54
    assert sum(count.get("cancelled", 0) for count in counts) == 6
    assert not sink.rows("SELECT FROM consumer.reservations WHERE settled_at IS NULL OR parked")
    order = [name for _, _, _, name in provider.requests() if name.startswith("o")]
    for key in range(3):
        firsts = list(
            dict.fromkeys(name for name in order if name in {one for one, its in names if its == f"key{key}"})
        )
        assert firsts == [one for one, its in names if its == f"key{key}"]


def test_settled_calls_do_not_put_off_the_vacuum_of_open_ones(sink):
    """By default a fifth of the table may be dead rows: after years of settled calls, millions."""
    with sink.connect() as connection:
        options = connection.execute(
            "SELECT reloptions FROM pg_class WHERE oid = 'consumer.reservations'::regclass"
        ).fetchone()
    assert options == (["autovacuum_vacuum_scale_factor=0.01"],)
