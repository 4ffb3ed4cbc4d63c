"""Old rows that no partition had go in steps, each committed of its own, on real Postgres."""

from __future__ import annotations

import json

import psycopg
import pytest
from counting import Counting
from psycopg import sql
from structlog.testing import capture_logs
from support import look_up
from typer.testing import CliRunner

from outbox._app import migrate
from outbox._clients import blocks
from relay.cli.app import app
from relay.database import Connector
from relay.tasks import archive
from relay.tasks.archive import Retention

DAYS = 7
OLD, YOUNG = DAYS + 2, 2
ROWS = 5_000
BLOCKS = 20
FILL = """
INSERT INTO {schema}.published_default (lane, id, event_id, aggregate_type, aggregate_id, event_type, payload,
                                        created_at, published_at)
SELECT 0, g, gen_random_uuid(), 'Order', 'a', 'T', '{{"a": 1}}', now(), now() - make_interval(days => %s)
  FROM generate_series(%s::int, %s::int) AS g"""
CANCELLED = """
CREATE FUNCTION public.cancel() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    RAISE query_canceled USING MESSAGE = 'taking too long';
END $$;
CREATE TRIGGER cancel BEFORE DELETE ON outbox.published_default FOR EACH ROW EXECUTE FUNCTION public.cancel()"""
NEIGHBOUR = 'the "other" one'


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    monkeypatch.setattr(blocks, "STEP", BLOCKS)


def fill(url: str, days: int, first: int, last: int, schema: str = "outbox") -> None:
    with psycopg.connect(url) as connection:
        connection.execute(sql.SQL(FILL).format(schema=sql.Identifier(schema)), (days, first, last))


def left(url: str, schema: str = "outbox") -> list[int]:
    """The ids in the default partition."""
    with psycopg.connect(url) as connection:
        query = sql.SQL("SELECT id FROM {}.published_default ORDER BY id").format(sql.Identifier(schema))
        return [row[0] for row in connection.execute(query)]


def steps_needed(url: str) -> int:
    ((size,),) = look_up(url, "SELECT pg_relation_size('outbox.published_default') / 8192")
    assert size > 3 * BLOCKS
    return -(-size // BLOCKS)


def retention(url: str) -> Retention:
    return Retention(Connector(url, "test"), "outbox", DAYS)


def test_each_step_is_a_transaction_and_reads_its_own_blocks(outbox_postgres):
    url = outbox_postgres.url
    migrate.upgrade(url, NEIGHBOUR)
    fill(url, OLD, 1, ROWS, NEIGHBOUR)
    # Between them those that are kept.
    fill(url, OLD, 1, ROWS // 2)
    fill(url, YOUNG, ROWS + 1, ROWS + 10)
    fill(url, OLD, ROWS // 2 + 1, ROWS)
    needed = steps_needed(url)
    with Counting(url) as proxy, capture_logs() as logs:
        retention(proxy.url).keep()
        statements = [text.strip().split(maxsplit=1)[0] for text in proxy.statements]
    assert [line for line in logs if "rows" in line] == [
        {"event": "old rows of the archive are deleted", "log_level": "info", "rows": ROWS}
    ]
    assert statements.count(b"DELETE") == needed
    # What counts them, each step, and what creates the partition of each day.
    [created] = [line["created"] for line in logs if "created" in line]
    assert statements.count(b"COMMIT") == 1 + needed + len(created)
    assert left(url) == list(range(ROWS + 1, ROWS + 11))
    assert left(url, NEIGHBOUR) == list(range(1, ROWS + 1))
    # The rows are gone, and their blocks are still there to be read.
    query = sql.SQL("EXPLAIN (FORMAT JSON) ") + sql.SQL(archive._DELETE_STRAY).format(
        default=sql.Identifier("outbox", "published_default"), in_step=blocks.in_step(1), before=sql.SQL("now()")
    )
    ((plan,),) = look_up(url, query)
    assert [node["Node Type"] for node in plan[0]["Plan"]["Plans"]] == ["Tid Range Scan"]


@pytest.mark.parametrize("by", ["a relay", "an operator"])
def test_what_an_interruption_leaves_goes_at_the_next_run(outbox_postgres, by):
    url = outbox_postgres.url
    fill(url, OLD, 1, ROWS)
    middle = ROWS // 2
    command = ["db", "prune", "--days", str(DAYS), "--json"]
    environment = {"OUTBOX_DATABASE_URL": url}
    with psycopg.connect(url) as other:
        other.execute("SELECT FROM outbox.published_default WHERE id = %s FOR UPDATE", (middle,))
        if by == "a relay":
            with capture_logs() as logs:
                retention(url).keep()
            assert "lock timeout" in logs[0]["error"]
        else:
            stopped = CliRunner().invoke(app, command, env=environment)
            assert (stopped.exit_code, "lock timeout" in stopped.stderr) == (1, True)
        rest = left(url)
    # Whole steps before the row that is locked.
    assert 0 < middle - rest[0] < ROWS // 4
    assert rest == list(range(rest[0], ROWS + 1))
    if by == "a relay":
        with capture_logs() as logs:
            retention(url).keep()
        assert logs[0]["rows"] == len(rest)
    else:
        done = CliRunner().invoke(app, command, env=environment)
        assert json.loads(done.stdout)["stray_rows"] == len(rest)
    assert left(url) == []


def test_old_rows_that_can_not_be_deleted_keep_no_partition_from_being_made(outbox_postgres):
    url = outbox_postgres.url
    fill(url, OLD, 1, 10)
    with psycopg.connect(url) as connection:
        connection.execute(CANCELLED)
    with capture_logs() as logs:
        retention(url).keep()
    assert ("taking too long" in logs[0]["error"], len(logs[-1]["created"])) == (True, archive._AHEAD + 1)
    assert left(url) == list(range(1, 11))


def test_a_day_of_many_rows_outside_of_any_partition_gets_none(outbox_postgres, monkeypatch):
    """Relays would wait while they are moved."""
    url = outbox_postgres.url
    monkeypatch.setattr(archive, "_MOST_MOVED", 10)
    fill(url, -1, 1, 10)
    fill(url, -2, 11, 21)
    with capture_logs() as logs:
        retention(url).keep()
    assert len(logs[0]["created"]) == archive._AHEAD
    assert left(url) == list(range(11, 22))
    with capture_logs() as logs:
        retention(url).keep()
    assert logs == []
