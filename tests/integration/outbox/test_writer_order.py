"""Ids follow the list's order; with lock_key, also the order of commits per key."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from plans import nodes
from support import wait_until
from writer_targets import event, numbers, stored, waits_for_a_lock

from outbox import Event, Outbox
from outbox._statements import LOCK_SEED, insert_many

outbox = Outbox()


@pytest.mark.parametrize("lock_key", [False, True])
def test_ids_follow_the_lists_order_at_any_length(outbox_postgres, lock_key):
    """Long enough for the planner to choose another plan, with keys that sort against the list."""
    events = [event(n, f"k{(5000 - n) // 5:05}") for n in range(1, 5001)]
    with outbox_postgres.connect() as connection:
        outbox.add_many(connection, events, lock_key=lock_key)
    assert numbers(outbox_postgres) == list(range(1, 5001))


@pytest.mark.parametrize("many", [False, True], ids=["add", "add_many"])
def test_the_second_writer_of_a_key_draws_its_id_after_the_firsts_commit(outbox_postgres, many):
    with outbox_postgres.connect() as first, outbox_postgres.connect() as second, ThreadPoolExecutor(1) as pool:
        outbox.add(first, event(1), lock_key=True)

        def write() -> None:
            if many:
                outbox.add_many(second, [event(3, "free"), event(4)], lock_key=True)
            else:
                outbox.add(second, event(4), lock_key=True)
            second.commit()

        writing = pool.submit(write)
        wait_until(lambda: waits_for_a_lock(outbox_postgres, second), 10, "the second writer waits")
        # Drawn while the other statement waits: had that one drawn its ids first, they would be lower.
        outbox.add(first, event(2), lock_key=True)
        assert not writing.done()
        first.commit()
        writing.result(60)
    assert numbers(outbox_postgres) == ([1, 2, 3, 4] if many else [1, 2, 4])


def test_other_keys_and_writers_without_the_lock_do_not_wait(outbox_postgres):
    with outbox_postgres.connect() as first, outbox_postgres.connect() as second:
        second.execute("SET lock_timeout = '60s'")
        outbox.add(first, event(1), lock_key=True)
        outbox.add(second, event(2, "another"), lock_key=True)
        # The same id of another type is another aggregate.
        outbox.add(second, Event("Invoice", "o-1", "T", {"n": 3}), lock_key=True)
        outbox.add(second, event(4))
        second.commit()
        assert numbers(outbox_postgres) == [2, 3, 4]
        second.execute("SET lock_timeout = '20ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            outbox.add(second, event(5), lock_key=True)


def test_id_order_is_commit_order_per_key_under_load(outbox_postgres):
    """Each transaction reads the key's counter under the lock; without the lock two would read the same."""
    with outbox_postgres.connect(autocommit=True) as connection:
        connection.execute("CREATE TABLE counters (key text PRIMARY KEY, n int NOT NULL)")
        connection.execute("INSERT INTO counters SELECT 'k' || g, 0 FROM generate_series(0, 3) g")

    def write(worker: int) -> None:
        with outbox_postgres.connect() as connection:
            for turn in range(60):
                key = f"k{(worker + turn) % 4}"
                outbox.add(connection, Event("Order", key, "Locked", {"n": None}), lock_key=True)
                n = connection.execute("UPDATE counters SET n = n + 1 WHERE key = %s RETURNING n", (key,)).fetchone()[0]
                outbox.add(connection, Event("Order", key, "Counted", {"n": n}), lock_key=turn % 2 == 0)
                connection.commit()

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(write, worker) for worker in range(4)]:
            done.result(60)
    rows = stored(outbox_postgres)
    for key in ("k0", "k1", "k2", "k3"):
        mine = [row for row in rows if row["aggregate_id"] == key]
        assert [row["event_type"] for row in mine] == ["Locked", "Counted"] * 60
        assert [row["payload"]["n"] for row in mine[1::2]] == list(range(1, 61))


def test_many_keys_in_opposite_order_do_not_deadlock(outbox_postgres):
    keys = [f"k{n}" for n in range(200)]
    start = threading.Barrier(3)

    def write(order: list[str]) -> None:
        with psycopg.connect(outbox_postgres.url) as connection:
            for _ in range(40):
                start.wait(60)
                outbox.add_many(connection, [event(1, key) for key in order], lock_key=True)
                connection.commit()

    with ThreadPoolExecutor(3) as pool:
        orders = (keys, keys[::-1], keys[100:] + keys[:100])
        for done in [pool.submit(write, order) for order in orders]:
            done.result(120)
    assert len(stored(outbox_postgres)) == 3 * 40 * 200


def test_the_locks_are_sorted_and_taken_before_any_id_is_drawn(outbox_postgres):
    """What the tests above show by running, the plan shows for every case."""
    values = {
        "event_id": ["00000000-0000-0000-0000-000000000000"] * 3,
        "aggregate_type": ["Order"] * 3,
        "aggregate_id": ["a", "b", "a"],
        "event_type": ["T"] * 3,
        "payload": [None, "{}", None],
        "payload_bytes": [b"x", None, None],
        "headers": [None] * 3,
    }
    statement = insert_many("outbox", lock_key=True).psycopg.decode()
    with outbox_postgres.connect() as connection:
        # What need not be sorted is hashed then: a DISTINCT alone would perhaps sort as well.
        connection.execute("SET enable_sort = off")
        plan = connection.execute(f"EXPLAIN (FORMAT JSON, VERBOSE) {statement}", values).fetchone()[0][0]["Plan"]
    (locks,) = (node for node in nodes(plan) if node.get("Subplan Name") == "CTE locks")
    assert any("pg_advisory_xact_lock" in each for each in locks["Output"])
    assert any(node["Node Type"] == "Sort" and "hashtextextended" in str(node["Sort Key"]) for node in nodes(locks))
    # The filter that waits for the locks lies below the node that draws the ids.
    (drawing,) = (node for node in nodes(plan) if any("nextval" in each for each in node.get("Output", [])))
    assert any("One-Time Filter" in node for node in nodes(drawing))


def test_plain_sql_can_take_the_same_lock(outbox_postgres):
    lock = f"SELECT pg_try_advisory_xact_lock(hashtextextended(%s, hashtextextended(%s, {LOCK_SEED})))"
    with outbox_postgres.connect() as first, outbox_postgres.connect() as second:
        outbox.add(first, event(1, "o-1"), lock_key=True)
        assert second.execute(lock, ("o-1", "Order")).fetchone() == (False,)
        assert second.execute(lock, ("o-2", "Order")).fetchone() == (True,)
        # What an application would lock by a hash of its own is something else.
        own = "SELECT pg_try_advisory_xact_lock(hashtextextended(%s, 0)), pg_try_advisory_xact_lock(hashtext(%s))"
        assert second.execute(own, ("o-1", "o-1")).fetchone() == (True, True)
        first.rollback()
