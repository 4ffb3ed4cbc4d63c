"""What a claim of reservations looks at where many wait, or are stuck."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from external_support import in_thread, lease_runs_out, payments, provider, sink
from support import wait_until

from spark_jobs.external import reservations
from spark_jobs.external.caller import Caller
from spark_jobs.external.declaration import External
from spark_jobs.external.reservations import Chosen, ReservationAdmin

__all__ = ["provider", "sink"]


def looked_at(connection: psycopg.Connection[Any], query: str, **values: Any) -> dict[str, dict[str, Any]]:
    """Return what a statement of the caller does with each index, as EXPLAIN has it; it reads no table."""
    explained = psycopg.sql.SQL("EXPLAIN (ANALYZE, FORMAT JSON) " + query).format(
        reservations=psycopg.sql.Identifier("consumer", "reservations")
    )
    (plan,) = connection.execute(explained, {"grp": "orders", "name": "payments", **values}).fetchone()
    assert "Seq Scan" not in json.dumps(plan)

    def nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield node
        for child in node.get("Plans", []):
            yield from nodes(child)

    return {node.get("Index Name"): node for node in nodes(plan[0]["Plan"])}


def test_claiming_looks_at_few_rows_when_many_wait(sink, provider):
    """However many are settled, due, or behind one that is under way: by index, and no more than are asked for."""
    external = payments(provider.url)
    sink.reserve(external, [(f"o{n}", "hot" if n < 500 else f"k{n}") for n in range(3000)])
    with sink.connect() as connection:
        connection.execute(
            "UPDATE consumer.reservations SET state = 'confirmed', settled_at = now() WHERE id BETWEEN 1000 AND 2000"
        )
        connection.execute("VACUUM ANALYZE consumer.reservations")
        by_index = looked_at(connection, reservations._DUE, most=4, busy=["hot"], lease=30)
    assert by_index["reservations_open"]["Actual Rows"] == 4
    assert by_index["reservations_order"]["Actual Loops"] == 4


@pytest.fixture
def stuck_keys(sink, provider) -> External:
    """10,000 keys, of each one that is stuck and one behind it; and after these ten of other keys."""
    external = payments(provider.url, cancel=True)
    with sink.connect() as connection:
        for state, kind, count in (("stuck", "bad", 10_000), ("reserved", "behind", 10_000), ("reserved", "free", 10)):
            connection.execute(
                "INSERT INTO consumer.reservations (grp, name, message_id, topic, part, message_offset, order_key,"
                " request, state) SELECT 'orders', 'payments', gen_random_uuid(), 't', 0, n,"
                " CASE WHEN %(kind)s = 'free' THEN 'f' ELSE 'k' END || n, jsonb_build_object('order', %(kind)s || n),"
                " %(state)s FROM generate_series(1, %(count)s) AS n",
                {"kind": kind, "state": state, "count": count},
            )
        connection.execute("VACUUM ANALYZE consumer.reservations")
    return external


def test_what_waits_behind_stuck_ones_is_not_looked_at_by_each_claim(sink, provider, stuck_keys):
    book = reservations.Reservations("consumer", "orders", "payments", stuck_keys.rules)
    claim = {"most": 4, "busy": [], "lease": 30}
    with sink.connect() as connection:
        before = looked_at(connection, reservations._DUE, **claim)
        assert before["reservations_order"]["Actual Loops"] == 10_004
        # Whether there is something left to do: one look for each of them, and not at all stuck ones for each.
        left = looked_at(connection, reservations._LEFT)
        assert (left["reservations_order"]["Actual Loops"], left.keys() & {"reservations_attention"}) == (10_001, set())
        claims, stuck = book.claim(connection, 4, "w", 30.0, 60.0)
        assert ([one.request["order"] for one in claims], stuck) == ([f"free{n}" for n in range(1, 5)], 0)
        connection.execute("VACUUM ANALYZE consumer.reservations")
        assert looked_at(connection, reservations._DUE, **claim)["reservations_order"]["Actual Loops"] == 4
    lease_runs_out(sink)
    # However a stuck one is released, what is behind it is due at once, and goes out after it.
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


def test_one_that_is_released_while_others_are_put_back_leaves_none_behind(sink, stuck_keys):
    """In either order of the two: what waits is due when both have ended."""
    (released,) = sink.rows("SELECT message_id FROM consumer.reservations WHERE request ->> 'order' = 'bad1'")
    chosen = Chosen("orders", "payments", released)
    due = "SELECT next_attempt_at <= now() FROM consumer.reservations WHERE request ->> 'order' = 'behind1'"
    values = {"grp": "orders", "name": "payments", "most": 20_000}
    put_back = psycopg.sql.SQL(reservations._POSTPONE).format(
        reservations=psycopg.sql.Identifier("consumer", "reservations")
    )
    again = "UPDATE consumer.reservations SET state = 'stuck' WHERE message_id = %s"
    with sink.connect() as one, sink.connect() as other:
        with one.transaction():
            assert ReservationAdmin(one, "consumer").retry(chosen)
            assert other.execute(put_back, values).rowcount == 9_999
        assert sink.rows(due) == [(True,)]
        one.execute(again, released)
        with one.transaction():
            assert one.execute(put_back, values).rowcount == 1
            waiting = in_thread(lambda: ReservationAdmin(other, "consumer").retry(chosen))
            blocked = "SELECT count(*) FROM pg_locks WHERE NOT granted"
            wait_until(lambda: sink.rows(blocked) == [(1,)], what="the release to wait for the other")
        waiting.join(30)
        assert sink.rows(due) == [(True,)]
