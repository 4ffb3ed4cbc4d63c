"""Apply a message once, in the handler's own transaction.

    with Session(engine) as session, session.begin():
        if once(session, message, consumer="billing"):
            session.add(Invoice(...))

One statement inserts the consumer and the event's id. It waits while another transaction has inserted the same: when
that one commits, the message was applied, and when it rolls back, this one is the first.

| what happens                                   | what follows                                                      |
|------------------------------------------------|-------------------------------------------------------------------|
| the process is killed before COMMIT            | id and effect are rolled back; the message comes again: True      |
| … after COMMIT, before Kafka's offset moves    | the message comes again: False                                    |
| two members have the message at the same time  | the second waits for the first: False, or True if that rolls back |
| the same, in REPEATABLE READ or SERIALIZABLE   | the driver's SerializationFailure: run the transaction again      |
| the relay published the event twice            | False for the second                                              |
| the id's day was forgotten (`outbox db prune`) | MessageTooOld                                                     |
"""

from __future__ import annotations

import datetime as dt
from functools import cache
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg
from sqlalchemy.orm import Session

from outbox import _core, _targets
from outbox.consumer.ids import NO_TIME, day
from outbox.consumer.model import DEDUP, DEDUP_BY_KEY
from outbox.consumer.tables import DEFAULT_SCHEMA, ConsumerTables, consumer_tables
from outbox.errors import ConfigurationError
from outbox.inbox.errors import MessageTooOld
from outbox.inbox.ids import message_id

if TYPE_CHECKING:
    import psycopg

    from outbox._targets import AsyncpgConnection, AsyncTarget, SyncTarget

_UNBOUND: Final = "the message's id would be committed apart from its effect"
_OWNER: Final = "outbox.inbox.once"


def once(
    target: SyncTarget, message: object, *, consumer: str, key: str | None = None, schema: str = DEFAULT_SCHEMA
) -> bool:
    """Return whether a message is new to a consumer: True, apply it; False, it was applied before.

    target    in whose transaction the message is applied: a SQLAlchemy Session or Connection, or a psycopg one.
    message   see ``message_id``.
    consumer  whose effect it is. Each consumer applies each event once.
    key       see ``message_id``: with "idempotency-key", events with the same key are applied once.
    schema    of the consumers' tables, which must be in the same database as the effect.

    Waits while another transaction applies the same message. Raises TargetError for a target without a transaction,
    MessageIdMissing, MessageTooOld, and ConfigurationError for an impossible name. The driver's own errors are passed
    through; SerializationFailure, above READ COMMITTED, means that the whole transaction is to be run again.
    """
    found = _targets.sync_target(target, "once", "once_async")
    wanted = _Wanted(message, consumer, key, schema)
    if isinstance(found, Session):
        return wanted.on_connection(_targets.session_connection(found))
    if isinstance(found, sa.Connection):
        return wanted.on_connection(found)
    from psycopg import Cursor
    from psycopg.rows import tuple_row

    if _targets.state_unknown(found):
        with found.pipeline():
            pass
    _targets.require_transaction(found, _UNBOUND)
    # Not connection.execute(): the caller's cursor and row factories may be others.
    cursor: psycopg.Cursor[tuple[Any, ...]] = Cursor(found, row_factory=tuple_row)
    row = cursor.execute(_core.psycopg_sql(_insert(schema)), wanted.values).fetchone()
    if wanted.is_aged(row):
        wanted.check(cursor.execute(_core.psycopg_sql(_forgotten(schema)), wanted.values).fetchone())
    return row is not None


async def once_async(
    target: AsyncTarget, message: object, *, consumer: str, key: str | None = None, schema: str = DEFAULT_SCHEMA
) -> bool:
    """Return the same as ``once`` in the transaction of an asynchronous session or connection."""
    found: Any = _targets.async_target(target, "once_async", "once")
    wanted = _Wanted(message, consumer, key, schema)
    if _targets.is_sqlalchemy_async(found):
        new: bool = await found.run_sync(wanted.on_target)
        return new
    if _targets.is_asyncpg(found):
        return await _once_asyncpg(found, wanted, schema)
    from psycopg import AsyncCursor
    from psycopg.rows import tuple_row

    if _targets.state_unknown(found):
        async with found.pipeline():
            pass
    _targets.require_transaction(found, _UNBOUND)
    cursor: psycopg.AsyncCursor[tuple[Any, ...]] = AsyncCursor(found, row_factory=tuple_row)
    await cursor.execute(_core.psycopg_sql(_insert(schema)), wanted.values)
    row = await cursor.fetchone()
    if wanted.is_aged(row):
        await cursor.execute(_core.psycopg_sql(_forgotten(schema)), wanted.values)
        wanted.check(await cursor.fetchone())
    return row is not None


async def _once_asyncpg(connection: AsyncpgConnection, wanted: _Wanted, schema: str) -> bool:
    _targets.require_asyncpg_transaction(connection, _UNBOUND)
    rows = await connection.fetch(*_core.asyncpg_arguments(_insert(schema), wanted.values))
    row = rows[0] if rows else None
    if wanted.is_aged(row):
        forgotten = await connection.fetch(*_core.asyncpg_arguments(_forgotten(schema), wanted.values))
        wanted.check(forgotten[0] if forgotten else None)
    return row is not None


class _Wanted:
    """One message of one consumer: what the statements take, and what their rows mean."""

    def __init__(self, message: object, consumer: str, key: str | None, schema: str) -> None:
        check_name(consumer)
        self._schema = schema
        self._id: UUID = message_id(message, key)
        self._day: dt.date = day(self._id)
        self.values: dict[str, Any] = {
            "grp": consumer,
            "day": self._day,
            "message_id": self._id,
            "owner": _OWNER,
            "strategy": DEDUP if key is None else DEDUP_BY_KEY,
        }

    def on_target(self, target: Session | sa.Connection) -> bool:
        return self.on_connection(_targets.session_connection(target) if isinstance(target, Session) else target)

    def on_connection(self, connection: sa.Connection) -> bool:
        _targets.check_connection(connection, "the inbox", _UNBOUND)
        row = _targets.execute(connection, _insert(self._schema), self.values).one_or_none()
        if self.is_aged(row):
            self.check(_targets.execute(connection, _forgotten(self._schema), self.values).one_or_none())
        return row is not None

    def is_aged(self, row: Any) -> bool:
        """Return whether ids of this one's day may have been forgotten; ``row`` is that of ``_insert``."""
        return row is not None and bool(row[0]) and self._day != NO_TIME

    def check(self, row: Any) -> None:
        """Raise MessageTooOld if ids of this one's day were forgotten; ``row`` is that of ``_forgotten``."""
        if row is not None and row[0] is not None and self._day < row[0]:
            raise MessageTooOld(too_old(self.values["grp"], self._id, row[0]))


def check_name(consumer: str) -> None:
    """Raise ConfigurationError for a name that the table of groups does not take."""
    if not 1 <= len(consumer) <= 200 or "\0" in consumer:
        raise ConfigurationError(f"consumer: {consumer!r} can't be a name; give one of 1 to 200 characters")


def too_old(consumer: str, id_: UUID, before: dt.date) -> str:
    """Return the text for an id of a day that a consumer has forgotten."""
    return (
        f"the id {id_} is of a day before {before}, and {consumer} no longer remembers all ids of such days: it may "
        "have been applied before"
    )


@cache
def _insert(schema: str) -> sa.Select[Any]:
    """Return a statement that inserts an id, and returns a row if it was not there.

    The row says whether the id's day is over. Only then may its ids have been forgotten, and what the consumer has
    forgotten is read by a statement of its own: this one may have waited, and would read what was true before.
    """
    tables = _tables(schema)
    processed, groups = tables.processed_messages, tables.groups
    # Qualified: see _statements.
    now = sa.func.pg_catalog.timezone(sa.literal_column("'UTC'"), sa.func.pg_catalog.clock_timestamp())
    grp, today = _bound("grp", sa.Text()), sa.cast(now, sa.Date())
    fresh = (
        pg.insert(processed)
        .values(grp=grp, day=_bound("day", sa.Date()), message_id=_bound("message_id", pg.UUID()))
        .on_conflict_do_nothing()
        .returning(processed.c.day)
        .cte("fresh")
    )
    # What is forgotten is noted in the consumer's row.
    known: sa.Select[Any] = sa.select(sa.literal_column("1")).where(groups.c.grp == grp)
    row = sa.select(grp, _bound("owner", sa.Text()), _bound("strategy", sa.Text())).where(~known.exists())
    registered = (
        pg.insert(groups)
        .from_select(["grp", "owner", "strategy"], row)
        .on_conflict_do_nothing()
        .returning(groups.c.grp)
        .cte("registered")
    )
    return sa.select(fresh.c.day < today).add_cte(registered)


@cache
def _forgotten(schema: str) -> sa.Select[Any]:
    groups = _tables(schema).groups
    return sa.select(groups.c.forgotten_before).where(groups.c.grp == _bound("grp", sa.Text()))


def _bound(name: str, kind: sa.types.TypeEngine[Any]) -> sa.ColumnElement[Any]:
    return sa.cast(sa.bindparam(name, type_=kind), kind)


@cache
def _tables(schema: str) -> ConsumerTables:
    return consumer_tables(sa.MetaData(), schema)
