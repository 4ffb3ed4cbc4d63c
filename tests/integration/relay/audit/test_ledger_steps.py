"""The ledger is added up and its old rows are deleted in steps, each committed of its own."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from counting import Counting
from psycopg import sql
from support import look_up

from outbox._app import migrate
from outbox._clients import blocks
from relay.audit import ledger
from relay.audit.ledger import prune, turn_on
from relay.core.ports import Unavailable

BLOCKS = 4
ROWS = 4_000
DAYS = 7
NEIGHBOUR = 'the "other" one'
# As many rows of each of four minutes, one after the other.
FILL = """
INSERT INTO {schema}.ledger (aggregate_type, minute, events, hashes, written_at)
SELECT 'Order', extract(epoch FROM at) / 60 - (g - 1) * 4 / %(rows)s, 1, g, at FROM
       (SELECT now() - make_interval(days => %(days)s, hours => 1) AS at) AS r, generate_series(1, %(rows)s) AS g"""
SUMS = """
SELECT minute, sum(events), sum(hashes) FROM outbox.ledger
 WHERE minute > extract(epoch FROM now()) / 60 - 1000 GROUP BY 1 ORDER BY 1"""


@pytest.fixture
def url(outbox_postgres, monkeypatch) -> str:
    """A database whose ledger is on, with as many old rows as young ones after them."""
    monkeypatch.setattr(blocks, "STEP", BLOCKS)
    migrate.upgrade(outbox_postgres.url, NEIGHBOUR)
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        for schema in ("outbox", NEIGHBOUR):
            turn_on(connection, schema, None)
            for days in (DAYS + 1, 0):
                connection.execute(sql.SQL(FILL).format(schema=sql.Identifier(schema)), {"rows": ROWS, "days": days})
    return outbox_postgres.url


def pruned(url: str) -> None:
    with psycopg.connect(f"{url}?options=-clock_timeout%3D2s", autocommit=True) as connection:
        assert prune(connection, "outbox", DAYS)


def counts(url: str) -> tuple[int, int]:
    """How many rows are old, and how many are not."""
    ((old, young),) = look_up(
        url,
        "SELECT count(*) FILTER (WHERE old), count(*) FILTER (WHERE NOT old) FROM "
        "(SELECT minute < extract(epoch FROM now()) / 60 - 1440 * 7 AS old FROM outbox.ledger) AS l",
    )
    return old, young


def since(url: str) -> dt.datetime:
    return look_up(url, "SELECT since FROM outbox.ledger_state")[0][0]


def test_each_step_is_a_statement_of_its_own(url):
    ((size,),) = look_up(url, "SELECT pg_relation_size('outbox.ledger') / 8192")
    steps = -(-size // BLOCKS)
    assert steps > 6
    before, sums = since(url), look_up(url, SUMS)
    assert [row[1] for row in sums] == [Decimal(ROWS // 4)] * 4
    with Counting(url) as proxy:
        pruned(proxy.url)
        statements = [text.strip().split(maxsplit=1)[0] for text in proxy.statements]
    assert (statements.count(b"DELETE"), statements.count(b"WITH")) == (steps, steps)
    assert not {b"BEGIN", b"COMMIT"} & {*statements}
    assert look_up(url, SUMS) == sums
    old, young = counts(url)
    assert old == 0
    # One for each minute, and one more where a step ends within a minute.
    assert 4 <= young <= 4 + steps
    assert since(url) == before
    ((others,),) = look_up(url, f'SELECT count(*) FROM "{NEIGHBOUR.replace(chr(34), chr(34) * 2)}".ledger')
    assert others == 2 * ROWS
    pruned(url)
    assert look_up(url, SUMS) == sums
    assert counts(url)[1] <= young


def test_what_an_interruption_leaves_is_done_by_the_next_run(url):
    sums = look_up(url, SUMS)
    look_up(url, "UPDATE outbox.ledger_state SET since = now() - interval '30 days' RETURNING 1")
    with psycopg.connect(url) as other:
        other.execute("SELECT FROM outbox.ledger WHERE hashes = %s ORDER BY minute LIMIT 1 FOR UPDATE", (ROWS // 2,))
        with pytest.raises(Unavailable, match="lock timeout"):
            pruned(url)
        old, young = counts(url)
    assert (0 < old < ROWS, young) == (True, ROWS)
    ((complete,),) = look_up(url, "SELECT since > now() - interval '7 days 10 minutes' FROM outbox.ledger_state")
    assert complete, "an audit of the rows that are gone would miss them"
    pruned(url)
    assert (counts(url)[0], look_up(url, SUMS)) == (0, sums)


def test_a_step_reads_its_own_blocks(url):
    values: dict[str, Any] = {"cut": dt.datetime.now(dt.UTC)}
    for query in (ledger._OLD, ledger._ADD_UP):
        names = {"ledger": sql.Identifier("outbox", "ledger"), "modulus": sql.SQL("1"), "in_step": blocks.in_step(1)}
        with psycopg.connect(url) as connection:
            connection.execute("ANALYZE outbox.ledger")
            step = sql.SQL("EXPLAIN (FORMAT TEXT) ") + sql.SQL(query).format(**names)
            text = "\n".join(row[0] for row in connection.execute(step, values))
        assert "Tid Range Scan on ledger" in text
        assert "Seq Scan" not in text, text
