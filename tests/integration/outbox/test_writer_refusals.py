"""What the writer refuses: targets without a transaction, the wrong class, and events that can't be written."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
import uuid
from decimal import Decimal

import asyncpg
import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker
from writer_targets import each_driver, event, numbers, on_target, stored

from outbox import AsyncOutbox, ConfigurationError, Event, EventError, EventTooLarge, Outbox, PayloadError, TargetError
from outbox.urls import sqlalchemy_url

# --- autocommit ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("driver", "level"),
    [("psycopg", "engine"), ("psycopg", "option of the engine"), ("psycopg2", "option of the connection")],
)
def test_autocommit_in_sqlalchemy_is_refused(outbox_postgres, driver, level):
    engine = sa.create_engine(
        sqlalchemy_url(outbox_postgres.url, driver), **({"isolation_level": "AUTOCOMMIT"} if level == "engine" else {})
    )
    bind = engine.execution_options(isolation_level="AUTOCOMMIT") if level == "option of the engine" else engine
    options = {"isolation_level": "AUTOCOMMIT"} if level == "option of the connection" else {}
    with bind.connect().execution_options(**options) as connection:
        with pytest.raises(TargetError, match="AUTOCOMMIT"):
            Outbox().add(connection, event())
        with connection.begin(), pytest.raises(TargetError, match="AUTOCOMMIT"):
            Outbox().add_many(connection, [event(), event()])
    with Session(bind) as session:
        session.connection(execution_options=options)
        with pytest.raises(TargetError, match="AUTOCOMMIT"):
            Outbox().add(session, event())
    # A connection of the same pool without it is as good as ever.
    if level == "option of the connection":
        with Session(engine) as session, session.begin():
            Outbox().add(session, event(7))
    engine.dispose()
    assert numbers(outbox_postgres) == ([7] if level == "option of the connection" else [])


@pytest.mark.parametrize(("driver", "level"), [("psycopg", "engine"), ("asyncpg", "option of the connection")])
def test_autocommit_in_sqlalchemys_asyncio_is_refused(outbox_postgres, driver, level):
    async def scenario() -> None:
        options = {"isolation_level": "AUTOCOMMIT"}
        url = sqlalchemy_url(outbox_postgres.url, driver)
        engine = create_async_engine(url, **(options if level == "engine" else {}))
        async with engine.connect() as connection:
            await connection.execution_options(**options)
            with pytest.raises(TargetError, match="AUTOCOMMIT"):
                await AsyncOutbox().add(connection, event())
        async with AsyncSession(engine) as session:
            await session.connection(execution_options=options)
            with pytest.raises(TargetError, match="AUTOCOMMIT"):
                await AsyncOutbox().add_many(session, [event(), event()])
        await engine.dispose()

    asyncio.run(scenario())
    assert stored(outbox_postgres) == []


def test_autocommit_in_psycopg_is_refused_unless_a_transaction_is_open(outbox_postgres):
    outbox = Outbox()
    with outbox_postgres.connect(autocommit=True) as connection:
        for target in (connection, connection.cursor()):
            with pytest.raises(TargetError, match=r"connection\.transaction\(\)"):
                outbox.add(target, event())
            with pytest.raises(TargetError, match=r"connection\.transaction\(\)"):
                outbox.add_many(target, [event(), event()])
        with connection.transaction():
            outbox.add(connection, event(1))
            outbox.add(connection.cursor(), event(2))
        connection.execute("BEGIN")
        outbox.add(connection, event(3))
        connection.execute("COMMIT")
        with pytest.raises(TargetError):
            outbox.add(connection, event())
    assert numbers(outbox_postgres) == [1, 2, 3]


def test_autocommit_in_psycopgs_asyncio_is_refused_unless_a_transaction_is_open(outbox_postgres):
    async def scenario() -> None:
        outbox = AsyncOutbox()
        async with await psycopg.AsyncConnection.connect(outbox_postgres.url, autocommit=True) as connection:
            with pytest.raises(TargetError, match=r"connection\.transaction\(\)"):
                await outbox.add(connection, event())
            async with connection.transaction():
                await outbox.add_many(connection, [event(1), event(2)])
            async with connection.pipeline():
                await connection.execute("SELECT 1")
                with pytest.raises(TargetError, match=r"connection\.transaction\(\)"):
                    await outbox.add(connection, event())
                async with connection.transaction():
                    await outbox.add(connection, event(3))
                    await outbox.add_many(connection, [event(4), event(5)])

    asyncio.run(scenario())
    assert numbers(outbox_postgres) == [1, 2, 3, 4, 5]


def test_asyncpg_outside_of_a_transaction_is_refused(outbox_postgres):
    async def scenario() -> None:
        outbox = AsyncOutbox()
        async with asyncpg.create_pool(outbox_postgres.url, min_size=1) as pool:
            async with pool.acquire() as pooled:
                connection = await asyncpg.connect(outbox_postgres.url)
                for number, target in ((1, connection), (4, pooled)):
                    with pytest.raises(TargetError, match=r"connection\.transaction\(\)"):
                        await outbox.add(target, event())
                    with pytest.raises(TargetError, match=r"connection\.transaction\(\)"):
                        await outbox.cancel(target, uuid.uuid4())
                    async with target.transaction():
                        await outbox.add_many(target, [event(number), event(number + 1)])
                    await target.execute("BEGIN")
                    await outbox.add(target, event(number + 2))
                    await target.execute("COMMIT")
                    with pytest.raises(TargetError, match=r"connection\.transaction\(\)"):
                        await outbox.add_many(target, [event(), event()])
                await connection.close()
                with pytest.raises(TargetError, match=r"connection\.transaction\(\)"):
                    await outbox.add(connection, event())
            with pytest.raises(asyncpg.InterfaceError, match="released back to the pool"):
                await outbox.add(pooled, event())
            with pytest.raises(TargetError, match="or an asyncpg Connection, not the asyncpg Pool given"):
                await outbox.add(pool, event())

    asyncio.run(scenario())
    assert numbers(outbox_postgres) == [1, 2, 3, 4, 5, 6]


def test_pipelines(outbox_postgres):
    outbox = Outbox()
    with outbox_postgres.connect() as connection:
        with connection.pipeline():
            outbox.add(connection, event(1))
            outbox.add_many(connection, [event(2), event(3)], lock_key=True)
            with pytest.raises(EventTooLarge):
                outbox.add(connection, Event("Order", "k", "T", b"x" * 1_000_000))
            outbox.add(connection.cursor(), event(4))
        connection.commit()
    with outbox_postgres.connect(autocommit=True) as connection:
        with connection.pipeline(), connection.transaction():
            outbox.add(connection, event(5))
            outbox.add_many(connection, [event(6), event(7)])
        with connection.pipeline():
            # What was sent is not answered yet; whether a transaction is open, only the server knows.
            connection.execute("SELECT 1")
            with pytest.raises(TargetError, match=r"connection\.transaction\(\)"):
                outbox.add(connection, event())
            connection.execute("BEGIN")
            outbox.add(connection, event(8))
            connection.execute("COMMIT")
            with pytest.raises(TargetError, match=r"connection\.transaction\(\)"):
                outbox.add(connection, event())
    assert numbers(outbox_postgres) == [1, 2, 3, 4, 5, 6, 7, 8]


# --- the wrong target ------------------------------------------------------------------------------------------------


class OwnAsyncSession(AsyncSession):
    """As other libraries derive theirs."""


def test_the_wrong_class_names_the_right_one(outbox_postgres):
    async def scenario() -> None:
        engine = create_async_engine(sqlalchemy_url(outbox_postgres.url))
        scoped = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)
        async with (
            await psycopg.AsyncConnection.connect(outbox_postgres.url) as connection,
            engine.connect() as sa_connection,
            OwnAsyncSession(engine) as session,
        ):
            for target in (connection, connection.cursor(), sa_connection, session, scoped):
                with pytest.raises(TargetError, match="use AsyncOutbox") as caught:
                    Outbox().add(target, event())
                assert type(target).__name__ in str(caught.value)
        await engine.dispose()
        raw = await asyncpg.connect(outbox_postgres.url)
        with pytest.raises(TargetError, match="for the asyncpg Connection given use AsyncOutbox"):
            Outbox().add(raw, event())
        await raw.close()
        sync_engine = outbox_postgres.engine()
        with (
            outbox_postgres.connect() as connection,
            sync_engine.connect() as sa_connection,
            Session(sync_engine) as session,
        ):
            scoped = scoped_session(sessionmaker(sync_engine))
            for target in (connection, connection.cursor(), sa_connection, session, scoped):
                with pytest.raises(TargetError, match="use Outbox") as caught:
                    await AsyncOutbox().add(target, event())
                assert type(target).__name__ in str(caught.value)
        with pytest.raises(TargetError, match="the dict given"):
            await AsyncOutbox().add({}, event())

    asyncio.run(scenario())
    assert stored(outbox_postgres) == []


def test_what_is_no_target_at_all(outbox_postgres):
    with pytest.raises(TargetError, match="the dict given"):
        Outbox().add({}, event())
    with pytest.raises(TargetError, match="the sqlalchemy Engine given"):
        Outbox().add_many(outbox_postgres.engine(), [])
    engine = sa.create_engine("sqlite://")
    with engine.connect() as connection, pytest.raises(TargetError, match="goes to sqlite"):
        Outbox().add(connection, event())
    engine.dispose()


class Base(DeclarativeBase):
    pass


class Thing(Base):
    __tablename__ = "things"
    id: Mapped[str] = mapped_column(primary_key=True)


def test_a_session_with_several_databases_is_told_to_choose(outbox_postgres):
    with Session(binds={Thing: outbox_postgres.engine()}) as session:
        with pytest.raises(TargetError, match="bind_arguments"):
            Outbox().add(session, event(1))
        Outbox().add(session.connection(bind_arguments={"mapper": Thing}), event(2))
        session.commit()
    assert numbers(outbox_postgres) == [2]


def test_the_limit_may_only_be_lowered():
    for limit in (0, 1_000_001):
        with pytest.raises(ConfigurationError, match="max_event_bytes"):
            Outbox(max_event_bytes=limit)


# --- the wrong event -------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Line:
    price: Decimal


REFUSED = [
    (lambda: {"payload": 1}, EventError, "event"),
    (lambda: Event("Order", "x" * 1001, "T"), EventError, "aggregate_id"),
    (lambda: Event("Order", "1", "T", headers={"ce_id": "1"}), EventError, "headers['ce_id']"),
    (lambda: Event("Order", "1", "T", [Line(Decimal("NaN"))]), PayloadError, "payload[0].price"),
    (lambda: Event("Order", "1", "T", {"a": "x\0"}), PayloadError, "payload['a']"),
    (lambda: Event("Order", "1", "T", {"a": "x" * 1_000_000}), EventTooLarge, "payload"),
]


@each_driver
@on_target
async def test_a_refused_event_names_its_field_and_leaves_the_transaction_usable(target, outbox_postgres):
    await target.add(event(1))
    for make, error, field in REFUSED:
        with pytest.raises(error) as caught:
            await target.add(make())
        assert caught.value.field == field
        assert str(caught.value).startswith(f"{field}: ")
        # One that is wrong keeps the others of its list out.
        with pytest.raises(error):
            await target.add_many([event(2), make(), event(3)])
    await target.add(event(4))
    await target.commit()
    assert numbers(outbox_postgres) == [1, 4]


# --- a lean installation ---------------------------------------------------------------------------------------------


def test_neither_psycopg_nor_pydantic_nor_opentelemetry_is_needed(outbox_postgres):
    """As in a service whose driver is another one: there psycopg may lie about without libpq, and can't be imported.

    With asyncpg: tests/integration/release/test_wheel.py. Without SQLAlchemy: test_writer_targets.py.
    """
    code = """
import sys
for absent in ("psycopg", "pydantic", "opentelemetry", "greenlet"):
    sys.modules[absent] = None
import sqlalchemy as sa
from outbox import Event, Outbox, TargetError

with sa.create_engine(sys.argv[1]).begin() as connection:
    Outbox().add(connection, Event("Order", "1", "T", {"n": None}))
    Outbox().add_many(connection, [Event("Order", "1", "T", {"n": 2}), Event("Order", "1", "T", {"n": 3})])
try:
    Outbox().add(object(), Event("Order", "1", "T"))
except TargetError:
    print("as it should be")
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, sqlalchemy_url(outbox_postgres.url, "psycopg2")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("as it should be\n", "")
    assert numbers(outbox_postgres) == [None, 2, 3]
