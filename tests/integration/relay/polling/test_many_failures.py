"""What a turn costs while much waits: 20,000 failures in a lane, and a dead letter among 60,000 dead rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from plans import PLANS, blocks, by_index_only, explain
from polling_worker import Worker, quick_marks, settle, workers
from rows_and_roles import put
from support import wait_until

from relay.core.ports import Receipt
from relay.operations.dead_letters import DeadLetters, Selection
from relay.polling.queries import Queries
from relay.polling.source import PollingSource

__all__ = ["quick_marks", "workers"]

MANY = 20_000


def fail(worker: Worker, count: int) -> None:
    """Rows that wait: every other one for an operator, the others for a later attempt; each blocks its key."""
    worker.admin.execute(
        "WITH rows AS (INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, payload) "
        "SELECT 'Order', 'failed-' || g, 'T', '{}' FROM generate_series(1, %s) g RETURNING *) "
        "INSERT INTO outbox.failures "
        "SELECT lane, id, event_id, aggregate_type, aggregate_id, true, 1, '', now(), now(), "
        "CASE WHEN id %% 2 = 0 THEN 'infinity' ELSE now() + interval '1 day' END FROM rows",
        (count,),
    )


def index_entries(source: PollingSource, worker: Worker, table: str) -> Callable[[], int]:
    """Return a function that returns how many index entries of a table were visited since its last call."""
    query = "SELECT sum(idx_tup_read)::bigint FROM pg_stat_user_indexes WHERE relid = %s::regclass"
    last = 0

    def visited() -> int:
        nonlocal last
        for connection in (source.connection, worker.admin):
            connection.execute("SELECT pg_stat_force_next_flush()")
        before, (last,) = last, worker.admin.execute(query, (f"outbox.{table}",)).fetchone()
        return int(last - before)

    return visited


def test_turns_beside_20000_failures_do_not_read_them(workers, quick_marks):
    worker = workers(1)
    fail(worker, MANY)
    source = worker.source()
    failures, events = (index_entries(source, worker, table) for table in ("failures", "events"))

    def turn(looked_at: float = 0.0) -> tuple[int, int]:
        """A turn with 20 events of other keys. Returns the visited entries of both tables."""
        worker.insert(20)
        source.reader._looked_at = looked_at
        (batch,) = source.fetch(worker.limits()).batches.values()
        assert len(batch) == 20
        settle(source, {0: batch})
        return failures(), events()

    # It loads them once, and its mark rises above them.
    wait_until(lambda: turn()[1] < 500, 60, "the mark to rise")
    cost = [turn(float("inf")) for _ in range(10)]
    assert max(of_failures for of_failures, _ in cost) < 200, cost
    assert max(of_events for _, of_events in cost) < 500, cost
    # One that comes due among them costs no more.
    worker.admin.execute("UPDATE outbox.failures SET next_attempt_at = now() WHERE id = 10001")
    (due,) = source.fetch(worker.limits()).batches.values()
    assert [claim.position for claim in due] == [10001]
    source.settle({0: Receipt(refused=[(due[0], "bad")])})
    assert failures() < 200
    # One that an operator frees is found by the next event of its key, without loading the others anew.
    (event_id,) = worker.admin.execute("SELECT event_id::text FROM outbox.failures WHERE id = 14001").fetchone()
    assert DeadLetters(worker.admin, "outbox").discard(Selection([event_id]), "test")
    put(worker.admin, "outbox.events", aggregate_id="failed-14001")
    failures()
    assert source.fetch(worker.limits()).batches == {}
    assert failures() < 200
    (freed,) = source.fetch(worker.limits()).batches.values()
    assert [claim.aggregate_id for claim in freed] == ["failed-14001"]


@pytest.mark.parametrize(
    ("statistics", "plans"), [("analyzed when it was empty", PLANS[1]), ("analyzed", PLANS[0])], ids=["empty", "full"]
)
def test_due_failures_are_found_by_their_time(workers, statistics, plans):
    worker = workers(1)
    if statistics == "analyzed when it was empty":
        worker.admin.execute("ANALYZE outbox.failures, outbox.events")
    worker.admin.execute("ALTER TABLE outbox.failures SET (autovacuum_enabled = off)")
    fail(worker, MANY)
    if statistics == "analyzed":
        worker.admin.execute("ANALYZE outbox.failures, outbox.events")
    worker.admin.execute("UPDATE outbox.failures SET next_attempt_at = now() WHERE id IN (7, 10001, 19999)")
    values: dict[str, Any] = {"lane": 0, "unsettled": "{}", "due": 500}
    plan = explain(worker.admin, Queries("outbox").read_due, values, plans=plans, to_the_index=True)
    assert plan["Actual Rows"] == 3
    by_index_only(plan)
    assert blocks(plan) < 100, plan


def test_a_dead_letter_costs_a_turn_nothing_while_an_old_snapshot_keeps_60000_dead_rows(workers, quick_marks):
    worker = workers(1)
    source = worker.source(attempts=1)
    worker.insert(1, keys=1)
    (batch,) = source.fetch(worker.limits()).batches.values()
    source.settle({0: Receipt(refused=[(batch[0], "bad")])})
    events = index_entries(source, worker, "events")
    with worker.database.connect() as old:
        old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        old.execute("SELECT 1 FROM outbox.lanes").fetchall()
        for _ in range(3):
            worker.insert(MANY)
            worker.admin.execute("DELETE FROM outbox.events WHERE aggregate_id <> 'key-0'")

        def turn() -> int:
            worker.insert(20)
            source.reader._ends_at = 0.0
            for lane, claims in source.fetch(worker.limits()).batches.items():
                settle(source, {lane: claims})
            return events()

        wait_until(lambda: turn() < 1000, 60, "the mark to rise")
        # Each turn leaves 20 dead rows of its own above the mark, until it rises again.
        assert max(turn() for _ in range(10)) < 2000
