"""What the open transaction has written, and nothing else; and what waits in the outbox, whoever wrote it."""

from __future__ import annotations

import asyncio
import datetime as dt
from typing import Any
from uuid import UUID

import asyncpg
import psycopg
import pytest
import sqlalchemy as sa
from psycopg.types.string import TextLoader
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from writer_targets import Target, each_driver, on_target, opened

from outbox.errors import TargetError
from outbox.event import Event
from outbox.testing import (
    ScheduledEvent,
    committed_events,
    committed_events_async,
    recorded_events,
    recorded_events_async,
)
from outbox.testing.fixtures import Database
from outbox.writer import AsyncOutbox, Outbox


def order(number: int) -> Event:
    return Event("Order", str(number), "OrderPlaced", {"number": number})


def ids(events: list[Event]) -> list[str]:
    return [event.aggregate_id for event in events]


HOUR = dt.timedelta(hours=1)
GIVEN = [
    Event("Order", "1", "OrderPlaced", {"price": 1.5, "lines": [1, None, "ü"]}, headers={"tenant": "a"}),
    Event("Order", "2", "OrderPrinted", b"\x00\xff", content_type="application/pdf"),
    Event("Order", "3", "OrderPrinted", b"plain"),
    Event("Order", "4", "OrderChanged", {"a": 1}, content_type="application/merge-patch+json", idempotency_key="c-1"),
    Event("Order", "customer-7", "OrderPaid", {"a": 1}, subject="order-1"),
    Event("Order", "5", "OrderForgotten", None, event_id=UUID(int=7)),
]


def test_events_come_back_as_they_were_given(outbox_postgres: Database) -> None:
    with Session(outbox_postgres.engine()) as session:
        Outbox().add_many(session, GIVEN)
        found = recorded_events(session)
    assert found == GIVEN
    assert found[-1].event_id == UUID(int=7)


def test_pending_objects_are_flushed_first(outbox_postgres: Database) -> None:
    class Base(DeclarativeBase):
        pass

    class Basket(Base):
        __tablename__ = "baskets"
        id: Mapped[int] = mapped_column(primary_key=True)

    @sa.event.listens_for(Basket, "after_insert")
    def write_event(_mapper: object, connection: sa.Connection, basket: Basket) -> None:
        Outbox().add(connection, order(basket.id))

    engine = outbox_postgres.engine()
    Base.metadata.create_all(engine)
    with Session(engine, autoflush=False) as session:
        session.add(Basket(id=1))
        assert ids(recorded_events(session)) == ["1"]
        session.rollback()
        assert recorded_events(session) == []


def test_only_this_transaction_counts(outbox_postgres: Database) -> None:
    outbox = Outbox()
    before, mine, open_too = (outbox_postgres.connect() for _ in range(3))
    outbox.add(before, order(1))
    before.commit()
    assert recorded_events(mine) == []
    outbox.add(mine, order(2))
    outbox.add(open_too, order(3))
    outbox.add(before, order(4))
    before.commit()  # committed while ours is open, and later than ours began: visible, not ours
    assert ids(recorded_events(mine)) == ["2"]
    assert ids(recorded_events(open_too)) == ["3"]
    mine.commit()
    assert recorded_events(mine) == []
    # Of the others', what is committed.
    assert ids(committed_events(mine)) == ["1", "2", "4"]
    assert ids(committed_events(open_too)) == ["1", "2", "3", "4"]


def test_savepoints_released_and_rolled_back(outbox_postgres: Database) -> None:
    outbox, connection, other = Outbox(), outbox_postgres.connect(), outbox_postgres.connect()
    with connection.transaction():
        with connection.transaction():
            outbox.add(connection, order(1))
            with connection.transaction():
                outbox.add(connection, order(2))
            outbox.add(other, order(9))
            other.commit()
            with connection.transaction() as undone:
                outbox.add(connection, order(3))
                assert ids(recorded_events(connection)) == ["1", "2", "3"]
                raise psycopg.Rollback(undone)
        assert ids(recorded_events(connection)) == ["1", "2"]


def as_a_framework_does(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """Read jsonb as text, and let cursors take another kind of placeholder."""
    connection.adapters.register_loader("jsonb", TextLoader)
    asynchronous = isinstance(connection, psycopg.AsyncConnection)
    connection.cursor_factory = psycopg.AsyncRawCursor if asynchronous else psycopg.RawCursor


def test_connections_that_a_framework_has_set_up(outbox_postgres: Database) -> None:
    event = Event("Order", "1", "OrderPlaced", {"price": 1.5}, headers={"tenant": "a"})

    async def read_back() -> None:
        async with await psycopg.AsyncConnection.connect(outbox_postgres.url) as connection:
            as_a_framework_does(connection)
            await AsyncOutbox().add(connection, event)
            assert await recorded_events_async(connection) == [event]
            await connection.commit()
            # The one below is there as well.
            assert await committed_events_async(connection) == [event, event]
            with pytest.raises(TargetError, match="use recorded_events_async"):
                recorded_events(connection)  # type: ignore[arg-type]

    with outbox_postgres.connect() as connection:
        as_a_framework_does(connection)
        Outbox().add(connection, event)
        assert recorded_events(connection) == [event]
        assert connection.execute("SELECT payload FROM outbox.events").fetchall() == [('{"price": 1.5}',)]
    asyncio.run(read_back())


@each_driver
@on_target
async def test_whatever_add_takes_is_read(target: Target, outbox_postgres: Database) -> None:
    """Scoped sessions and cursors too; and what is scheduled, with its time."""
    soon = dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)

    async def recorded() -> list[Event]:
        asynchronous = isinstance(target._outbox, AsyncOutbox)
        return await recorded_events_async(target.given) if asynchronous else recorded_events(target.given)

    later = [await target.add(each, not_before=soon + n * HOUR) for n, each in ((2, GIVEN[0]), (1, GIVEN[1]))]
    await target.add_many(GIVEN)
    found = await recorded()
    assert found[: len(GIVEN)] == GIVEN
    assert all(type(each) is Event for each in found[: len(GIVEN)])
    first, second = found[len(GIVEN) :]
    assert isinstance(first, ScheduledEvent)
    assert isinstance(second, ScheduledEvent)
    assert (first.not_before, second.not_before) == (soon + HOUR, soon + 2 * HOUR)
    assert [second.event_id, first.event_id] == later
    assert (first.payload, first.content_type) == (GIVEN[1].payload, "application/pdf")
    await target.cancel(later[0])
    assert await recorded() == found[:-1]
    await target.commit()
    assert await recorded() == []


def test_connections_of_asyncpg(outbox_postgres: Database) -> None:
    async def scenario() -> None:
        async with opened("asyncpg, of a pool with codecs for JSON", outbox_postgres) as target:
            await target.add_many(GIVEN)
            assert await recorded_events_async(target.given) == GIVEN
            with pytest.raises(TargetError, match=r"for the asyncpg .* given use recorded_events_async"):
                recorded_events(target.given)
            await target.commit()
            assert await recorded_events_async(target.given) == []
        connection = await asyncpg.connect(outbox_postgres.url)
        with pytest.raises(TargetError, match=r"connection\.transaction\(\)"):
            await recorded_events_async(connection)
        await connection.close()

    asyncio.run(scenario())


def test_what_other_programs_insert_is_shown_as_it_is(outbox_postgres: Database) -> None:
    """The library would refuse such a header of a caller; the row has it."""
    headers = '{"outbox-replay": "2026-01-01", "n": "1", "content-type": "text/plain"}'
    with outbox_postgres.connect() as connection:
        connection.execute(
            "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, headers, from_relay) "
            "VALUES ('Order', '1', 'T', %s, true)",
            (headers,),
        )
        (event,) = recorded_events(connection)
    assert type(event) is Event
    assert (event.headers, event.content_type) == ({"outbox-replay": "2026-01-01", "n": "1"}, "text/plain")


def test_another_schema(outbox_postgres: Database) -> None:
    from outbox.testing.fixtures import migrate

    migrate(outbox_postgres.url, schema='odd "100%" name')
    with outbox_postgres.connect() as connection:
        Outbox(schema='odd "100%" name').add(connection, order(1))
        assert recorded_events(connection) == []
        assert ids(recorded_events(connection, schema='odd "100%" name')) == ["1"]


def test_autocommit_without_a_transaction_is_refused(outbox_postgres: Database) -> None:
    connection = outbox_postgres.connect(autocommit=True)
    with pytest.raises(TargetError, match="autocommit"):
        recorded_events(connection)
    with connection.transaction():
        Outbox().add(connection, order(1))
        assert ids(recorded_events(connection)) == ["1"]
    with pytest.raises(TargetError, match="not the str given"):
        recorded_events("postgresql://")  # type: ignore[arg-type]
