"""Events as messages: what a real slot delivers, and what the writer says when there is none that would."""

from __future__ import annotations

import asyncio
import contextlib
import enum
from uuid import UUID

import orjson
import pytest
from message_support import messages_to, slot
from opentelemetry import trace
from slots import Slot
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from writer_targets import Base, Order, Undo, event, every_target, one_or_many, stored, write

from outbox import AsyncOutbox, Event, EventTooLarge, Outbox, PayloadError, TargetError
from outbox.urls import sqlalchemy_url
from relay.wal import pgoutput

__all__ = ["slot"]


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

    async def scenario() -> list[UUID]:
        async with messages_to(name, outbox_postgres, slot) as target:
            ids = await target.add_many(events, lock_key=lock_key)
            ids += [await target.add(each, lock_key=lock_key) for each in events]
            await target.commit()
            return ids

    ids = asyncio.run(scenario())
    (transaction,) = slot.read()
    assert transaction == [(str(one), "Order", *contents) for one, contents in zip(ids, expected * 2, strict=True)]
    assert len({*ids}) == 12


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


some_targets = pytest.mark.parametrize(
    "name",
    ["Session, psycopg", "Session, psycopg2", "AsyncSession, asyncpg", "psycopg Connection", "asyncpg Connection"],
)


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
