"""The plans of ``outbox recover``: no event is compared with all records of its topic, one by one."""

from __future__ import annotations

import pytest
from plans import explain, nodes
from psycopg import sql

from outbox.event import DEAD_LETTER, REPLAY
from relay.operations import recover_statements as statements
from relay.settle.statements import names_of

RECORDS = """
INSERT INTO pg_temp.outbox_recover
SELECT gen_random_uuid(), '', false, true, NULL, 'orders', 0, n, now() - interval '1 day', now(), 'k' || n
  FROM generate_series(1, 20000) AS n"""
# A record of a stranger may have a key that no index of keys can hold.
LONG = """
INSERT INTO pg_temp.outbox_recover
SELECT gen_random_uuid(), '', false, false, NULL, 'orders', 0, 0, now(), now(),
       string_agg(sha256(n::text::bytea)::text, '') FROM generate_series(1, 300) AS n"""
GONE = """
INSERT INTO outbox.published (event_id, aggregate_type, aggregate_id, event_type, payload, lane, id, created_at, topic)
SELECT gen_random_uuid(), 'Order', 'k' || n, 'T', '{}', 1, -n, now(), 'orders' FROM generate_series(1, 500) AS n"""
PLANNED = """
INSERT INTO outbox.scheduled (event_id, aggregate_type, aggregate_id, event_type, payload, not_before)
SELECT gen_random_uuid(), 'Order', 'k' || n, 'T', '{}', now() FROM generate_series(1, 500) AS n"""


@pytest.fixture
def records(outbox_postgres):
    connection = outbox_postgres.connect(autocommit=True)
    for statement in (*statements.TABLE, RECORDS, LONG, *statements.INDEX, GONE, PLANNED):
        connection.execute(statement)
    connection.execute("ANALYZE outbox.published, outbox.scheduled")
    return connection


@pytest.mark.parametrize("name", ["MISSING", "STANDING"])
def test_no_event_is_compared_with_all_records(records, name):
    standing = {"table": sql.Identifier("outbox", "scheduled"), "lane": sql.SQL("0"), "until": sql.SQL("not_before")}
    names = {**names_of("outbox"), **standing, "there": sql.SQL(statements.THERE)}
    values = {"dead": DEAD_LETTER, "replay": REPLAY, "types": ["Order"], "topics": ["orders"]}
    values |= {"since": "-infinity", "until": "infinity"}
    plan = explain(records, sql.SQL(getattr(statements, name)).format(**names), values, to_the_index=False)
    read = [node for node in nodes(plan) if node.get("Relation Name") == "outbox_recover"]
    assert read
    for node in read:
        # Once as a whole, to be hashed, is as it should be.
        assert node["Node Type"] != "Seq Scan" or node["Actual Loops"] <= 1, node
        assert node["Actual Rows"] * node["Actual Loops"] <= 2 * 20_001, node
