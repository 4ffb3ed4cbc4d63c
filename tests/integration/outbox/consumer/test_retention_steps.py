"""Old ids of the default partition are forgotten in steps, each committed of its own."""

from __future__ import annotations

import datetime as dt
from typing import Any

import psycopg
import pytest
from counting import Counting
from plans import nodes
from psycopg import sql
from support import look_up

from outbox._app import migrate
from outbox._clients import blocks
from outbox.consumer import retention
from outbox.consumer.ids import NO_TIME
from outbox.consumer.retention import IdRetention
from outbox.consumer.statements import statement

KEEP = 5
BLOCKS = 5
ROWS = 3_000
NEIGHBOUR = 'the "other" one'
FILL = """
INSERT INTO {processed_messages_default} (grp, day, message_id, seen_at)
SELECT %s, %s, gen_random_uuid(), now() - make_interval(days => %s) FROM generate_series(1, %s::int)"""
STEPS = "SELECT DISTINCT (ctid::text::point)[0]::int / %s FROM consumer.processed_messages_default WHERE day = ANY(%s)"


class Ids:
    """Ids without a time, then those of two old days of two groups, then of today."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.today = dt.datetime.now(dt.UTC).date()
        self.older, self.old = (self.today - dt.timedelta(days=days) for days in (KEEP + 4, KEEP + 3))
        for schema in ("consumer", NEIGHBOUR):
            with psycopg.connect(url) as connection:
                for group in ("g", "h"):
                    connection.execute(
                        statement(schema, "INSERT INTO {groups} (grp, owner) VALUES (%s, 'me')"), (group,)
                    )
                for group, day, seen, count in (
                    ("g", NO_TIME, 400, ROWS),
                    ("g", self.older, KEEP + 4, ROWS),
                    ("h", self.old, KEEP + 3, ROWS),
                    ("g", self.old, KEEP + 3, ROWS),
                    ("h", self.older, KEEP + 4, 1),
                    # Keeps that day of its group.
                    ("h", self.older, 1, 1),
                    ("g", self.today, 0, 1),
                ):
                    connection.execute(statement(schema, FILL), (group, day, seen, count))

    def left(self, schema: str = "consumer") -> dict[tuple[str, dt.date], int]:
        with psycopg.connect(self.url) as connection:
            query = statement(schema, "SELECT grp, day, count(*) FROM {processed_messages_default} GROUP BY 1, 2")
            return {(group, day): count for group, day, count in connection.execute(query)}

    def forgotten(self) -> dict[str, dt.date | None]:
        return dict(look_up(self.url, "SELECT grp, forgotten_before FROM consumer.groups"))


@pytest.fixture
def ids(outbox_postgres, monkeypatch) -> Ids:
    monkeypatch.setattr(blocks, "STEP", BLOCKS)
    migrate.upgrade_consumer(outbox_postgres.url, NEIGHBOUR)
    return Ids(outbox_postgres.url)


def test_each_step_is_a_transaction_and_only_those_with_old_ids_are_made(ids):
    kept = {("g", NO_TIME): ROWS, ("g", ids.today): 1, ("h", ids.older): 2}
    steps = len(look_up(ids.url, STEPS, BLOCKS, [ids.old, ids.older]))
    assert steps > 10
    assert len(look_up(ids.url, STEPS, BLOCKS, [NO_TIME])) > 4
    neighbour = ids.left(NEIGHBOUR)
    with Counting(ids.url) as proxy:
        done = IdRetention(proxy.url, "consumer", KEEP).forget()
        statements = [text.strip() for text in proxy.statements]
    assert (done.deleted_rows, done.problem) == (3 * ROWS, None)
    assert ids.left() == kept
    assert ids.left(NEIGHBOUR) == neighbour
    assert ids.forgotten() == dict.fromkeys(("g", "h"), ids.old + dt.timedelta(days=1))
    made = sum(text.startswith(b"WITH step") for text in statements)
    # One may have had only ids that are kept.
    assert made in {steps - 1, steps}
    # What finds partitions, and what finds the steps.
    assert sum(text == b"COMMIT" for text in statements) == made + 2


def test_what_an_interruption_leaves_is_forgotten_at_the_next_run(ids):
    locked = """
    SELECT FROM consumer.processed_messages_default WHERE (ctid::text::point)[0] = (
        SELECT max((ctid::text::point)[0]) FROM consumer.processed_messages_default WHERE grp = 'h' AND day = %s)
       FOR UPDATE"""
    memory = IdRetention(ids.url, "consumer", KEEP)
    with psycopg.connect(ids.url) as other:
        other.execute(locked, (ids.old,))
        first = memory.forget()
    assert "lock timeout" in first.problem
    assert ROWS < first.deleted_rows < 2 * ROWS
    assert sum(ids.left().values()) == 4 * ROWS + 3 - first.deleted_rows
    # Of days of which ids were deleted, none can be new.
    assert ids.forgotten() == dict.fromkeys(("g", "h"), ids.old + dt.timedelta(days=1))
    second = memory.forget()
    assert (second.deleted_rows, second.problem) == (3 * ROWS - first.deleted_rows, None)


def test_an_id_that_is_added_between_two_steps_stays(ids):
    """By a task that had read before that nothing of its day is forgotten: what it applied comes again as a repeat."""
    memory = IdRetention(ids.url, "consumer", KEEP)
    steps = memory._delete_stray(ids.today - dt.timedelta(days=KEEP))
    next(steps)
    late = "INSERT INTO consumer.processed_messages VALUES ('g', %s, gen_random_uuid(), now()) RETURNING 1"
    look_up(ids.url, late, ids.old)
    assert sum(steps) > 2 * ROWS
    assert ids.left()["g", ids.old] == 1


@pytest.mark.parametrize("analyzed", [True, False])
def test_a_step_reads_its_own_blocks(ids, analyzed):
    values: dict[str, Any] = {"groups": ["g", "h"], "days": [ids.older, ids.old], "keep_days": KEEP}
    query = statement("consumer", retention._DELETE_STRAY, in_step=blocks.in_step(12))
    with psycopg.connect(ids.url, autocommit=True) as connection:
        if analyzed:
            connection.execute("ANALYZE consumer.processed_messages_default")
        ((plan,),) = connection.execute(sql.SQL("EXPLAIN (FORMAT JSON) ") + query, values).fetchall()
    scans = {node["Node Type"] for node in nodes(plan[0]["Plan"]) if "Relation Name" in node}
    assert scans == {"ModifyTable", "Tid Range Scan", "Tid Scan"}
