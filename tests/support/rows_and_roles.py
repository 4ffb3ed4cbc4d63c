"""Rows and roles that tests make by hand. A column that a test does not name has a value that means nothing."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql
from support import wait_until
from typer.testing import CliRunner

from outbox.consumer import connections
from relay.cli.app import app
from relay.operations.roles import RoleKind

NOW = dt.datetime.now(dt.UTC)
# Of a table of the outbox: a DELETE leaves its rows, and reports no error.
KEEP = (
    "CREATE FUNCTION outbox.keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'; "
    "CREATE TRIGGER keep BEFORE DELETE ON outbox.{} FOR EACH ROW EXECUTE FUNCTION outbox.keep()"
).format
_OF_LANE = {"lane": 0, "id": 1}
_EVENT = {"aggregate_type": "Order", "aggregate_id": "k"}
_FAILED = {"attempts": 1, "last_error": "e", "first_failed_at": NOW}
_WAITS = {"blocks": True, "last_failed_at": NOW, "next_attempt_at": "infinity"}
_MESSAGE = {"grp": "g", "topic": "t", "part": 0, "message_offset": 0}
_DEAD = {"topic_id": "T", "message_headers": "[]", "message_time": NOW, "reason": "failed", "error": "why"}
_OFFSET = {"grp": "g", "topic": "t", "part": 0, "topic_id": "T"}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "outbox.events": {**_EVENT, "event_type": "T"},
    "outbox.failures": {**_OF_LANE, **_EVENT, **_FAILED, **_WAITS},
    "outbox.published": {**_OF_LANE, **_EVENT, "event_id": uuid4(), "event_type": "T", "created_at": NOW},
    "outbox.idempotency_keys": {**_EVENT, "idempotency_key": "a", "event_id": uuid4(), "event_type": "T"},
    "outbox.audit": {"what": "discarded", "details": "{}"},
    "outbox.dead_letters": {**_OF_LANE, **_EVENT, **_FAILED, "event_type": "T", "created_at": NOW},
    "consumer.groups": {"grp": "g", "owner": "x"},
    "consumer.offsets": {**_OFFSET, "next_offset": 0, "generation": 1},
    "consumer.losses": {**_OFFSET, "first_offset": 1, "end_offset": 2, "kind": "retention", "detail": "d"},
    "consumer.processed_messages": {"grp": "g", "day": NOW.date(), "message_id": uuid4()},
    "consumer.audit": {"what": "reset", "details": "{}"},
    "consumer.dead_letters": {**_MESSAGE, **_DEAD},
    "consumer.reservations": {**_MESSAGE, "name": "pay", "state": "stuck", "request": "{}"},
}
# Without the time of the next attempt: Python has no infinite one.
_RETURNED = {"outbox.failures": "event_id"}
_IDS = {"outbox.failures": "event_id", "outbox.dead_letters": "event_id", "consumer.reservations": "message_id"}


def put(where: str | psycopg.Connection[Any], table: str, **columns: Any) -> dict[str, Any]:
    """Insert a row, over a connection or at an address. Return its columns; of a failure its event's id."""
    if isinstance(where, str):
        with psycopg.connect(where) as connection:
            return put(connection, table, **columns)
    given = {**_DEFAULTS[table], **columns}
    if (name := _IDS.get(table)) is not None:
        given.setdefault(name, uuid4())
    query = sql.SQL("INSERT INTO {} ({}) VALUES ({}) RETURNING {}").format(
        sql.Identifier(*table.split(".")),
        sql.SQL(", ").join(map(sql.Identifier, given)),
        sql.SQL(", ").join(sql.Placeholder() * len(given)),
        sql.SQL(_RETURNED.get(table, "*")),
    )
    with where.cursor(row_factory=psycopg.rows.dict_row) as cursor:
        row: dict[str, Any] = cursor.execute(query, [*given.values()]).fetchone() or {}
        return row


def bury(where: str | psycopg.Connection[Any], *event_ids: str, table: str = "events", held: bool = False) -> None:
    """Make dead letters of events in a table of the outbox, as a relay would: of these, or of all.

    held   their keys wait for an operator, as with `block`.
    """
    if isinstance(where, str):
        with psycopg.connect(where) as connection:
            return bury(connection, *event_ids, table=table, held=held)
    columns = (
        "lane, id, event_id, aggregate_type, aggregate_id, event_type, payload, payload_bytes, headers, created_at"
    )
    chosen = "event_id = ANY(%s::uuid[])" if event_ids else "%s::uuid[] IS NOT NULL"
    where.execute(
        f"WITH gone AS (DELETE FROM outbox.{table} WHERE {chosen} RETURNING *) INSERT INTO outbox.dead_letters "
        f"({columns}, attempts, last_error, first_failed_at) SELECT {columns}, 3, 'refused', now() FROM gone".encode(),
        ([*event_ids],),
    )
    if held:
        where.execute(
            "INSERT INTO outbox.failures SELECT lane, id, event_id, aggregate_type, aggregate_id, true, attempts, "
            "last_error, now(), now(), 'infinity' FROM outbox.dead_letters"
        )
    return None


def old_partition(connection: psycopg.Connection[Any], schema: str, table: str, days: int) -> None:
    """Make a partition of a day so many days ago, "old_partition"."""
    ((first, last),) = connection.execute(
        "SELECT current_date - %(n)s, current_date - %(n)s + 1", {"n": days}
    ).fetchall()
    connection.execute(
        sql.SQL("CREATE TABLE {} PARTITION OF {} FOR VALUES FROM ({}) TO ({})").format(
            sql.Identifier(schema, "old_partition"), sql.Identifier(schema, table), str(first), str(last)
        )
    )


def execute(url: str, statement: str, *values: Any) -> None:
    """Execute one statement, and commit it."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement.encode(), values or None)


@contextmanager
def login_role(admin: psycopg.Connection[Any], name: str, *options: str) -> Iterator[str]:
    """A role that may log in, of a name that no other database's role has; it goes with all that it owns."""
    role = f"{name}_{uuid4().hex[:8]}"
    admin.execute(sql.SQL("CREATE ROLE {} LOGIN {}").format(sql.Identifier(role), sql.SQL(" ".join(options))))
    try:
        yield role
    finally:
        drop_role(admin, role)


def drop_role(admin: psycopg.Connection[Any], role: str) -> None:
    """Drop a role, and what it may do; what it owns belongs to who asks.

    A session that was closed drops its temporary tables a moment later, maybe while DROP OWNED opens them.
    """
    drop = sql.SQL("REASSIGN OWNED BY {0} TO CURRENT_USER; DROP OWNED BY {0}; DROP ROLE {0}")

    def dropped() -> bool:
        try:
            admin.execute(drop.format(sql.Identifier(role)))
        except psycopg.errors.InternalError_:
            admin.rollback()
            return False
        return True

    wait_until(dropped, what=f"{role} to be dropped")


class Roles:
    """Roles of a database that may log in; ``of`` makes one of a kind with its grants, and returns its address."""

    def __init__(self, database: Any, stack: ExitStack) -> None:
        self.url = database.url
        self.admin = database.connect(autocommit=True)
        self._stack = stack

    def make(self, kind: str) -> str:
        return self._stack.enter_context(login_role(self.admin, kind))

    def of(self, kind: RoleKind, *options: str) -> str:
        role = self.make(kind)
        # Twice: what is granted may be granted again.
        for _ in range(2):
            outbox(self.url, "db", "roles", f"{kind}={role}", "--apply", *options)
        return self.url.replace("postgres@", f"{role}@")


@pytest.fixture
def roles(outbox_postgres) -> Iterator[Roles]:
    with ExitStack() as stack:
        yield Roles(outbox_postgres, stack)
        connections.close_all()


def outbox(url: str, *arguments: str, status: int = 0, **settings: str) -> str:
    """Run a command as the user in the URL; return what it printed."""
    environment = {"OUTBOX_DATABASE_URL": url} | {f"OUTBOX_{name.upper()}": value for name, value in settings.items()}
    done = CliRunner().invoke(app, arguments, env=environment)
    assert done.exit_code == status, (done.output, done.exception)
    return done.output


def refused(url: str, *statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement)
