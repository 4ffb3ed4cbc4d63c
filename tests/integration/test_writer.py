"""The writer on every target: committed with the transaction, gone with it, in order, in one statement."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import psycopg
import pytest
import sqlalchemy as sa
from psycopg.rows import dict_row
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

from outbox import AsyncOutbox, Event, EventTooLarge, Outbox, TargetError
from outbox.urls import sqlalchemy_url

outbox = Outbox()
async_outbox = AsyncOutbox()


def event(number: int = 1, key: str = "o-1") -> Event:
    return Event("Order", key, "OrderPlaced", {"n": number})


def stored(database) -> list[dict[str, Any]]:
    with psycopg.connect(database.url, row_factory=dict_row) as connection:
        return connection.execute("SELECT * FROM outbox.events ORDER BY id").fetchall()


def numbers(database) -> list[int]:
    return [row["payload"]["n"] for row in stored(database)]


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[str] = mapped_column(primary_key=True)


# --- every target ----------------------------------------------------------------------------------------------------
# Each gives (target, commit, rollback, savepoint), where savepoint is a context manager that rolls back what is in it.


@contextlib.contextmanager
def sa_connection(database, driver) -> Iterator[Any]:
    engine = sa.create_engine(sqlalchemy_url(database.url, driver))
    with engine.connect() as connection:
        yield connection, connection.commit, connection.rollback, connection.begin_nested
    engine.dispose()


@contextlib.contextmanager
def sa_session(database, driver) -> Iterator[Any]:
    engine = sa.create_engine(sqlalchemy_url(database.url, driver))
    with Session(engine) as session:
        yield session, session.commit, session.rollback, session.begin_nested
    engine.dispose()


@contextlib.contextmanager
def sa_scoped(database, driver) -> Iterator[Any]:
    engine = sa.create_engine(sqlalchemy_url(database.url, driver))
    session = scoped_session(sessionmaker(engine))
    yield session, session.commit, session.rollback, session.begin_nested
    session.remove()
    engine.dispose()


@contextlib.contextmanager
def pg_connection(database, driver) -> Iterator[Any]:
    with psycopg.connect(database.url) as connection:
        yield connection, connection.commit, connection.rollback, connection.transaction


@contextlib.contextmanager
def pg_cursor(database, driver) -> Iterator[Any]:
    with psycopg.connect(database.url) as connection, connection.cursor() as cursor:
        yield cursor, connection.commit, connection.rollback, connection.transaction


SYNC: dict[str, tuple[Callable[..., Any], str]] = {
    "Connection-psycopg": (sa_connection, "psycopg"),
    "Connection-psycopg2": (sa_connection, "psycopg2"),
    "Session-psycopg": (sa_session, "psycopg"),
    "Session-psycopg2": (sa_session, "psycopg2"),
    "scoped_session": (sa_scoped, "psycopg"),
    "psycopg-Connection": (pg_connection, ""),
    "psycopg-Cursor": (pg_cursor, ""),
}


class Undo(Exception):
    pass


@pytest.mark.parametrize("name", SYNC)
def test_every_synchronous_target(outbox_postgres, name):
    opener, driver = SYNC[name]
    with opener(outbox_postgres, driver) as (target, commit, rollback, savepoint):
        given = event(1)
        assert outbox.add(target, given) == given.event_id
        assert numbers(outbox_postgres) == []
        commit()
        assert [row["event_id"] for row in stored(outbox_postgres)] == [given.event_id]
        outbox.add(target, event(2))
        outbox.add_many(target, [event(3), event(4)])
        rollback()
        assert numbers(outbox_postgres) == [1]
        ids = outbox.add_many(target, [event(5), event(6), event(7)], lock_key=True)
        with contextlib.suppress(Undo), savepoint():
            outbox.add(target, event(8))
            outbox.add_many(target, [event(9), event(10)])
            raise Undo
        outbox.add(target, event(11), lock_key=True)
        commit()
        rows = stored(outbox_postgres)
        assert [row["payload"]["n"] for row in rows] == [1, 5, 6, 7, 11]
        assert [row["event_id"] for row in rows[1:4]] == ids


@contextlib.asynccontextmanager
async def async_target(database, kind: str, driver: str):
    if kind == "psycopg":
        async with await psycopg.AsyncConnection.connect(database.url) as connection:
            yield connection, connection.commit, connection.rollback, connection.transaction
        return
    if kind == "cursor":
        async with await psycopg.AsyncConnection.connect(database.url) as connection:
            yield connection.cursor(), connection.commit, connection.rollback, connection.transaction
        return
    engine = create_async_engine(sqlalchemy_url(database.url, driver))
    if kind == "connection":
        async with engine.connect() as connection:
            yield connection, connection.commit, connection.rollback, connection.begin_nested
    elif kind == "scoped":
        session = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)
        yield session, session.commit, session.rollback, session.begin_nested
        await session.remove()
    else:
        async with AsyncSession(engine) as session:
            yield session, session.commit, session.rollback, session.begin_nested
    await engine.dispose()


@pytest.mark.parametrize(
    ("kind", "driver"),
    [
        ("connection", "psycopg"),
        ("connection", "asyncpg"),
        ("session", "psycopg"),
        ("session", "asyncpg"),
        ("scoped", "asyncpg"),
        ("psycopg", ""),
        ("cursor", ""),
    ],
)
def test_every_asynchronous_target(outbox_postgres, kind, driver):
    async def work() -> None:
        async with async_target(outbox_postgres, kind, driver) as (target, commit, rollback, savepoint):
            given = event(1)
            assert await async_outbox.add(target, given) == given.event_id
            assert numbers(outbox_postgres) == []
            await commit()
            await async_outbox.add(target, event(2))
            await async_outbox.add_many(target, [event(3), event(4)])
            await rollback()
            assert numbers(outbox_postgres) == [1]
            await async_outbox.add_many(target, [event(5), event(6), event(7)], lock_key=True)
            with contextlib.suppress(Undo):
                async with savepoint():
                    await async_outbox.add(target, event(8))
                    raise Undo
            await async_outbox.add(target, event(11), lock_key=True)
            await commit()

    asyncio.run(work())
    assert numbers(outbox_postgres) == [1, 5, 6, 7, 11]


# --- what is stored --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_what_the_row_holds(outbox_postgres, driver):
    with Session(outbox_postgres.engine()) as session, session.begin():
        outbox.add_many(
            session,
            [
                Event("Order", "1", "A", {"ü": [1, 2.5, None, "x"]}, headers={"tenant": "acme"}),
                Event("Order", "2", "B", b"\x00\xff", content_type="application/avro"),
                Event("Order", "3", "C", None),
                Event("Order", "4", "D", [1], content_type="application/vnd.shop+json"),
            ],
        )
        outbox.add(session, Event("Order", "5", "E", b""))
    rows = stored(outbox_postgres)
    assert [(row["payload"], row["payload_bytes"], row["headers"]) for row in rows] == [
        ({"ü": [1, 2.5, None, "x"]}, None, {"tenant": "acme"}),
        (None, b"\x00\xff", {"content-type": "application/avro"}),
        (None, None, None),
        ([1], None, {"content-type": "application/vnd.shop+json"}),
        (None, b"", {"content-type": "application/octet-stream"}),
    ]


def test_one_statement_for_one_event_and_one_for_many(outbox_postgres):
    engine = outbox_postgres.engine()
    seen: list[str] = []
    sa.event.listen(engine, "before_cursor_execute", lambda c, cur, statement, *rest: seen.append(statement))
    with Session(engine) as session, session.begin():
        outbox.add(session, event(1))
        assert len(seen) == 1
        outbox.add_many(session, [event(n) for n in range(2, 500)])
        assert len(seen) == 2
        outbox.add_many(session, [event(n) for n in range(500, 600)], lock_key=True)
        assert len(seen) == 3
        outbox.add_many(session, [])
        assert len(seen) == 3
    assert numbers(outbox_postgres) == list(range(1, 600))


def test_an_orm_session_sends_rows_and_events_in_program_order(outbox_postgres):
    """A trigger on the events looks for the order: it must be there although nobody flushed."""
    engine = outbox_postgres.engine()
    with engine.begin() as connection:
        Base.metadata.create_all(connection)
        connection.execute(
            sa.text("""
                CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                  IF NOT EXISTS (SELECT 1 FROM orders WHERE id = NEW.aggregate_id) THEN RAISE 'no order yet'; END IF;
                  RETURN NEW; END $$;
                CREATE TRIGGER look BEFORE INSERT ON outbox.events FOR EACH ROW EXECUTE FUNCTION look()""")
        )
    with Session(engine, autoflush=False) as session, session.begin():
        session.add(Order(id="o-1"))
        outbox.add(session, event())
    assert len(stored(outbox_postgres)) == 1


# --- refused ---------------------------------------------------------------------------------------------------------


def test_autocommit_is_refused_and_a_transaction_inside_it_is_fine(outbox_postgres):
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        with pytest.raises(TargetError, match="transaction"):
            outbox.add(connection, event())
        with pytest.raises(TargetError, match="transaction"):
            outbox.add(connection.cursor(), event())
        with connection.transaction():
            outbox.add(connection, event(1))
        with connection.pipeline(), connection.transaction():
            outbox.add(connection, event(2))
            outbox.add_many(connection, [event(3), event(4)])
    for driver in ("psycopg", "psycopg2"):
        engine = sa.create_engine(sqlalchemy_url(outbox_postgres.url, driver), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection, pytest.raises(TargetError, match="AUTOCOMMIT"):
            outbox.add(connection, event())
        with Session(engine) as session, pytest.raises(TargetError, match="AUTOCOMMIT"):
            outbox.add(session, event())
        engine.dispose()
    assert numbers(outbox_postgres) == [1, 2, 3, 4]


def test_asynchronous_autocommit_is_refused(outbox_postgres):
    async def work() -> None:
        async with await psycopg.AsyncConnection.connect(outbox_postgres.url, autocommit=True) as connection:
            with pytest.raises(TargetError, match="transaction"):
                await async_outbox.add(connection, event())
        for driver in ("psycopg", "asyncpg"):
            engine = create_async_engine(sqlalchemy_url(outbox_postgres.url, driver), isolation_level="AUTOCOMMIT")
            async with engine.connect() as connection:
                with pytest.raises(TargetError, match="AUTOCOMMIT"):
                    await async_outbox.add(connection, event())
            await engine.dispose()

    asyncio.run(work())
    assert stored(outbox_postgres) == []


def test_the_wrong_kind_of_target_names_the_right_class(outbox_postgres):
    async def work() -> None:
        async with await psycopg.AsyncConnection.connect(outbox_postgres.url) as connection:
            with pytest.raises(TargetError, match="AsyncOutbox"):
                outbox.add(connection, event())
        engine = create_async_engine(sqlalchemy_url(outbox_postgres.url))
        async with AsyncSession(engine) as session:
            with pytest.raises(TargetError, match="AsyncOutbox"):
                outbox.add(session, event())
        await engine.dispose()
        with Session(outbox_postgres.engine()) as session, pytest.raises(TargetError, match="use Outbox"):
            await async_outbox.add(session, event())

    asyncio.run(work())
    with pytest.raises(TargetError, match="not a dict"):
        outbox.add({}, event())
    engine = sa.create_engine("sqlite://")
    with engine.connect() as connection, pytest.raises(TargetError, match="sqlite"):
        outbox.add(connection, event())
    engine.dispose()


def test_a_refused_event_leaves_the_transaction_usable(outbox_postgres):
    with psycopg.connect(outbox_postgres.url) as connection:
        outbox.add(connection, event(1))
        with pytest.raises(EventTooLarge):
            outbox.add(connection, Event("Order", "k", "T", {"x": "y" * 1_000_000}))
        outbox.add(connection, event(2))
    assert numbers(outbox_postgres) == [1, 2]


@pytest.mark.parametrize(
    "payload",
    [
        [1] * 333_000,
        {"k": ["a,b:c" * 10] * 18_000},
        [1e300] * 3_000,
        [1e-7, 12345.678e10, -0.5] * 20_000,
        {f"key{n}": {"a": 'ü\n"' * 3} for n in range(25_000)},
    ],
    ids=["commas", "punctuation in text", "exponents", "floats", "objects"],
)
def test_the_writer_counts_bytes_as_the_database_does(outbox_postgres, payload):
    """Find the writer's edge for this shape of payload; the database must find the same size there."""
    from outbox import _payload

    with psycopg.connect(outbox_postgres.url) as connection:
        text, _, _ = _payload.encode(Event("Order", "k", "T", payload))
        row = connection.execute("SELECT octet_length(%s::jsonb::text)", (text,)).fetchone()
    assert _payload.stored_size(text, None, 0) == row[0]


# --- order -----------------------------------------------------------------------------------------------------------


def test_lock_key_makes_id_order_commit_order(outbox_postgres):
    """The second writer of a key waits for the first and so draws a higher id."""
    with psycopg.connect(outbox_postgres.url) as first, psycopg.connect(outbox_postgres.url) as second:
        outbox.add(first, event(1), lock_key=True)
        done = threading.Event()

        def write() -> None:
            outbox.add_many(second, [event(2, "other"), event(3)], lock_key=True)
            second.commit()
            done.set()

        thread = threading.Thread(target=write)
        thread.start()
        with psycopg.connect(outbox_postgres.url, autocommit=True) as watch:
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'"
            while watch.execute(waiting, (second.info.backend_pid,)).fetchone()[0] == 0:
                assert thread.is_alive()
        # Drawn now, before the waiting statement goes on.
        outbox.add(first, event(4), lock_key=True)
        assert not done.is_set()
        first.commit()
        thread.join(10)
        assert done.is_set()
    assert numbers(outbox_postgres) == [1, 4, 2, 3]


def test_many_keys_in_opposite_order_do_not_deadlock(outbox_postgres):
    keys = [f"k{n}" for n in range(30)]
    errors: list[BaseException] = []

    def write(order: list[str]) -> None:
        try:
            with psycopg.connect(outbox_postgres.url) as connection:
                for _ in range(20):
                    outbox.add_many(connection, [event(1, key) for key in order], lock_key=True)
                    connection.commit()
        except BaseException as error:  # noqa: BLE001  shown by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=write, args=(order,)) for order in (keys, keys[::-1], keys[15:] + keys[:15])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert len(stored(outbox_postgres)) == 3 * 20 * 30


# --- trace -----------------------------------------------------------------------------------------------------------


def test_the_writers_trace_travels_with_the_event(outbox_postgres):
    from opentelemetry.sdk.trace import TracerProvider

    tracer = TracerProvider().get_tracer("test")
    with psycopg.connect(outbox_postgres.url) as connection:
        with tracer.start_as_current_span("placing") as span:
            outbox.add(connection, event(1))
            outbox.add(connection, Event("Order", "1", "T", {"n": 2}, headers={"traceparent": "mine"}))
        outbox.add(connection, event(3))
    first, second, third = (row["headers"] for row in stored(outbox_postgres))
    trace_id = f"{span.get_span_context().trace_id:032x}"
    assert first["traceparent"].split("-")[1] == trace_id
    assert second["traceparent"] == "mine"
    assert third is None


def test_ids_are_given_back_as_uuid(outbox_postgres):
    with psycopg.connect(outbox_postgres.url) as connection:
        ids = outbox.add_many(connection, [event(1), event(2)])
    assert all(isinstance(item, UUID) and item.version == 7 for item in ids)
