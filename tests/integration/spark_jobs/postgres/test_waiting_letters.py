"""What a consumer with ``keep_order`` asks of Postgres in each round and idle second, with 20,000 dead letters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from plans import forget_rows, nodes
from psycopg import sql

from outbox._app import migrate
from outbox.consumer.letters import BY_INDEX
from outbox.testing.fixtures import token
from spark_jobs.postgres.group_store import PostgresGroupStore

LETTERS = 20_000
TOPIC = "orders"
PLANS = ["force_custom_plan", "force_generic_plan"]
FILL = """
INSERT INTO consumer.dead_letters (grp, topic, topic_id, part, message_offset, message_key, message_headers,
                                   message_time, reason, error)
SELECT %(grp)s, 'orders', 'id', 0, g, convert_to('k' || g %% %(keys)s, 'UTF8'), '[]', now(),
       CASE WHEN g < %(keys)s THEN 'failed' ELSE 'behind' END, 'e'
  FROM generate_series(0, %(letters)s - 1) AS g"""


@contextmanager
def filled(server: Any, keys: int) -> Iterator[tuple[str, psycopg.Connection[Any]]]:
    """Two groups with 20,000 dead letters each, of so many keys, and no statistics yet."""
    name = f"letters_{token()}"
    url = server.create_database(name)
    migrate.upgrade_consumer(url)
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute("ALTER TABLE consumer.dead_letters SET (autovacuum_enabled = off)")
        for group in ("neighbour", "g"):
            admin.execute("INSERT INTO consumer.groups (grp, owner) VALUES (%s, 'o')", (group,))
            admin.execute(FILL, {"grp": group, "keys": keys, "letters": LETTERS})
        yield url, admin
    server.drop_database(name)


@pytest.fixture(scope="module", params=["one key", "half of them", "nothing behind"])
def waiting(request, outbox_postgres_server) -> Iterator[tuple[str, psycopg.Connection[Any]]]:
    keys = {"one key": 1, "half of them": LETTERS // 2, "nothing behind": LETTERS}[request.param]
    with filled(outbox_postgres_server, keys) as made:
        yield made


@pytest.fixture
def statistics(waiting, request) -> tuple[str, psycopg.Connection[Any]]:
    _, admin = waiting
    if request.param == "analyzed":
        admin.execute("ANALYZE consumer.dead_letters")
    elif request.param == "analyzed when it was empty":
        forget_rows(admin, "consumer.dead_letters")
    return waiting


@pytest.mark.parametrize(
    ("statistics", "plans", "place"),
    [
        ("analyzed when it was empty", "force_custom_plan", "newest"),
        ("analyzed when it was empty", "force_generic_plan", "middle"),
        ("analyzed", "force_custom_plan", "middle"),
        ("analyzed", "force_generic_plan", "middle"),
    ],
    indirect=["statistics"],
)
def test_a_look_reads_a_few_rows_of_those_that_wait(statistics, plans, place):
    url, admin = statistics
    store = PostgresGroupStore(url, "consumer", "g", "test")
    if place == "middle":
        store._below = LETTERS // 2
    plan = explained(admin, plans, store._state_query(keep_order=True), grp="g", topics=[TOPIC])
    for node in nodes(plan):
        read = (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
        assert read <= 1_000, (node["Node Type"], node.get("Index Name"), node.get("Index Cond"), node.get("Filter"))
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] <= 3_000, plan


@pytest.fixture(scope="module")
def retrying(outbox_postgres_server) -> Iterator[tuple[str, psycopg.Connection[Any]]]:
    """All dead letters of the one group are retried, and the last ten of the other."""
    with filled(outbox_postgres_server, LETTERS) as (url, admin):
        admin.execute(
            "UPDATE consumer.dead_letters SET state = 'retry' WHERE grp = 'neighbour' OR message_offset >= %s",
            (LETTERS - 10,),
        )
        admin.execute("VACUUM ANALYZE consumer.dead_letters")
        yield url, admin


@pytest.mark.parametrize("plans", PLANS)
def test_what_is_retried_is_found_among_the_dead_letters_of_all_groups(retrying, plans):
    url, admin = retrying
    store = PostgresGroupStore(url, "consumer", "g", "test")
    query = store._retried_query()
    with admin.transaction():
        admin.execute(BY_INDEX)
        plan = explained(admin, plans, query, grp="g", topics=[TOPIC], most=100, keep_order=True, alone=False)
    # The neighbour's entries in the index alone are on more pages.
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] <= 90, plan
    found = store.retried([TOPIC], 4, keep_order=True)
    assert [one.place for one in found] == [(TOPIC, 0, LETTERS - 10 + n) for n in range(4)]


@pytest.mark.parametrize(
    ("statistics", "plans"),
    [
        ("analyzed when it was empty", "force_custom_plan"),
        ("analyzed when it was empty", "force_generic_plan"),
        ("analyzed", "force_custom_plan"),
        ("analyzed", "force_generic_plan"),
    ],
    indirect=["statistics"],
)
def test_what_is_retried_of_one_key_is_read_once_and_not_for_each_letter(statistics, plans):
    """Each of the first hundred looks for an earlier one of its key in another partition."""
    url, admin = statistics
    query = PostgresGroupStore(url, "consumer", "g", "test")._retried_query()
    with admin.transaction(force_rollback=True):
        admin.execute(BY_INDEX)
        admin.execute("UPDATE consumer.dead_letters SET state = 'retry' WHERE grp = 'g'")
        plan = explained(admin, plans, query, grp="g", topics=[TOPIC], most=100, keep_order=True, alone=False)
    for node in nodes(plan):
        read = (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
        # Once, with the row versions that earlier tests have left.
        assert read <= 10 * LETTERS, (
            node["Node Type"],
            node.get("Index Name"),
            node.get("Index Cond"),
            node.get("Filter"),
        )


def explained(admin: psycopg.Connection[Any], plans: str, query: sql.Composed, **values: Any) -> dict[str, Any]:
    """Run a statement with a custom or generic plan, and return that plan with what it read."""
    with admin.transaction():
        admin.execute("SELECT set_config('plan_cache_mode', %s, true)", (plans,))
        [(explained,)] = admin.execute(
            f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {query.as_string(admin)}".encode(), values, prepare=True
        ).fetchall()
    plan: dict[str, Any] = explained[0]["Plan"]
    return plan
