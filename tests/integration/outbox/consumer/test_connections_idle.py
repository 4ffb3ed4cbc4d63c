"""How many statements and sessions a driver and its tasks need; the monitor of locks has its own."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from consumer_group import ConsumerGroup
from counting import Counting
from plans import blocks, nodes
from psycopg import sql
from rows_and_roles import put
from sessions_support import NAME, later, run, sessions, terminate, url
from support import look_up, wait_until

from outbox.consumer import connections
from outbox.consumer.errors import Fenced
from outbox.consumer.model import StoredOffset
from spark_jobs.postgres import lock_monitor as blockers
from spark_jobs.postgres.group_store import PostgresGroupStore
from spark_jobs.postgres.lock_monitor import LockMonitor
from spark_jobs.task import partition as task

__all__ = ["later", "url"]


@pytest.fixture
def counting(url) -> Iterator[Counting]:
    ConsumerGroup(url).begin([0, 1])
    with Counting(url) as proxy:
        yield proxy
        connections.close_all()


def test_an_idle_round_is_one_statement_and_no_connection(counting):
    store = PostgresGroupStore(counting.url, "consumer", "g", "test")
    asked: dict[str, Callable[[], object]] = {
        "state": lambda: store.state(["t"], 1, keep_order=True),
        "stored": lambda: store.stored(["t"]),
    }
    asked["state"]()
    counting.statements.clear()
    for name, ask_it in asked.items():
        ask_it()
        assert len(counting.statements) == 1, (name, counting.statements)
        counting.statements.clear()
    assert counting.opened == 1


def test_tasks_of_a_process_share_a_session(counting):
    group = ConsumerGroup(counting.url)
    plan = group.plan(0, 0, 5, {}, "")
    task.step_over(plan, [("t", 0)])
    counting.statements.clear()
    task.step_over(replace(plan, ranges={("t", 1): plan.ranges["t", 0]}), [("t", 1)])
    assert counting.opened == 1
    kinds = Counter(statement.split()[0] for statement in counting.statements)
    assert kinds == {b"BEGIN": 1, b"SELECT": 1, b"UPDATE": 1, b"COMMIT": 1, b"DISCARD": 1}


def dead_letter(url: str, offset: int, key: bytes, state: str, reason: str) -> None:
    put(url, "consumer.dead_letters", message_offset=offset, message_key=key, state=state, reason=reason)


def test_the_state_of_a_group(url):
    ConsumerGroup(url).begin([0, 1])
    store = PostgresGroupStore(url, "consumer", "g", "test")

    def waits(keep_order: bool) -> bool:
        stored, retry_waits = store.state(["t"], 1, keep_order=keep_order)
        assert stored == dict.fromkeys([("t", 0), ("t", 1)], StoredOffset("topic-id", 0))
        assert bool(store.retried(["t"], 10, keep_order=keep_order)) == retry_waits
        return retry_waits

    assert (waits(False), waits(True)) == (False, False)
    dead_letter(url, 1, b"a", "dead", "failed")
    dead_letter(url, 2, b"a", "dead", "behind")
    assert (waits(False), waits(True)) == (False, False)
    # Nothing is in front of it any more.
    run(url, "DELETE FROM consumer.dead_letters WHERE message_offset = 1")
    assert (waits(False), waits(True)) == (False, True)
    run(url, "DELETE FROM consumer.dead_letters")
    dead_letter(url, 3, b"b", "retry", "failed")
    assert (waits(False), waits(True)) == (True, True)
    # Of other topics nothing is asked.
    assert store.state(["other"], 1, keep_order=True) == ({}, False)
    with pytest.raises(Fenced, match="generation 1 now, by test"):
        store.state(["t"], 7, keep_order=False)
    with pytest.raises(Fenced, match="its row is gone"):
        PostgresGroupStore(url, "consumer", "nobody", "test").state(["t"], 1, keep_order=False)


@pytest.mark.parametrize("keep_order", [False, True])
def test_whether_dead_letters_wait_is_read_in_an_index(url, keep_order):
    """Thousands that are dead, and some that wait behind them; another group retries, or has, thousands."""
    ConsumerGroup(url).begin([0])
    run(
        url,
        "INSERT INTO consumer.dead_letters (grp, topic, topic_id, part, message_offset, message_key, message_headers, "
        "message_time, reason, error, state) SELECT grp, 't', 'topic-id', 0, n, (n %% 5000)::text::bytea, '[]', now(), "
        "CASE WHEN n < 10000 THEN 'failed' ELSE 'behind' END, repeat('x', 500), "
        "CASE WHEN grp = 'g' OR %s THEN 'dead' ELSE 'retry' END "
        "FROM generate_series(1, 10010) AS n, unnest('{g,other}'::text[]) AS grp",
        keep_order,
    )
    run(url, "ANALYZE consumer.dead_letters")
    store = PostgresGroupStore(url, "consumer", "g", "test")
    explained = sql.SQL("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {}").format(store._state_query(keep_order))
    values = {"grp": "g", "topics": ["t"]}
    [(found,)] = connections.read(url, NAME, explained, values)
    letters = [node for node in nodes(found[0]["Plan"]) if node.get("Relation Name") == "dead_letters"]
    assert letters
    assert all("Index" in node["Node Type"] for node in letters), found
    assert blocks(found[0]["Plan"]) < (30 if not keep_order else 3000), found


# The lock monitor.


def test_the_lock_monitor_keeps_a_session_and_replaces_it(url, monkeypatch):
    monkeypatch.setattr(blockers, "CHECK_SECONDS", 0.05)
    group = "Bestellungen für Käufer"
    driver, _ = blockers.names(group)
    name = connections.application_name(f"outbox watch {group}")
    reports: list[str] = []
    run(url, "CREATE TABLE numbers (n int)")
    with LockMonitor(url, group, lambda text, figures: reports.append(f"{text} {figures['waiting']}")):
        (first,) = wait_until(lambda: sessions(url, name), what="the monitor's session")

        def looks() -> Any:
            query = "SELECT query_start FROM pg_stat_activity WHERE application_name = %s"
            return look_up(url, query, name)

        begun = looks()
        wait_until(lambda: looks() != begun, what="another look")
        assert sessions(url, name) == [first]
        terminate(url, first)
        wait_until(lambda: sessions(url, name), what="another session")
        with psycopg.connect(url) as blocker:
            blocker.execute("LOCK TABLE numbers")

            def wait() -> None:
                with connections.transaction(url, driver, reset=False) as connection:
                    connection.execute("SELECT count(*) FROM public.numbers")

            waiting = threading.Thread(target=wait)
            waiting.start()
            wait_until(lambda: reports, what="a report")
            blocker.rollback()
            waiting.join(30)
    assert reports == [f"waiting for a lock {driver}"]
    wait_until(lambda: sessions(url, name) == [], what="the session's end")


def test_the_lock_monitor_takes_a_prepared_transaction_for_no_session():
    """pg_blocking_pids says 0, https://www.postgresql.org/docs/current/functions-info.html."""
    found = blockers._figures("outbox consumer g", 0, "no application_name", "?", "?", 0)
    assert "pg_prepared_xacts" in found["blocked_by"]
    assert "pg_terminate_backend" not in found["to_end_it"]
