"""What the caller's transaction survives, on every target; and what is said where the database refuses."""

from __future__ import annotations

import asyncio
import datetime as dt
import select
import sys
import uuid
from functools import partial
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from psycopg import sql
from rows_and_roles import drop_role
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from support import look_up
from writer_targets import both_ways, each_driver, event, numbers, on_target, opened

from outbox import AsyncOutbox, Event, EventError, Outbox, SchemaError, TargetError
from outbox.urls import sqlalchemy_url

EAST, WEST = (dt.timezone(dt.timedelta(hours=hours)) for hours in (14, -12))
FIRST, LAST = dt.datetime(2, 1, 1, tzinfo=dt.UTC), dt.datetime(9998, 12, 31, 23, 59, tzinfo=dt.UTC)
IMPOSSIBLE = {
    "the last moment of Python": dt.datetime.max.replace(tzinfo=dt.UTC),
    "one beyond it": dt.datetime.max.replace(tzinfo=WEST),
    "the first of a year too late": LAST + dt.timedelta(minutes=1),
    "too late in UTC only": dt.datetime(9998, 12, 31, 23, tzinfo=WEST),
    "the first moment of Python": dt.datetime.min.replace(tzinfo=dt.UTC),
    "before the first of Python": dt.datetime.min.replace(tzinfo=EAST),
}
LIMIT = 1000


@both_ways
@on_target
async def test_what_is_refused_reaches_no_server(target, outbox_postgres):
    """The transaction goes on, with what was written before in it."""
    await target.add(event(1))
    for wrong in (None, "", str(uuid.uuid4()), 5):
        with pytest.raises(EventError, match=r"event_id: must be a uuid\.UUID, not ") as caught:
            await target.cancel(wrong)
        assert caught.value.field == "event_id"
    for time in IMPOSSIBLE.values():
        with pytest.raises(EventError, match=r"not_before: must be in the years 2 to 9998 \(UTC\), not "):
            await target.add(event(), not_before=time)
    with pytest.raises(EventError, match=r"lock_key: would lock 1,001 keys") as caught:
        await target.add_many([event(n, str(n)) for n in range(LIMIT + 1)], lock_key=True)
    assert caught.value.field == "lock_key"
    # More events than keys: keys are what is locked.
    await target.add_many([event(n, str(n % LIMIT)) for n in range(2, 3 * LIMIT)], lock_key=True)
    await target.commit()
    assert numbers(outbox_postgres) == list(range(1, 3 * LIMIT))


@each_driver
@on_target
async def test_the_last_times_that_are_taken(target, outbox_postgres):
    for time in (FIRST, FIRST.astimezone(EAST), LAST, LAST.astimezone(WEST)):
        await target.add(event(), not_before=time)
    await target.commit()
    assert look_up(outbox_postgres.url, "SELECT count(*) FROM outbox.scheduled") == [(4,)]


STREAMING: dict[str, dict[str, Any]] = {"stream_results": {"stream_results": True}, "yield_per": {"yield_per": 10}}


@pytest.mark.parametrize(
    ("driver", "option"), [("psycopg", "stream_results"), ("psycopg2", "yield_per"), ("asyncpg", "stream_results")]
)
def test_connections_that_stream_results(outbox_postgres, driver, option):
    """A server-side cursor can't be declared for an INSERT."""
    url, options = sqlalchemy_url(outbox_postgres.url, driver), STREAMING[option]
    tomorrow = dt.datetime.now(dt.UTC) + dt.timedelta(days=1)

    def work(target: Session | sa.Connection) -> None:
        outbox = Outbox()
        outbox.add(target, event(1))
        outbox.add_many(target, [event(2), event(3)], lock_key=True)
        later = outbox.add(target, event(4), not_before=tomorrow)
        assert outbox.cancel(target, later) is True
        # The caller's own statements stream as before.
        selected = target.execute(sa.text("SELECT generate_series(1, 30)"))
        assert (selected.context._is_server_side, selected.scalars().all()) == (True, list(range(1, 31)))

    async def work_async() -> None:
        engine = create_async_engine(url, execution_options=options)
        async with engine.begin() as connection:
            await AsyncOutbox().add(connection, event(1))
            await AsyncOutbox().add_many(connection, [event(2), event(3)], lock_key=True)
        async with AsyncSession(engine) as session, session.begin():
            later = await AsyncOutbox().add(session, event(4), not_before=tomorrow)
            assert await AsyncOutbox().cancel(session, later) is True
        await engine.dispose()

    if driver != "psycopg2":
        asyncio.run(work_async())
    if driver != "asyncpg":
        engine = sa.create_engine(url, execution_options=options)
        with engine.begin() as connection:
            work(connection)
        with Session(engine) as session, session.begin():
            work(session)
        engine.dispose()
    assert numbers(outbox_postgres) == [1, 2, 3] * {"psycopg": 3, "psycopg2": 2, "asyncpg": 1}[driver]


# --- notes on the driver's errors -------------------------------------------------------------------------------------


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", ()))


@each_driver
@on_target
async def test_missing_tables_name_the_command_and_keep_the_drivers_error(target, outbox_postgres):
    """Also those of another version; what the caller's own trigger misses is no matter of our tables."""
    writes = (lambda: target.add(event(1)), lambda: target.add_many([event(1), event(2)]))
    target.schema = "elsewhere"
    for write in writes:
        with pytest.raises(SchemaError) as caught:
            await write()
        assert str(caught.value) == (
            'the outbox\'s tables are missing in this database, or of another version: relation "elsewhere.events" '
            "does not exist; run `outbox db upgrade` on it, or name the outbox's schema in Outbox(schema=…): it is "
            "'elsewhere' here"
        )
        assert type(caught.value.__cause__).__module__.partition(".")[0] in {"psycopg", "asyncpg", "sqlalchemy"}
        await target.rollback()
    target.schema = "outbox"
    with outbox_postgres.connect(autocommit=True) as admin:
        admin.execute("""CREATE FUNCTION public.own() RETURNS trigger LANGUAGE plpgsql AS
                         'BEGIN INSERT INTO typo VALUES (1); RETURN NEW; END'""")
        admin.execute("CREATE TRIGGER own BEFORE INSERT ON outbox.events FOR EACH ROW EXECUTE FUNCTION public.own()")
    for write in writes:
        with pytest.raises(Exception, match='"typo" does not exist') as caught:
            await write()
        assert type(caught.value).__module__.partition(".")[0] in {"psycopg", "asyncpg", "sqlalchemy"}
        await target.rollback()
    with outbox_postgres.connect(autocommit=True) as admin:
        admin.execute("ALTER TABLE outbox.events DROP COLUMN headers")
    with pytest.raises(SchemaError, match=r'"headers" of relation "events" does not exist; run `outbox db upgrade`'):
        await target.add(event(1))


MISTAKES = ("INSERT INTO typo VALUES (1)", "SELECT typo FROM outbox.events")


@pytest.mark.parametrize("wrong", MISTAKES)
def test_the_error_of_an_earlier_statement_in_a_pipeline_stays_the_callers(outbox_postgres, wrong):
    """Its answer has arrived, and is read when the event is sent."""

    def work() -> None:
        with outbox_postgres.connect() as connection, connection.pipeline():
            connection.execute(wrong)
            assert select.select([connection], [], [], 30)[0]
            Outbox().add(connection, event(1))

    async def work_async() -> None:
        async with await psycopg.AsyncConnection.connect(outbox_postgres.url) as connection, connection.pipeline():
            await connection.execute(wrong)
            assert select.select([connection], [], [], 30)[0]
            await AsyncOutbox().add(connection, event(1))

    for fails in (work, lambda: asyncio.run(work_async())):
        with pytest.raises(psycopg.ProgrammingError, match="typo") as caught:
            fails()
        assert notes(caught.value) == ""


@each_driver
def test_missing_rights_name_the_command(outbox_postgres, name):
    """A role that may use the schema, and nothing else. Only what the outbox sends gets a note."""
    role = f"guest_{outbox_postgres.name}"
    with outbox_postgres.connect(autocommit=True) as admin:
        for statement in ("CREATE ROLE {}", "GRANT USAGE ON SCHEMA outbox TO {}", "GRANT {} TO CURRENT_USER"):
            admin.execute(sql.SQL(statement).format(sql.Identifier(role)))
        admin.execute(
            sql.SQL("ALTER DATABASE {} SET role TO {}").format(
                sql.Identifier(outbox_postgres.name), sql.Identifier(role)
            )
        )

    async def scenario() -> None:
        async with opened(name, outbox_postgres) as target:
            with pytest.raises(Exception, match="permission denied") as caught:
                await target.add(event(1))
            assert "`outbox db roles`" in notes(caught.value)
            await target.rollback()
            with pytest.raises(Exception, match="permission denied") as caught:
                await target.cancel(uuid.uuid4())
            assert "`outbox db roles`" in notes(caught.value)

    try:
        asyncio.run(scenario())
    finally:
        with outbox_postgres.connect(autocommit=True) as admin:
            admin.execute("SET ROLE NONE")
            admin.execute(sql.SQL("ALTER DATABASE {} RESET role").format(sql.Identifier(outbox_postgres.name)))
            drop_role(admin, role)


def test_other_errors_and_the_callers_own_have_no_note(outbox_postgres):
    class Own(Exception):
        pass

    engine = outbox_postgres.engine()
    with Session(engine) as session:
        with pytest.raises(sa.exc.ProgrammingError) as caught:
            session.execute(sa.text("SELECT * FROM nowhere"))
        assert notes(caught.value) == ""
        with pytest.raises(sa.exc.InternalError) as caught:  # the transaction is aborted
            Outbox().add(session, event(1))
        assert notes(caught.value) == ""


def test_a_full_lock_table_is_explained(private_postgres):
    """Locks of many calls add up; no call can know of the others."""
    server = private_postgres(settings={"max_locks_per_transaction": "10", "max_connections": "20"})
    database = private_postgres.database(server)
    with psycopg.connect(database.url) as connection:
        calls = ([Event("Order", n * LIMIT + k, "T") for k in range(LIMIT)] for n in range(40))
        with pytest.raises(psycopg.errors.OutOfMemory) as caught:
            list(map(partial(Outbox().add_many, connection, lock_key=True), calls))
        assert "lock_key" in notes(caught.value)
        assert "max_locks_per_transaction" in notes(caught.value)


def test_without_django_there_is_no_word_of_it():
    """With it: django/project/cases.py."""
    with pytest.raises(TargetError) as caught:
        Outbox().add(None, event())
    assert "django" not in str(caught.value) or "django" in sys.modules
