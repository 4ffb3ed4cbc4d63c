"""The writer's statements, in SQLAlchemy Core; for psycopg they are compiled to its own SQL once.

One event takes ``INSERT … VALUES``. Many, or any under ``lock_key``, take one ``INSERT … SELECT`` over arrays: its text
is the same for any number of events, and rows get their ids in the list's order. Messages instead of rows are emitted
by one ``SELECT`` over an array, for one as for many.

The locks are taken in the same statement and before it draws any id or emits anything: the count over the locking CTE
is a subquery that does not depend on a row, so the server evaluates it before the first. Keys are locked in one order
everywhere, so two transactions that add many events at once can't wait for each other in a circle.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg  # brings no psycopg until it connects

COLUMNS: Final = (
    "event_id",
    "aggregate_type",
    "aggregate_id",
    "event_type",
    "payload",
    "payload_bytes",
    "headers",
)
KEY: Final = ("aggregate_type", "aggregate_id")
_TYPES: Final[dict[str, Any]] = {"event_id": pg.UUID(), "payload": pg.JSONB(), "headers": pg.JSONB()}

_DIALECT: Final[sa.Dialect] = PGDialect_psycopg()  # type: ignore[no-untyped-call]

LOCK_SEED: Final = 0x6F7574626F78
"""Makes the advisory lock of a key differ from the application's own locks on a hash of the same text: "outbox"."""


@cache
def insert_one(schema: str) -> sa.Insert:
    """Binds one value for each of COLUMNS: text, or bytes for payload_bytes."""
    events = _events(schema)
    # inline: no RETURNING, which would need the right to SELECT; a writer needs INSERT alone.
    return (
        sa.insert(events)
        .inline()
        .values({name: _typed(name, sa.bindparam(name, type_=_plain(name))) for name in COLUMNS})
    )


@cache
def insert_many(schema: str, *, lock_key: bool) -> sa.Insert:
    """Binds one list for each of COLUMNS, all of the same length."""
    rows = _rows(*COLUMNS)
    chosen = sa.select(*(_typed(name, rows.c[name]) for name in COLUMNS)).order_by(rows.c.n)
    if lock_key:
        chosen = chosen.where(_locked(rows))
    return sa.insert(_events(schema)).inline().from_select(list(COLUMNS), chosen)


@cache
def emit_many(*, lock_key: bool) -> sa.Select[tuple[int]]:
    """Binds ``prefix`` and ``slot``, a list of ``content``, and under lock_key one for each of KEY, as long.

    Gives how many messages were emitted: all, or none where no such slot is there to deliver them. That is asked in the
    same statement, and answered without an error, which would end the caller's transaction.
    """
    rows = _rows("content", *(KEY if lock_key else ()))
    slots = sa.table(
        "pg_replication_slots",
        *map(sa.column, ("slot_name", "database", "wal_status")),
        schema="pg_catalog",
    )
    # wal_status is 'lost' for an invalidated slot too, whatever the reason.
    slot: sa.Select[tuple[Any]] = sa.select(sa.literal_column("1")).where(
        slots.c.slot_name == sa.cast(sa.bindparam("slot", type_=sa.Text()), sa.Text()),
        slots.c.database == sa.func.current_database(),
        slots.c.wal_status.is_distinct_from(sa.literal_column("'lost'")),
    )
    chosen = sa.select(rows.c.content).where(slot.exists()).order_by(rows.c.n)
    if lock_key:
        chosen = chosen.where(_locked(rows))
    # The OFFSET keeps the subquery as it is: sorted first, and then emitted.
    ordered = chosen.offset(sa.literal_column("0")).subquery("ordered")
    prefix = sa.cast(sa.bindparam("prefix", type_=sa.Text()), sa.Text())
    emitted = sa.func.pg_logical_emit_message(sa.literal_column("true"), prefix, ordered.c.content)
    return sa.select(sa.func.count(emitted))


@cache
def psycopg_sql(statement: sa.ClauseElement) -> str:
    """Return one of these statements as psycopg takes it, with ``%(name)s`` for what it binds."""
    return str(statement.compile(dialect=_DIALECT))


def _rows(*names: str) -> sa.TableValuedAlias:
    """Arrays as rows, with their number ``n``."""
    arrays = [sa.cast(sa.bindparam(name, type_=pg.ARRAY(_plain(name))), pg.ARRAY(_plain(name))) for name in names]
    return sa.func.unnest(*arrays).table_valued(*names, with_ordinality="n").render_derived(name="new")


def _locked(rows: sa.TableValuedAlias) -> sa.ColumnElement[bool]:
    """Take the lock of every key; then true."""
    # hashtextextended as in events.lane, over another seed.
    key = sa.func.hashtextextended(
        rows.c.aggregate_id, sa.func.hashtextextended(rows.c.aggregate_type, sa.literal_column(str(LOCK_SEED)))
    )
    keys = sa.select(key.label("key")).distinct().order_by(sa.literal_column("1")).subquery("keys")
    locks = sa.select(sa.func.pg_advisory_xact_lock(keys.c.key).label("held")).cte("locks")
    locks = locks.prefix_with("MATERIALIZED", dialect="postgresql")
    return sa.select(sa.func.count()).select_from(locks).scalar_subquery() > sa.literal_column("0")


def _events(schema: str) -> sa.Table:
    # Just the columns that are written, and not outbox_tables(): its options are not known to SQLAlchemy 2.0.
    return sa.Table("events", sa.MetaData(), *map(sa.Column, COLUMNS), schema=schema)


def _plain(name: str) -> sa.types.TypeEngine[Any]:
    return pg.BYTEA() if name in {"payload_bytes", "content"} else sa.Text()


def _typed(name: str, value: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    return sa.cast(sa.type_coerce(value, sa.Text()), _TYPES[name]) if name in _TYPES else value
