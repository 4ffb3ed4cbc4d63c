"""Headers of all events, and ``check``."""

from __future__ import annotations

import contextvars
import dataclasses

import psycopg
import pytest
import sqlalchemy as sa
from rows_and_roles import login_role
from writer_targets import both_ways, event, on_target, stored

from outbox import ConfigurationError, Event, EventError, Outbox, SchemaError, TargetError
from relay.operations.roles import RoleKind, grants

OWN = {"tenant": "acme", "correlation-id": "7"}


def headers(database) -> list[dict[str, str] | None]:
    return [row["headers"] for row in stored(database)]


@both_ways
@on_target
async def test_headers_of_all_events(target, outbox_postgres):
    target.options = {"headers": OWN}
    await target.add(event())
    await target.add_many([event(), dataclasses.replace(event(), headers={"tenant": "other", "n": "1"})])
    await target.commit()
    assert headers(outbox_postgres) == [OWN, OWN, OWN | {"tenant": "other", "n": "1"}]


def test_a_function_is_called_once_in_each_call(outbox_postgres):
    request = contextvars.ContextVar("request", default=0)

    def current() -> dict[str, str]:
        request.set(request.get() + 1)
        return {"request": str(request.get())}

    outbox = Outbox(headers=current)
    with outbox_postgres.connect() as connection:
        outbox.add(connection, event())
        outbox.add_many(connection, [event(), event()])
        outbox.add_many(connection, [])
    assert [one["request"] for one in headers(outbox_postgres)] == ["1", "2", "2"]


def test_headers_that_no_event_may_have(outbox_postgres):
    with outbox_postgres.connect() as connection:
        for wrong in ({"id": "x"}, {"a b": "x"}, {"a": 1}, ["a"], {"idempotency-key": "x"}):
            with pytest.raises(ConfigurationError, match="headers"):
                Outbox(headers=wrong)
            with pytest.raises(EventError, match="headers"):
                Outbox(headers=lambda wrong=wrong: wrong).add(connection, event())
        Outbox().add(connection, event())
    assert headers(outbox_postgres) == [None]


def test_a_trace_of_all_events_is_a_whole_one(outbox_postgres):
    with outbox_postgres.connect() as connection:
        Outbox(headers={"traceparent": "a", "tracestate": "b"}).add(
            connection, Event("Order", 1, "T", headers={"traceparent": "c"})
        )
    assert headers(outbox_postgres) == [{"traceparent": "c"}]


@both_ways
@on_target
async def test_check(target, outbox_postgres):
    await target.check()
    target.options = {"unique_keys": True}
    await target.check()
    target.schema = "elsewhere"
    with pytest.raises(SchemaError, match=r"events.event_id is not there; run `outbox db upgrade`.* 'elsewhere'"):
        await target.check()
    # It leaves the transaction usable.
    target.schema = "outbox"
    await target.add(event())
    await target.commit()
    assert len(stored(outbox_postgres)) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "ALTER TABLE outbox.events DROP COLUMN headers CASCADE",
            r"events\.headers is not there; run `outbox db upgrade`",
        ),
        ("DROP TABLE outbox.scheduled", r"scheduled\.\w+ is not there"),
        (
            "REVOKE INSERT (payload_bytes) ON outbox.events FROM {role}",
            "lacks the right INSERT on events.payload_bytes",
        ),
        (
            "REVOKE SELECT (event_id) ON outbox.idempotency_keys FROM {role}",
            "lacks the right SELECT on idempotency_keys",
        ),
        ("REVOKE USAGE ON SCHEMA outbox FROM {role}", "lacks the right USAGE on the schema outbox; .*outbox db roles"),
    ],
)
def test_check_says_what_is_missing(outbox_postgres, change, said):
    with outbox_postgres.connect(autocommit=True) as admin, login_role(admin, "writer") as role:
        for statement in grants([(RoleKind.WRITER, role)], "outbox", "consumer", wal=False):
            admin.execute(statement)
        with psycopg.connect(outbox_postgres.url.replace("postgres@", f"{role}@")) as connection:
            outbox = Outbox(unique_keys=True)
            outbox.check(connection)
            connection.rollback()
            admin.execute(change.format(role=role))
            with pytest.raises(SchemaError, match=said):
                outbox.check(connection)
            if "idempotency" in change:
                Outbox().check(connection)


def test_check_needs_a_transaction_that_may_write(outbox_postgres):
    with outbox_postgres.connect() as connection:
        connection.read_only = True
        with pytest.raises(TargetError, match="read-only"):
            Outbox().check(connection)
    with outbox_postgres.connect(autocommit=True) as connection, pytest.raises(TargetError, match="no transaction"):
        Outbox().check(connection)


def test_check_looks_into_the_schema_that_an_engine_translates(outbox_postgres):
    engine = outbox_postgres.engine().execution_options(schema_translate_map={"theirs": "outbox"})
    with engine.connect() as connection:
        Outbox(schema="theirs").check(connection)
        with pytest.raises(SchemaError):
            Outbox(schema="other").check(connection)
        assert connection.execute(sa.text("SELECT 1")).scalar() == 1
    engine.dispose()


def test_check_looks_into_the_search_path_where_an_engine_leaves_the_schema_out(outbox_postgres):
    """As ``add`` does: the first schema of the path need not be the one with the tables."""
    engine = outbox_postgres.engine().execution_options(schema_translate_map={"outbox": None})
    with engine.connect() as connection:
        connection.execute(sa.text("CREATE SCHEMA app"))
        connection.execute(sa.text("SET search_path = app"))
        with pytest.raises(SchemaError, match=r"events\..* is not there"):
            Outbox().check(connection)
        connection.execute(sa.text("SET search_path = app, outbox"))
        Outbox(unique_keys=True).check(connection)
        Outbox().add(connection, event())
        connection.execute(sa.text("ALTER TABLE outbox.scheduled RENAME TO other"))
        with pytest.raises(SchemaError, match=r"scheduled\..* is not there"):
            Outbox().check(connection)
    engine.dispose()
