"""The writer on every target: committed with the transaction, gone with it, in order."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import enum
import functools
import subprocess
import sys
import uuid

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from writer_targets import (
    Base,
    Order,
    Undo,
    each_driver,
    event,
    every_target,
    numbers,
    on_target,
    opened,
    round_trips,
    stored,
    write,
)

from outbox import AsyncOutbox, Event, Outbox
from outbox.urls import sqlalchemy_url


@every_target
@on_target
async def test_a_commit_keeps_the_events_and_not_before(target, outbox_postgres):
    await target.check()  # a statement with an answer
    ids = await write(target, False, 1)
    ids += await write(target, True, 3)
    ids += await write(target, True, 5, lock_key=True)
    ids += await write(target, False, 7, lock_key=True)
    assert stored(outbox_postgres) == []
    await target.commit()
    assert [row["event_id"] for row in stored(outbox_postgres)] == ids
    # The target is as usable as before.
    await write(target, False, 9)
    await target.commit()
    assert numbers(outbox_postgres) == list(range(1, 11))


@each_driver
def test_a_rollback_leaves_nothing(outbox_postgres, name):
    class Abandoned(Exception):
        pass

    async def scenario() -> None:
        async with opened(name, outbox_postgres) as target:
            await write(target, False, 1)
            await target.rollback()
            await write(target, True, 3, lock_key=True)
            await target.rollback()
            await write(target, True, 5)
            with contextlib.suppress(Undo):
                async with target.savepoint():
                    await write(target, True, 7)
                    await write(target, False, 9)
                    raise Undo
            async with target.savepoint():
                await write(target, True, 11, lock_key=True)
            await target.commit()
            # What is left open is never committed.
            await write(target, True, 13)
            await write(target, False, 15)
            raise Abandoned

    with pytest.raises(Abandoned):
        asyncio.run(scenario())
    assert numbers(outbox_postgres) == [5, 6, 11, 12]


@each_driver
def test_what_the_row_holds(outbox_postgres, name):
    class Kind(enum.StrEnum):
        ORDER = "Order"
        TENANT = "tenant"

    events = [
        Event("Order", "1", "A", {"ü 100% :x %(y)s": [1, 2.5, None, "x'\\\""]}, headers={"tenant": "acme"}),
        Event("Order", "2", "B", b"\x00\xff'\\", content_type="application/avro"),
        Event("Order", "3", "C", None),
        Event("Order", "4", "D", [1], content_type="application/vnd.shop+json"),
        Event("Order", "5", "E", b""),
        Event(Kind.ORDER, Kind.ORDER, Kind.ORDER, {}, headers={Kind.TENANT: Kind.TENANT}),
    ]
    expected = [
        ({"ü 100% :x %(y)s": [1, 2.5, None, "x'\\\""]}, None, {"tenant": "acme"}),
        (None, b"\x00\xff'\\", {"content-type": "application/avro"}),
        (None, None, None),
        ([1], None, {"content-type": "application/vnd.shop+json"}),
        (None, b"", {"content-type": "application/octet-stream"}),
        ({}, None, {"tenant": "tenant"}),
    ]

    async def scenario() -> list[uuid.UUID]:
        async with opened(name, outbox_postgres) as target:
            ids = await target.add_many(events)
            ids += await target.add_many([events[2], events[2]])  # arrays of nothing but NULL
            ids += [await target.add(each) for each in events]
            await target.commit()
            return ids

    ids = asyncio.run(scenario())
    rows = stored(outbox_postgres)
    contents = [(row["payload"], row["payload_bytes"], row["headers"]) for row in rows]
    assert contents == [*expected, expected[2], expected[2], *expected]
    assert [row["event_id"] for row in rows] == ids
    names = ("aggregate_type", "aggregate_id", "event_type")
    assert [tuple(rows[n][name] for name in names) for n in (0, 5)] == [("Order", "1", "A"), ("Order",) * 3]


# --- the ORM ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def orders(outbox_postgres):
    """A database whose events are refused by a trigger unless their order is there before them."""
    with outbox_postgres.engine().begin() as connection:
        Base.metadata.create_all(connection)
        connection.execute(
            sa.text("""
                CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                  IF NOT EXISTS (SELECT 1 FROM orders WHERE id = NEW.aggregate_id) THEN RAISE 'no order yet'; END IF;
                  RETURN NEW; END $$;
                CREATE TRIGGER look BEFORE INSERT ON outbox.events FOR EACH ROW EXECUTE FUNCTION look()""")
        )
    return outbox_postgres


def test_a_session_sends_rows_and_events_in_program_order(orders):
    with Session(orders.engine(), autoflush=False) as session, session.begin():
        session.add(Order(id="o-1"))
        Outbox().add(session, event(1, "o-1"))
        session.add(Order(id="o-2"))
        with session.no_autoflush:
            Outbox().add_many(session, [event(2, "o-1"), event(3, "o-2")])
    assert numbers(orders) == [1, 2, 3]


def test_an_async_session_sends_rows_and_events_in_program_order(orders):
    async def scenario() -> None:
        engine = create_async_engine(sqlalchemy_url(orders.url, "asyncpg"))
        async with AsyncSession(engine, autoflush=False) as session, session.begin():
            session.add(Order(id="o-1"))
            await AsyncOutbox().add(session, event(1, "o-1"))
            # Within run_sync the session is an ordinary one, and the plain Outbox is the one to use.
            await session.run_sync(lambda inner: Outbox().add(inner, event(2, "o-1")))
        await engine.dispose()

    asyncio.run(scenario())
    assert numbers(orders) == [1, 2]


def test_events_can_be_written_from_within_a_flush(orders):
    """Session events run while the session is flushing; they have the connection."""
    with Session(orders.engine()) as session, session.begin():

        @sa.event.listens_for(session, "after_flush")
        def announce(flushed: Session, _: object) -> None:
            Outbox().add_many(flushed.connection(), [event(1, each.id) for each in flushed.new])

        session.add_all([Order(id="o-1"), Order(id="o-2")])
    assert sorted(row["aggregate_id"] for row in stored(orders)) == ["o-1", "o-2"]


# --- what it takes ---------------------------------------------------------------------------------------------------


def test_one_statement_for_one_event_and_one_for_many(outbox_postgres):
    engine = outbox_postgres.engine()
    seen: list[str] = []
    sa.event.listen(engine, "before_cursor_execute", lambda c, cur, statement, *rest: seen.append(statement))
    outbox = Outbox()
    with Session(engine) as session, session.begin():
        outbox.add(session, event(0))
        assert len(seen) == 1
        outbox.add_many(session, [event(n) for n in range(1, 500)])
        assert len(seen) == 2
        outbox.add(session, event(500), lock_key=True)
        outbox.add_many(session, [event(n) for n in range(501, 600)], lock_key=True)
        assert len(seen) == 4
        assert outbox.add_many(session, []) == []
        assert len(seen) == 4
    assert seen[2] == seen[3]  # The text does not change with the number of events.
    assert numbers(outbox_postgres) == list(range(600))


@pytest.mark.parametrize("lock_key", [False, True])
def test_psycopg_makes_one_round_trip(outbox_postgres, tmp_path, lock_key):
    outbox = Outbox()
    with outbox_postgres.connect() as connection:
        count = functools.partial(round_trips, connection, tmp_path / "trace")
        connection.execute("SELECT 1")  # opens the transaction
        assert count(lambda: [connection.execute("SELECT %s", (n,)) for n in range(3)]) == 3
        assert count(lambda: outbox.add(connection, event(0), lock_key=lock_key)) == 1
        many = [event(n) for n in range(1, 500)]
        assert count(lambda: outbox.add_many(connection, many, lock_key=lock_key)) == 1
        assert count(lambda: outbox.add_many(connection, [], lock_key=lock_key)) == 0
        connection.commit()
    assert numbers(outbox_postgres) == list(range(500))


@pytest.mark.parametrize(
    "name", ["Session, psycopg2", "AsyncSession, asyncpg", "psycopg Connection", "asyncpg Connection"]
)
@on_target
async def test_the_schema_may_have_any_name(target, outbox_postgres):
    schema = 'My "out%s:box'
    with outbox_postgres.connect() as connection:
        renamed = psycopg.sql.Identifier(schema).as_string()
        connection.execute("ALTER SCHEMA outbox RENAME TO " + renamed)
    target.schema = schema
    await write(target, True, 1, lock_key=True)
    await write(target, False, 3)
    await target.commit()
    with outbox_postgres.connect() as connection:
        assert connection.execute(f"SELECT count(*) FROM {renamed}.events".replace("%", "%%"), ()).fetchone()[0] == 4


def test_an_engine_may_translate_the_schema(outbox_postgres):
    with outbox_postgres.connect() as connection:
        connection.execute("ALTER SCHEMA outbox RENAME TO tenant")
    engine = outbox_postgres.engine(execution_options={"schema_translate_map": {None: "app", "outbox": "tenant"}})
    with Session(engine) as session, session.begin():
        Outbox().add(session, event(1))
        Outbox().add_many(session, [event(2), event(3)], lock_key=True)
    with outbox_postgres.connect() as connection:
        assert connection.execute("SELECT count(*) FROM tenant.events").fetchone() == (3,)


@pytest.mark.parametrize("name", ["Session, psycopg", "asyncpg Connection"])
@pytest.mark.parametrize("many", [False, True], ids=["add", "add_many"])
def test_an_event_that_is_added_twice_is_two_events(outbox_postgres, name, many):
    """Built once, as a constant perhaps; with one id consumers would drop the second as a repeat of the first."""
    once, own = event(1), uuid.uuid4()
    fixed = Event("Order", "1", "T", {"n": 2}, event_id=own)

    async def scenario() -> list[uuid.UUID]:
        async with opened(name, outbox_postgres) as target:
            if many:
                ids = await target.add_many([once, fixed, once])
            else:
                ids = [await target.add(each) for each in (once, fixed, once)]
            await target.commit()
            return [*ids, await target.add(once, not_before=dt.datetime.now(dt.UTC))]

    ids = asyncio.run(scenario())
    assert [row["event_id"] for row in stored(outbox_postgres)] == ids[:3]
    assert ids[1] == own
    assert len(set(ids)) == 4
    assert once.event_id is None


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_a_service_without_sqlalchemy_imports_none_of_it(outbox_postgres, driver):
    """It takes a third of a second, and 20 MB. Nor does it import another driver, pydantic or OpenTelemetry."""
    code = """
import asyncio, datetime, sys, uuid
import outbox, outbox.inbox, outbox.testing

event = outbox.Event("Order", 1, "T", {"n": 1}, idempotency_key="a")
later = datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC)

def with_psycopg(url):
    import psycopg
    with psycopg.connect(url) as connection:
        outbox.Outbox().add(connection, event)
        outbox.Outbox(unique_keys=True).add_many(connection, [event, event], lock_key=True)
        outbox.Outbox().cancel(connection, outbox.Outbox().add(connection, event, not_before=later))
        assert len(outbox.testing.recorded_events(connection)) == 2
        assert outbox.inbox.once(connection, uuid.uuid4(), consumer="billing")

async def with_asyncpg(url):
    import asyncpg
    connection = await asyncpg.connect(url)
    async with connection.transaction():
        await outbox.AsyncOutbox().add(connection, event)
        await outbox.AsyncOutbox(unique_keys=True).add_many(connection, [event, event], lock_key=True)
        scheduled = await outbox.AsyncOutbox().add(connection, event, not_before=later)
        await outbox.AsyncOutbox().cancel(connection, scheduled)
        assert len(await outbox.testing.recorded_events_async(connection)) == 2
        assert await outbox.inbox.once_async(connection, uuid.uuid4(), consumer="billing")
    await connection.close()

driver, url = sys.argv[1:]
with_psycopg(url) if driver == "psycopg" else asyncio.run(with_asyncpg(url))
others = {"sqlalchemy", "psycopg", "asyncpg", "pydantic", "opentelemetry"} - {driver}
print(sorted(name for name in sys.modules if name.partition(".")[0] in others))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, driver, outbox_postgres.url],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
    assert len(stored(outbox_postgres)) == 2
