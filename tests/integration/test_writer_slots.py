"""What the writer says when no slot would deliver its message, and what it asks for that."""

from __future__ import annotations

import asyncio
import functools
from concurrent.futures import ThreadPoolExecutor

import orjson
import psycopg
import pytest
import sqlalchemy as sa
from message_support import messages_to, slot
from sqlalchemy.orm import Session
from support import wait_until
from writer_targets import event, every_target, one_or_many, round_trips, waits_for_a_lock, write

from outbox import AsyncOutbox, Outbox, OutboxError, SlotMissing
from outbox._message import decode
from outbox._statements import emit_many, psycopg_sql

__all__ = ["slot"]


@every_target
@one_or_many
@pytest.mark.parametrize("lock_key", [False, True])
def test_without_the_slot_nothing_is_written_and_the_transaction_goes_on(outbox_postgres, slot, name, many, lock_key):
    async def scenario() -> None:
        async with messages_to(name, outbox_postgres, slot) as target:
            await write(target, many, 1)
            target.options = slot.options | {"slot": "outbox_relay_2"}
            with pytest.raises(SlotMissing, match=r"'outbox_relay_2'.*`outbox cdc setup`.*transport='table'") as caught:
                await write(target, many, 3, lock_key=lock_key)
            assert isinstance(caught.value, OutboxError)
            assert caught.value.slot == "outbox_relay_2"
            target.options = slot.options
            await write(target, many, 5, lock_key=lock_key)
            await target.commit()

    asyncio.run(scenario())
    assert slot.numbers() == [[1, 2, 5, 6]]


def test_a_slot_of_another_database_or_kind_is_none(outbox_postgres, outbox_postgres_server, slot):
    physical = f"{slot.name}_physical"
    slot.admin.execute("SELECT pg_create_physical_replication_slot(%s)", (physical,))
    try:
        with outbox_postgres.connect() as connection, pytest.raises(SlotMissing):
            Outbox(transport="message", slot=physical).add(connection, event(1))
    finally:
        slot.admin.execute("SELECT pg_drop_replication_slot(%s)", (physical,))
    with psycopg.connect(outbox_postgres_server.url()) as elsewhere, pytest.raises(SlotMissing):
        Outbox(**slot.options).add(elsewhere, event(2))


def test_the_slot_is_looked_for_every_time(outbox_postgres, slot):
    """Also by a statement that psycopg has prepared."""
    outbox = Outbox(**slot.options)
    with outbox_postgres.connect() as connection:
        connection.prepare_threshold = 0
        for n in range(8):
            outbox.add(connection, event(n))
        connection.commit()
        assert slot.numbers() == [list(range(8))]
        slot.admin.execute("SELECT pg_drop_replication_slot(%s)", (slot.name,))
        with pytest.raises(SlotMissing):
            outbox.add(connection, event(8))


def test_a_lost_slot_is_none(private_postgres):
    """Postgres has removed WAL that it still needed; what is written now, it would never deliver."""
    server = private_postgres({"fsync": "off", "max_slot_wal_keep_size": "1MB", "max_wal_size": "32MB"})
    outbox = Outbox(transport="message")
    with psycopg.connect(server.url(), autocommit=True) as admin, psycopg.connect(server.url()) as connection:
        admin.execute("SELECT pg_create_logical_replication_slot('outbox_relay', 'pgoutput')")
        outbox.add(connection, event(1))
        connection.commit()
        state = "SELECT wal_status FROM pg_replication_slots"
        for _ in range(10):
            admin.execute("SELECT pg_logical_emit_message(false, 'other', 'x')")
            admin.execute("SELECT pg_switch_wal()")
            admin.execute("CHECKPOINT")
            if admin.execute(state).fetchone() == ("lost",):
                break
        assert admin.execute(state).fetchone() == ("lost",)
        with pytest.raises(SlotMissing, match="or has lost it"):
            outbox.add(connection, event(2))
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_one_statement_for_one_event_and_one_for_many(outbox_postgres, slot):
    engine = outbox_postgres.engine()
    seen: list[str] = []
    sa.event.listen(engine, "before_cursor_execute", lambda c, cur, statement, *rest: seen.append(statement))
    outbox = Outbox(**slot.options)
    with Session(engine) as session, session.begin():
        outbox.add(session, event(0))
        outbox.add_many(session, [event(n) for n in range(1, 500)])
        assert len(seen) == 2
        outbox.add(session, event(500), lock_key=True)
        outbox.add_many(session, [event(n) for n in range(501, 600)], lock_key=True)
        assert len(seen) == 4
        assert outbox.add_many(session, []) == []
        assert len(seen) == 4
    assert (seen[0], seen[2]) == (seen[1], seen[3])  # The text does not change with the number of events.
    assert slot.numbers() == [list(range(600))]


@pytest.mark.parametrize("lock_key", [False, True])
def test_psycopg_makes_one_round_trip(outbox_postgres, slot, tmp_path, lock_key):
    outbox = Outbox(**slot.options)
    with outbox_postgres.connect() as connection:
        count = functools.partial(round_trips, connection, tmp_path / "trace")
        connection.execute("SELECT 1")  # opens the transaction
        assert count(lambda: outbox.add(connection, event(0), lock_key=lock_key)) == 1
        many = [event(n) for n in range(1, 500)]
        assert count(lambda: outbox.add_many(connection, many, lock_key=lock_key)) == 1
        connection.commit()
    assert slot.numbers() == [list(range(500))]


def test_pipelines(outbox_postgres, slot):
    outbox = Outbox(**slot.options)
    with outbox_postgres.connect() as connection:
        with connection.pipeline():
            outbox.add(connection, event(1))
            connection.execute("SELECT 1")
            with pytest.raises(SlotMissing):
                Outbox(transport="message", slot="none").add(connection, event(2))
            outbox.add_many(connection.cursor(), [event(3), event(4)], lock_key=True)
        connection.commit()
    assert slot.numbers() == [[1, 3, 4]]

    async def scenario() -> None:
        outbox = AsyncOutbox(**slot.options)
        async with await psycopg.AsyncConnection.connect(outbox_postgres.url) as connection, connection.pipeline():
            await outbox.add(connection, event(5))
            with pytest.raises(SlotMissing):
                await AsyncOutbox(transport="message", slot="none").add(connection, event(6))
            await outbox.add_many(connection, [event(7), event(8)])

    asyncio.run(scenario())
    assert slot.numbers() == [[5, 7, 8]]


def test_a_writer_needs_no_right_at_all(outbox_postgres, slot):
    role = psycopg.sql.Identifier(f"{outbox_postgres.name}_writer")
    with outbox_postgres.connect() as connection:
        connection.execute(psycopg.sql.SQL("CREATE ROLE {}").format(role))
        connection.commit()
        try:
            connection.execute(psycopg.sql.SQL("SET ROLE {}").format(role))
            outbox = Outbox(**slot.options)
            outbox.add(connection, event(1))
            outbox.add_many(connection, [event(2), event(3)], lock_key=True)
            with pytest.raises(SlotMissing):
                Outbox(transport="message", slot="none").add(connection, event(4))
            with pytest.raises(psycopg.errors.InsufficientPrivilege), connection.transaction():
                connection.execute("SELECT 1 FROM outbox.events")
            connection.commit()
        finally:
            connection.rollback()
            connection.execute("RESET ROLE")
            connection.execute(psycopg.sql.SQL("DROP ROLE {}").format(role))
    assert slot.numbers() == [[1, 2, 3]]


@pytest.mark.parametrize("lock_key", [False, True])
def test_messages_follow_the_lists_order_at_any_length(outbox_postgres, slot, lock_key):
    """Long enough for the planner to choose another plan, with keys that sort against the list."""
    count = 1000 if lock_key else 5000
    events = [event(n, f"k{count - n:05}") for n in range(count)]
    with outbox_postgres.connect() as connection:
        Outbox(**slot.options).add_many(connection, events, lock_key=lock_key)
    assert slot.numbers() == [list(range(count))]


def test_the_second_writer_of_a_key_emits_after_the_firsts_commit(outbox_postgres, slot):
    outbox = Outbox(**slot.options)
    with (
        outbox_postgres.connect() as first,
        outbox_postgres.connect() as second,
        ThreadPoolExecutor(1) as pool,
    ):
        outbox.add(first, event(1), lock_key=True)

        def write() -> None:
            outbox.add_many(second, [event(3, "free"), event(4)], lock_key=True)
            second.commit()

        writing = pool.submit(write)
        wait_until(lambda: waits_for_a_lock(outbox_postgres, second), 10, "the second writer waits")
        # Emitted while the other statement waits: had that one emitted before it waited, it would stand earlier.
        outbox.add(first, event(2), lock_key=True)
        assert not writing.done()
        first.commit()
        writing.result(10)
    messages = [each for transaction in slot.raw() for each in transaction]
    assert [orjson.loads(decode(each.content).payload)["n"] for each in messages] == [1, 2, 3, 4]
    assert sorted(each.lsn for each in messages) == [each.lsn for each in messages]


@pytest.mark.parametrize("lock_key", [False, True])
def test_the_plan_asks_and_locks_before_it_emits(outbox_postgres, lock_key):
    """What the tests above show by running, the plan shows for every case."""
    statement = psycopg_sql(emit_many(lock_key=lock_key))
    values = {
        "prefix": "outbox.outbox",
        "slot": "any",
        "content": [b"1", b"2"],
        "aggregate_type": ["Order"] * 2,
        "aggregate_id": ["a", "b"],
    }
    with outbox_postgres.connect() as connection:
        plan = connection.execute(f"EXPLAIN (FORMAT JSON, VERBOSE) {statement}", values).fetchone()[0][0]["Plan"]

    def nodes(node):
        yield node
        for child in node.get("Plans", []):
            yield from nodes(child)

    emitting = [node for node in nodes(plan) if "pg_logical_emit_message" in str(node.get("Output"))]
    assert [node["Node Type"] for node in emitting] == ["Aggregate"]
    below = list(nodes(emitting[0]))
    # For the slot and for the locks it looks once, before the first row. No Sort stands here: the server knows that
    # unnest gives the rows in the order of n, which is all that ORDER BY asks for.
    assert any("InitPlan" in node.get("One-Time Filter", "") for node in below)
    assert any("pg_advisory_xact_lock" in str(node.get("Output")) for node in below) == lock_key
