"""``once`` on every target: new once, whatever repeats, rolls back or runs beside it."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import inspect
import json
import threading
import uuid

import psycopg
import pytest
import sqlalchemy as sa
from psycopg.conninfo import make_conninfo
from rows_and_roles import login_role
from sqlalchemy.ext.asyncio import async_scoped_session
from support import stop_clock, wait_until, with_path_of_role
from typer.testing import CliRunner
from uuid_utils.compat import uuid7
from writer_targets import Order, Undo, each_driver, on_target, opened, round_trips, waits_for_a_lock

from outbox import ConfigurationError, TargetError
from outbox.consumer.ids import NO_TIME, day
from outbox.consumer.retention import IdRetention
from outbox.inbox import MessageTooOld, once, once_async
from relay.cli.app import app
from relay.operations.roles import RoleKind, grants

__all__ = ["with_path_of_role"]


def message(id_: uuid.UUID) -> dict[str, str]:
    return {"ce_id": str(id_)}


async def is_new(target, id_: uuid.UUID, consumer: str = "billing", **options) -> bool:
    asynchronous = inspect.iscoroutinefunction(target.owner.commit) or isinstance(target.owner, async_scoped_session)
    if asynchronous:
        return await once_async(target.given, message(id_), consumer=consumer, **options)
    return once(target.given, message(id_), consumer=consumer, **options)


def remembered(database) -> list[tuple[str, uuid.UUID]]:
    with psycopg.connect(database.url) as connection:
        query = "SELECT grp, message_id FROM consumer.processed_messages ORDER BY grp, message_id"
        return connection.execute(query).fetchall()


@each_driver
@on_target
async def test_a_message_is_new_once(target, outbox_postgres):
    first, second = sorted([uuid7(), uuid.uuid4()])
    assert await is_new(target, first) is True
    # In the same transaction, too.
    assert await is_new(target, first) is False
    assert remembered(outbox_postgres) == []
    await target.commit()
    assert await is_new(target, first) is False
    assert await is_new(target, first, "shipping") is True
    assert await is_new(target, second) is True
    await target.commit()
    known = [("billing", first), ("billing", second), ("shipping", first)]
    assert remembered(outbox_postgres) == known
    # A rollback makes it new again, of a transaction and of a savepoint.
    third = uuid7()
    assert await is_new(target, third, "third") is True
    await target.rollback()
    with contextlib.suppress(Undo):
        async with target.savepoint():
            assert await is_new(target, third, "third") is True
            raise Undo
    assert remembered(outbox_postgres) == known
    assert await is_new(target, third, "third") is True
    await target.commit()
    assert remembered(outbox_postgres) == [*known, ("third", third)]


@pytest.mark.parametrize("name", ["psycopg Cursor", "asyncpg Connection"])
@on_target
async def test_events_with_one_idempotency_key_are_new_once(target, outbox_postgres):
    asynchronous = inspect.iscoroutinefunction(target.owner.commit)

    async def new(value: str | None, kind: str = "Order", **options) -> bool:
        id_ = str(uuid7())
        headers = {"ce_id": id_, "aggregate-type": kind, "idempotency-key": value or id_}
        answer = (once_async if asynchronous else once)(target.given, headers, consumer="billing", **options)
        return await answer if asynchronous else answer

    key = {"key": "idempotency-key"}
    assert [await new("a", **key), await new("a", **key), await new("a", "Invoice", **key)] == [True, False, True]
    # Events without a key of their own, and a consumer that does not ask for keys.
    assert [await new(None, **key), await new(None, **key), await new("a"), await new("a")] == [True] * 4
    await target.commit()
    assert await new("a", **key) is False


@pytest.mark.parametrize("autoflush", [True, False])
@pytest.mark.parametrize("name", ["Session, psycopg", "AsyncSession, psycopg"])
@on_target
async def test_a_session_is_not_flushed(target, outbox_postgres, autoflush):
    """Of a repeat, the caller drops what it has added before."""
    target.given.autoflush = autoflush
    with outbox_postgres.connect(autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (id text PRIMARY KEY)")
    id_ = uuid7()
    for wanted, key in ((True, "first"), (False, "repeated")):
        row = Order(id=key)
        target.given.add(row)
        assert await is_new(target, id_) is wanted
        assert row in target.given.new
        if not wanted:
            target.given.expunge(row)
        await target.commit()
    with outbox_postgres.connect() as connection:
        assert connection.execute("SELECT id FROM orders").fetchall() == [("first",)]


@pytest.mark.parametrize(
    ("name", "first_commits"),
    [
        ("Session, psycopg2", True),
        ("psycopg Connection", False),
        ("AsyncSession, asyncpg", False),
        ("asyncpg Connection", True),
    ],
)
def test_a_twin_waits_for_the_first(outbox_postgres, name, first_commits):
    id_ = uuid7()
    first = outbox_postgres.connect()
    # The consumer is known: twins do not wait for its row.
    assert once(first, message(uuid7()), consumer="billing")
    first.commit()
    assert once(first, message(id_), consumer="billing")
    found: list[bool] = []

    async def scenario() -> None:
        async with opened(name, outbox_postgres) as target:
            found.append(await is_new(target, id_))
            await target.commit()

    twin = threading.Thread(target=lambda: asyncio.run(scenario()))
    twin.start()
    with outbox_postgres.connect(autocommit=True) as watch:
        waiting = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        wait_until(lambda: watch.execute(waiting).fetchone(), what="the twin to wait")
    assert found == []
    (first.commit if first_commits else first.rollback)()
    twin.join(30)
    assert found == [not first_commits]
    assert ("billing", id_) in remembered(outbox_postgres)


def test_above_read_committed_a_twin_gets_the_drivers_error(outbox_postgres):
    id_ = uuid7()
    first, second = outbox_postgres.connect(), outbox_postgres.connect()
    second.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    second.execute("SELECT 1")
    assert once(first, message(id_), consumer="billing")
    first.commit()
    with pytest.raises(psycopg.errors.SerializationFailure):
        once(second, message(id_), consumer="billing")
    second.rollback()
    assert once(second, message(id_), consumer="billing") is False


def test_autocommit_is_refused(outbox_postgres):
    with outbox_postgres.connect(autocommit=True) as connection:
        with pytest.raises(TargetError, match="the message's id would be committed apart from its effect"):
            once(connection, message(uuid7()), consumer="billing")
        with connection.transaction():
            assert once(connection, message(uuid7()), consumer="billing")
    engine = outbox_postgres.engine(isolation_level="AUTOCOMMIT")
    with engine.connect() as connection, pytest.raises(TargetError, match="AUTOCOMMIT"):
        once(connection, message(uuid7()), consumer="billing")
    assert len(remembered(outbox_postgres)) == 1


def test_the_other_kind_of_target_is_named(outbox_postgres):
    async def scenario() -> None:
        async with await psycopg.AsyncConnection.connect(outbox_postgres.url) as connection:
            with pytest.raises(TargetError, match=r"once takes .* AsyncConnection given use once_async"):
                once(connection, message(uuid7()), consumer="billing")

    asyncio.run(scenario())
    connection = outbox_postgres.connect()
    with pytest.raises(TargetError, match=r"once_async takes .* Connection given use once"):
        asyncio.run(once_async(connection, message(uuid7()), consumer="billing"))
    with pytest.raises(TargetError, match=r"once takes .*, not the str given"):
        once("postgresql://", message(uuid7()), consumer="billing")
    sqlite = sa.create_engine("sqlite://")
    with sqlite.connect() as other, pytest.raises(TargetError, match="the inbox lives in Postgres"):
        once(other, message(uuid7()), consumer="billing")
    sqlite.dispose()


def test_impossible_names_are_refused_before_anything_is_sent(outbox_postgres):
    connection = outbox_postgres.connect()
    for consumer in ("", "x" * 201, "a\0b"):
        with pytest.raises(ConfigurationError, match="consumer"):
            once(connection, message(uuid7()), consumer=consumer)
    assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


def test_it_is_one_statement(outbox_postgres, tmp_path):
    connection = outbox_postgres.connect()
    connection.execute("SELECT 1")
    found = round_trips(connection, tmp_path / "trace", lambda: once(connection, message(uuid7()), consumer="b"))
    assert found == 1


def test_the_consumers_row_says_how_it_recognizes_messages(outbox_postgres):
    """By this the audit knows whether it finds events by their ids."""
    with psycopg.connect(outbox_postgres.url) as connection:
        once(connection, message(uuid7()), consumer="by id")
        once(connection, message(uuid7()) | {"idempotency-key": "k"}, consumer="by key", key="idempotency-key")
        rows = connection.execute("SELECT grp, strategy FROM consumer.groups ORDER BY 1").fetchall()
    assert rows == [("by id", "Dedup"), ("by key", "DedupByKey")]


def test_a_consumers_role_is_enough(outbox_postgres):
    with outbox_postgres.connect(autocommit=True) as admin, login_role(admin, "consumer") as role:
        for statement in grants([(RoleKind.CONSUMER, role)], "outbox", "consumer", wal=False):
            admin.execute(statement.encode())
        with admin.transaction():
            admin.execute(f"SET LOCAL ROLE {role}")
            old = id_of(dt.datetime.now(dt.UTC) - dt.timedelta(days=3))
            assert once(admin, message(old), consumer="billing")


def id_of(when: dt.datetime) -> uuid.UUID:
    return uuid.UUID(
        int=(int(when.timestamp() * 1000) << 80) | (7 << 76) | (2 << 62) | uuid.uuid4().int & (1 << 60) - 1
    )


def test_what_was_forgotten_is_never_taken_for_new(outbox_postgres):
    """Retention is that of the Spark consumers: by the ids' days and the database's clock, not of ids seen lately."""
    today, _ = stop_clock(outbox_postgres.url)
    midnight = dt.datetime.combine(today, dt.time(), dt.UTC)
    old, seen_lately, other = (id_of(midnight - dt.timedelta(days=days)) for days in (9, 8, 9))
    timeless = uuid.uuid4()
    with outbox_postgres.connect() as connection:
        for id_ in (old, seen_lately, timeless, uuid7()):
            assert once(connection, message(id_), consumer="billing")
        assert once(connection, message(seen_lately), consumer="young")
        query = "UPDATE consumer.processed_messages SET seen_at = now() - interval '6 days' WHERE message_id = ANY(%s)"
        connection.execute(query, ([old, timeless],))
    assert [done.deleted_rows for done in IdRetention(outbox_postgres.url, "consumer", 5).prune()] == [0, 1]
    with outbox_postgres.connect() as connection:
        with pytest.raises(
            MessageTooOld, match=f"{old} is of a day before {today - dt.timedelta(days=8)}, and billing"
        ):
            once(connection, message(old), consumer="billing")
        connection.rollback()
        # One of the same day that was never applied can't be told from it.
        with pytest.raises(MessageTooOld):
            once(connection, message(other), consumer="billing")
        connection.rollback()
        assert once(connection, message(seen_lately), consumer="billing") is False
        assert once(connection, message(timeless), consumer="billing") is False
        assert once(connection, message(uuid7()), consumer="billing") is True
        # This consumer had nothing of that day, and has forgotten nothing.
        assert once(connection, message(other), consumer="young") is True

    async def with_asyncpg() -> None:
        async with opened("asyncpg Connection", outbox_postgres) as target:
            with pytest.raises(MessageTooOld, match=str(old)):
                await is_new(target, old)
            await target.rollback()
            assert await is_new(target, seen_lately) is False
            assert await is_new(target, timeless) is False
            assert await is_new(target, id_of(midnight - dt.timedelta(days=9)), "young") is True

    asyncio.run(with_asyncpg())


@pytest.mark.usefixtures("with_path_of_role")
def test_no_event_is_new_again_after_the_databases_clock_was_ahead(outbox_postgres):
    IdRetention(outbox_postgres.url, "consumer", 5).make()
    id_ = uuid7()
    with outbox_postgres.connect() as connection:
        assert once(connection, message(id_), consumer="billing")
    _, ahead = stop_clock(outbox_postgres.url, 30)
    made, _ = IdRetention(make_conninfo(outbox_postgres.url, options=ahead), "consumer", 5).prune()
    assert made.made
    with outbox_postgres.connect() as connection:
        assert once(connection, message(id_), consumer="billing") is False


def test_it_reads_what_was_forgotten_while_it_waited(outbox_postgres):
    """The insert waits for the transaction that deletes the same id; what that has noted counts."""
    today, _ = stop_clock(outbox_postgres.url)
    id_ = id_of(dt.datetime.combine(today, dt.time(), dt.UTC) - dt.timedelta(days=9))
    with outbox_postgres.connect() as connection:
        assert once(connection, message(id_), consumer="billing")
    forgetting, second = outbox_postgres.connect(), outbox_postgres.connect()
    forgetting.execute("DELETE FROM consumer.processed_messages")
    forgetting.execute("UPDATE consumer.groups SET forgotten_before = %s", (today,))
    raised: list[Exception] = []

    def wait() -> None:
        try:
            once(second, message(id_), consumer="billing")
        except MessageTooOld as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: waits_for_a_lock(outbox_postgres, second), what="the insert to wait")
    forgetting.commit()
    thread.join(30)
    assert len(raised) == 1


@pytest.mark.parametrize("level", [psycopg.IsolationLevel.REPEATABLE_READ, psycopg.IsolationLevel.SERIALIZABLE])
def test_above_read_committed_what_was_forgotten_since_the_snapshot_is_the_drivers_error(outbox_postgres, level):
    today, _ = stop_clock(outbox_postgres.url)
    id_ = id_of(dt.datetime.combine(today, dt.time(), dt.UTC) - dt.timedelta(days=9))
    with outbox_postgres.connect() as connection:
        for each in (id_, uuid7()):
            assert once(connection, message(each), consumer="billing")
        query = "UPDATE consumer.processed_messages SET seen_at = now() - interval '6 days' WHERE message_id = %s"
        connection.execute(query, (id_,))
    late = outbox_postgres.connect()
    late.isolation_level = level
    late.execute("SELECT 1")
    assert [done.deleted_rows for done in IdRetention(outbox_postgres.url, "consumer", 5).prune()] == [0, 1]
    with pytest.raises(psycopg.errors.SerializationFailure):
        once(late, message(id_), consumer="billing")
    late.rollback()
    with pytest.raises(MessageTooOld):
        once(late, message(id_), consumer="billing")


def test_the_day_is_that_of_the_table(outbox_postgres):
    from outbox.consumer.ids import DAY_OF_ID

    ids = [uuid7(), uuid.uuid4(), uuid.UUID(int=0), uuid.UUID("0198a7c4-5d3e-7b21-cc55-2f6d8e1a4b70")]
    ids += [id_of(dt.datetime(2026, 2, 28, 23, 59, 59, 999000, dt.UTC)), id_of(dt.datetime(2026, 3, 1, tzinfo=dt.UTC))]
    with outbox_postgres.connect() as connection:
        query = f"SELECT {DAY_OF_ID} FROM unnest(%s::uuid[]) WITH ORDINALITY AS batch (message_id, n) ORDER BY n"
        found = [each for (each,) in connection.execute(query, (ids,))]
    assert [day(id_) for id_ in ids] == found
    assert found[1:4] == [NO_TIME] * 3
    assert found[4:] == [dt.date(2026, 2, 28), dt.date(2026, 3, 1)]


def test_commands_show_a_consumer_that_has_no_partitions(outbox_postgres, outbox_kafka):
    with outbox_postgres.connect() as connection:
        assert once(connection, message(uuid7()), consumer="billing")
    given = {
        "OUTBOX_DATABASE_URL": outbox_postgres.url,
        "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": outbox_kafka.bootstrap_servers,
    }
    for command in ("consumers groups", "offsets show", "status"):
        found = CliRunner().invoke(app, [*command.split(), "--json"], env=given)
        assert "billing" in found.output
        if command == "status":
            assert json.loads(found.output)["problems"] == ["no relay is running"]
        else:
            assert found.exit_code == 0, found.output
