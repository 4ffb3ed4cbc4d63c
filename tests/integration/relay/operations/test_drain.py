"""When an outbox, a topic or a lane is drained, and what holds it up."""

from __future__ import annotations

from typing import Any

import psycopg
from pause_rig import LANE, ORDERS, Rig, audit, outbox, url
from pause_support import Draining, read
from polling_support import add
from rows_and_roles import put
from support import look_up

from relay.core.pauses import ALL, Scope, ScopeKind
from relay.kafka.routing import Route, Router
from relay.operations.drain import DrainProgress
from relay.wal.lane_hash import lane_of

__all__ = ["url"]


# Drains
def _publish(url: str, condition: str, *values: Any) -> None:
    with psycopg.connect(url) as connection:
        connection.execute(f"DELETE FROM outbox.events WHERE {condition}", values)


def test_the_command_pauses_when_all_is_published(outbox_postgres, url):
    add(outbox_postgres, *(f"k{number}" for number in range(40)))
    with Rig(url) as rig:
        code, text = outbox(url, "drain", "--reason", "ledger")
        assert (code, "Drained and paused: nothing more is published." in text) == (0, True)
        assert len(rig.broker.log) == 40
        assert read(url)[ALL].unconfirmed == ()
        add(outbox_postgres, "later")
        # Where it is paused, nothing more can be drained.
        code, text = outbox(url, "drain", "--timeout", "0")
        assert (code, "1 event left; all lanes are paused" in text) == (1, True)
        assert len(rig.broker.log) == 40
    assert audit(url) == [("drain", "ledger", "all", "")]


def test_only_the_scope_must_be_empty_up_to_the_beginning(outbox_postgres, url):
    keys = {lane: next(f"k{n}" for n in range(100) if lane_of("Order", f"k{n}", 4) == lane) for lane in range(4)}
    add(outbox_postgres, keys[1], keys[2])
    with Draining(url, LANE, ALL, ORDERS) as draining:
        left = draining.look()
        assert not any(one.drained for one in left.values())
        assert left[LANE] == DrainProgress(drained=False, events=1, causes=["no relay is running"])
        assert left[ALL].events == 2
        ((last,),) = look_up(url, "SELECT max(id) FROM outbox.events")
        # Written later: not waited for.
        add(outbox_postgres, keys[1])
        _publish(url, "lane = 1 AND id <= %s", last)
        assert {scope: one.drained for scope, one in draining.look().items()} == {LANE: True, ALL: False, ORDERS: False}
        _publish(url, "id <= %s", last)
        assert draining.drained()


def test_a_topic_is_drained_when_no_type_that_leads_to_it_is_left(outbox_postgres, url):
    router = Router(
        {"Order": Route("sales"), "Return": Route("sales"), "Bill": Route("bills", dead_letter_topic="dead")}
    )
    sales, dead = Scope(ScopeKind.TOPIC, "sales"), Scope(ScopeKind.TOPIC, "dead")
    with psycopg.connect(url) as connection:
        connection.execute(
            "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, headers, from_relay) "
            "SELECT kind, 'k', 'T', headers, true FROM (VALUES ('Bill', NULL), ('Other', NULL), ('Return', NULL), "
            "('Bill', '{\"outbox-dead-letter\": \"x\"}'::jsonb)) AS v(kind, headers)"
        )
    with Draining(url, sales, dead, router=router) as draining:
        assert {scope: one.events for scope, one in draining.look().items()} == {sales: 1, dead: 1}
        _publish(url, "aggregate_type = 'Return'")
        assert {scope: one.events for scope, one in draining.look().items()} == {sales: 0, dead: 1}
        assert not draining.drained()
        _publish(url, "headers IS NOT NULL")
        assert draining.drained()


def test_an_open_transaction_of_before_is_waited_for_and_named(outbox_postgres, url):
    with psycopg.connect(url, application_name="slow writer") as old, psycopg.connect(url) as later:
        old.execute("SELECT pg_current_xact_id()")
        with Draining(url, ALL) as draining:
            later.execute("SELECT pg_current_xact_id()")
            (left,) = draining.look().values()
            assert not left.drained
            (_, cause) = left.causes
            assert "(slow writer)" in cause
            put(old, "outbox.events")
            old.commit()
            # The later one is open, and nothing waits for it.
            (left,) = draining.look().values()
            assert (left.drained, left.events) == (False, 1)
            _publish(url, "true")
            assert draining.drained()


def test_a_key_behind_a_dead_letter_holds_the_drain_and_is_named(outbox_postgres, url):
    add(outbox_postgres, "k1")
    with psycopg.connect(url) as connection:
        connection.execute(
            "INSERT INTO outbox.failures (lane, id, event_id, aggregate_type, aggregate_id, blocks, attempts, "
            "last_error, first_failed_at, last_failed_at, next_attempt_at) "
            "SELECT lane, id - 1, gen_random_uuid(), aggregate_type, "
            "aggregate_id, true, 5, 'bad', now(), now(), 'infinity' FROM outbox.events"
        )
    with Draining(url, ALL) as draining:
        (left,) = draining.look().values()
    assert not left.drained
    assert any("dead letters block keys of lane" in cause for cause in left.causes)
