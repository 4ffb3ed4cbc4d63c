"""Events as messages: what a real slot delivers, and what the writer says when there is none that would."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson
import psycopg
import pytest
import sqlalchemy as sa
from opentelemetry import trace
from slots import Slot, opened_slot
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from support import wait_until
from writer_targets import (
    Base,
    Order,
    Undo,
    event,
    every_target,
    one_or_many,
    opened,
    round_trips,
    stored,
    waits_for_a_lock,
    write,
)

from outbox import AsyncOutbox, Event, EventTooLarge, Outbox, OutboxError, PayloadError, SlotMissing, TargetError
from outbox._message import decode
from outbox._statements import emit_many, psycopg_sql
from outbox.urls import sqlalchemy_url
from relay.wal import pgoutput


@pytest.fixture
def slot(outbox_postgres) -> Iterator[Slot]:
    with opened_slot(outbox_postgres) as slot:
        yield slot


some_targets = pytest.mark.parametrize(
    "name", ["Session, psycopg", "Session, psycopg2", "AsyncSession, asyncpg", "psycopg Connection"]
)


@contextlib.asynccontextmanager
async def messages_to(name: str, database: Any, slot: Slot):
    async with opened(name, database) as target:
        target.options = slot.options
        yield target


# --- committed, or never ---------------------------------------------------------------------------------------------


@every_target
@one_or_many
def test_a_commit_delivers_the_events_in_order_and_not_before(outbox_postgres, slot, name, many):
    async def scenario() -> None:
        async with messages_to(name, outbox_postgres, slot) as target:
            ids = await write(target, many, 1)
            ids += await write(target, many, 3, lock_key=True)
            assert slot.raw() == []
            await target.commit()
            (transaction,) = slot.read()
            assert [message.event_id for message in transaction] == list(map(str, ids))
            # The target is as usable as before.
            await write(target, many, 5)
            await target.commit()

    asyncio.run(scenario())
    assert slot.numbers() == [[5, 6]]
    assert stored(outbox_postgres) == []


@every_target
@one_or_many
def test_a_rollback_leaves_nothing(outbox_postgres, slot, name, many):
    async def scenario() -> None:
        async with messages_to(name, outbox_postgres, slot) as target:
            await write(target, many, 1)
            await target.rollback()
            await write(target, many, 3, lock_key=True)
            await target.rollback()
            await write(target, many, 5)
            await target.commit()
            # What is left open is never committed.
            await write(target, many, 7)
            raise Undo

    with pytest.raises(Undo):
        asyncio.run(scenario())
    assert slot.numbers() == [[5, 6]]


@every_target
@one_or_many
def test_a_savepoints_rollback_leaves_what_was_outside(outbox_postgres, slot, name, many):
    async def scenario() -> None:
        async with messages_to(name, outbox_postgres, slot) as target:
            await write(target, many, 1)
            with contextlib.suppress(Undo):
                async with target.savepoint():
                    await write(target, many, 3)
                    async with target.savepoint():
                        await write(target, many, 5)
                    raise Undo
            async with target.savepoint():
                await write(target, many, 7, lock_key=True)
            await target.commit()

    asyncio.run(scenario())
    assert slot.numbers() == [[1, 2, 7, 8]]


def test_transactions_come_in_the_order_of_their_commits(outbox_postgres, slot):
    outbox = Outbox(**slot.options)
    with outbox_postgres.connect() as first, outbox_postgres.connect() as second:
        outbox.add(first, event(1))
        outbox.add(second, event(2))
        outbox.add(first, event(3))
        second.commit()
        first.commit()
    assert slot.numbers() == [[2], [1, 3]]


@pytest.fixture
def orders(outbox_postgres, slot):
    Base.metadata.create_all(outbox_postgres.engine())
    slot.raw()
    return outbox_postgres


def kinds(slot: Slot) -> list[list[str]]:
    """The rows and messages of each transaction, without the descriptions of the tables."""
    return [
        [type(each).__name__ for each in transaction if not isinstance(each, pgoutput.Relation)]
        for transaction in slot.raw()
    ]


def test_rows_and_events_come_together_or_not_at_all(orders, slot):
    outbox = Outbox(**slot.options)
    with Session(orders.engine()) as session:
        # Not flushed by hand: the row goes to the server before its event.
        session.add(Order(id="o-1"))
        outbox.add(session, event(1))
        session.commit()
        session.add(Order(id="o-2"))
        outbox.add(session, event(2))
        session.rollback()
        with contextlib.suppress(Undo), session.begin_nested():
            session.add(Order(id="o-3"))
            outbox.add(session, event(3))
            raise Undo
        outbox.add(session, event(4))
        session.commit()
    assert kinds(slot) == [["Insert", "Message"], ["Message"]]


def test_rows_and_events_come_together_in_asyncio(orders, slot):
    async def scenario() -> None:
        outbox = AsyncOutbox(**slot.options)
        engine = create_async_engine(sqlalchemy_url(orders.url, "asyncpg"))
        async with AsyncSession(engine) as session, session.begin():
            session.add(Order(id="o-1"))
            await outbox.add(session, event(1, "o-1"))
        async with AsyncSession(engine) as session:
            session.add(Order(id="o-2"))
            await outbox.add(session, event(2, "o-2"))
        await engine.dispose()

    asyncio.run(scenario())
    assert kinds(slot) == [["Insert", "Message"]]


# --- what a message holds --------------------------------------------------------------------------------------------


@every_target
@pytest.mark.parametrize("lock_key", [False, True])
def test_what_the_message_holds(outbox_postgres, slot, name, lock_key):
    class Kind(enum.StrEnum):
        ORDER = "Order"
        TENANT = "tenant"

    odd = {"ü 100% :x %(y)s": [1, 2.5, None, "x'\\\"\n"]}
    events = [
        Event("Order", "1", "A", odd, headers={"tenant": "acme"}),
        Event("Order", "2", "B", b"\x00\n\xff'\\", content_type="application/avro"),
        Event("Order", "3", "C", None),
        Event("Order", "4", "D", [1], content_type="application/vnd.shop+json"),
        Event("Order", "5", "E", b""),
        Event(Kind.ORDER, Kind.ORDER, Kind.ORDER, {}, headers={Kind.TENANT: Kind.TENANT}),
    ]
    expected = [
        ("1", "A", {"tenant": "acme"}, orjson.dumps(odd), True),
        ("2", "B", {"content-type": "application/avro"}, b"\x00\n\xff'\\", False),
        ("3", "C", None, None, False),
        ("4", "D", {"content-type": "application/vnd.shop+json"}, b"[1]", True),
        ("5", "E", {"content-type": "application/octet-stream"}, b"", False),
        ("Order", "Order", {"tenant": "tenant"}, b"{}", True),
    ]

    async def scenario() -> None:
        async with messages_to(name, outbox_postgres, slot) as target:
            await target.add_many(events, lock_key=lock_key)
            for each in events:
                await target.add(each, lock_key=lock_key)
            await target.commit()

    asyncio.run(scenario())
    (transaction,) = slot.read()
    wanted = [(str(each.event_id), "Order", *contents) for each, contents in zip(events, expected, strict=True)]
    assert transaction == wanted * 2


def test_the_writers_trace_travels_in_the_message(outbox_postgres, slot):
    span = trace.NonRecordingSpan(trace.SpanContext(1, 2, is_remote=True))
    with outbox_postgres.connect() as connection, trace.use_span(span):
        Outbox(**slot.options).add(connection, event(1))
    assert slot.read()[0][0].headers == {"traceparent": f"00-{1:032x}-{2:016x}-00"}


def test_what_is_refused_leaves_the_transaction_usable(outbox_postgres, slot):
    outbox = Outbox(**slot.options, max_event_bytes=1000)
    full = 1000 - len("k") - len('{"content-type": "application/octet-stream"}')
    with outbox_postgres.connect() as connection:
        outbox.add(connection, event(1))
        with pytest.raises(EventTooLarge):
            outbox.add(connection, Event("Order", "k", "T", b"x" * (full + 1)))
        with pytest.raises(PayloadError):
            outbox.add_many(connection, [event(2), Event("Order", "k", "T", {"n": "\0"})])
        outbox.add(connection, Event("Order", "k", "T", b"x" * full))
    (transaction,) = slot.read()
    assert [len(message.payload) for message in transaction] == [len('{"n":1}'), full]


def test_without_a_transaction_it_is_refused(outbox_postgres, slot):
    outbox = Outbox(**slot.options)
    with outbox_postgres.connect(autocommit=True) as connection:
        with pytest.raises(TargetError, match=r"connection\.transaction\(\)"):
            outbox.add(connection, event(1))
        with connection.transaction():
            outbox.add(connection, event(2))
    engine = outbox_postgres.engine(isolation_level="AUTOCOMMIT")
    with engine.connect() as connection, pytest.raises(TargetError, match="AUTOCOMMIT"):
        outbox.add(connection, event(3))
    assert slot.numbers() == [[2]]


# --- which outbox ----------------------------------------------------------------------------------------------------


@some_targets
def test_the_prefix_names_the_schema_whatever_it_is_called(outbox_postgres, slot, name):
    schema = 'My "out%s:box'

    async def scenario() -> None:
        async with messages_to(name, outbox_postgres, slot) as target:
            target.schema = schema
            await write(target, True, 1, lock_key=True)
            await target.commit()

    asyncio.run(scenario())
    assert slot.numbers(schema) == [[1, 2]]


def test_an_engine_may_translate_the_schema(outbox_postgres, slot):
    """The relay of the schema where the row would have gone gets the message."""
    engine = outbox_postgres.engine()
    outbox = Outbox(**slot.options)
    for schema in ("tenant", "other"):
        options = {"schema_translate_map": {None: "app", "outbox": schema}}
        with Session(engine.execution_options(**options)) as session, session.begin():
            outbox.add(session, event(1))
            outbox.add_many(session, [event(2), event(3)], lock_key=True)
        assert slot.numbers(schema) == [[1, 2, 3]]
    nameless = engine.execution_options(schema_translate_map={"outbox": None})
    with nameless.connect() as connection, pytest.raises(TargetError, match="schema_translate_map maps outbox"):
        outbox.add(connection, event(4))


# --- no slot ---------------------------------------------------------------------------------------------------------


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


# --- what it takes ---------------------------------------------------------------------------------------------------


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


# --- order and locks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lock_key", [False, True])
def test_messages_follow_the_lists_order_at_any_length(outbox_postgres, slot, lock_key):
    """Long enough for the planner to choose another plan, with keys that sort against the list."""
    events = [event(n, f"k{5000 - n:05}") for n in range(5000)]
    with outbox_postgres.connect() as connection:
        Outbox(**slot.options).add_many(connection, events, lock_key=lock_key)
    assert slot.numbers() == [list(range(5000))]


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
