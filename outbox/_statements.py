"""The writer's statements, in SQLAlchemy Core; for psycopg and asyncpg each is compiled to text once.

One event takes ``INSERT … VALUES``. Several events, or any with ``lock_key``, take one ``INSERT … SELECT`` over arrays:
its text is the same for any number of events, and rows get their ids in the list's order.

The locks are taken in the same statement, before it draws an id: the count over the locking CTE is a
subquery that does not depend on a row, so the server evaluates it before the first row. Keys are always locked in the
same order, so two transactions that add many events at once can't deadlock.

A scheduled event is a row of another table, without a lane: a relay copies it when it is due.

They run in the caller's session, with its search path. Functions are qualified, and operators have exactly the types of
pg_catalog's, so that none that is planted in a schema of that path is used instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
_TYPES: Final[dict[str, Any]] = {"event_id": pg.UUID(), "payload": pg.JSONB(), "headers": pg.JSONB()}

_DIALECT: Final[sa.Dialect] = PGDialect_psycopg()  # type: ignore[no-untyped-call]
# As asyncpg wants it; SQLAlchemy's own dialect for asyncpg would bring greenlet.
_NUMBERED: Final[sa.Dialect] = PGDialect_psycopg(paramstyle="numeric_dollar")  # type: ignore[no-untyped-call]

LOCK_SEED: Final = 0x6F7574626F78
"""Keeps a key's advisory lock apart from the application's own locks on a hash of the same text. Spells "outbox"."""


@cache
def insert_one(schema: str) -> sa.Insert:
    """Return a statement that binds one value for each of COLUMNS: text, or bytes for payload_bytes."""
    events = _events(schema)
    # inline: no RETURNING, which would need the right to SELECT; a writer has only INSERT.
    return (
        sa.insert(events)
        .inline()
        .values({name: _typed(name, sa.bindparam(name, type_=_plain(name))) for name in COLUMNS})
    )


@cache
def insert_many(schema: str, *, lock_key: bool) -> sa.Insert:
    """Return a statement that binds one list for each of COLUMNS, all of the same length."""
    rows = _rows(*COLUMNS)
    chosen = sa.select(*(_typed(name, rows.c[name]) for name in COLUMNS)).order_by(rows.c.n)
    if lock_key:
        chosen = chosen.where(_locked(rows))
    return sa.insert(_events(schema)).inline().from_select(list(COLUMNS), chosen)


@cache
def schedule_many(schema: str) -> sa.Insert:
    """Return a statement that binds one list for each of COLUMNS, all of the same length, and ``not_before``."""
    rows = _rows(*COLUMNS)
    time = sa.DateTime(timezone=True)
    not_before = sa.cast(sa.bindparam("not_before", type_=time), time)
    chosen = sa.select(*(_typed(name, rows.c[name]) for name in COLUMNS), not_before).order_by(rows.c.n)
    names = [*COLUMNS, "not_before"]
    return sa.insert(_table("scheduled", schema, names)).inline().from_select(names, chosen)


@cache
def cancel(schema: str) -> sa.Select[tuple[int]]:
    """Return a statement that binds ``event_id``, deletes the scheduled event, and returns how many there were."""
    scheduled = _table("scheduled", schema, ["event_id"])
    event_id = sa.cast(sa.bindparam("event_id", type_=sa.Text()), pg.UUID())
    gone = sa.delete(scheduled).where(scheduled.c.event_id == event_id).returning(scheduled.c.event_id).cte("gone")
    return sa.select(sa.func.pg_catalog.count(gone.c.event_id, type_=sa.BigInteger()))


@cache
def psycopg_sql(statement: sa.ClauseElement) -> str:
    """Return one of these statements as text for psycopg, with ``%(name)s`` parameters."""
    return str(statement.compile(dialect=_DIALECT))


def asyncpg_arguments(statement: sa.ClauseElement, values: Mapping[str, Any]) -> list[Any]:
    """Return what asyncpg's methods take for one of these statements: its text, and the values in their order."""
    text, names = _numbered(statement)
    return [text, *(values[name] for name in names)]


@cache
def _numbered(statement: sa.ClauseElement) -> tuple[str, tuple[str, ...]]:
    compiled: Any = statement.compile(dialect=_NUMBERED)
    return str(compiled), tuple(compiled.positiontup)


def _rows(*names: str) -> sa.TableValuedAlias:
    """Return arrays as rows, numbered by ``n``."""
    arrays = [sa.cast(sa.bindparam(name, type_=pg.ARRAY(_plain(name))), pg.ARRAY(_plain(name))) for name in names]
    # With several arrays it is syntax, which always means pg_catalog's, and must not be qualified.
    unnest = sa.func.unnest if len(arrays) > 1 else sa.func.pg_catalog.unnest
    return unnest(*arrays).table_valued(*names, with_ordinality="n").render_derived(name="new")


def _locked(rows: sa.TableValuedAlias) -> sa.ColumnElement[bool]:
    """Return a condition that locks every key and is then true."""
    # hashtextextended as in events.lane, with another seed.
    key = sa.func.pg_catalog.hashtextextended(
        rows.c.aggregate_id,
        sa.func.pg_catalog.hashtextextended(rows.c.aggregate_type, sa.literal_column(str(LOCK_SEED))),
    )
    keys = sa.select(key.label("key")).distinct().order_by(sa.literal_column("1")).subquery("keys")
    locks = sa.select(sa.func.pg_catalog.pg_advisory_xact_lock(keys.c.key).label("held")).cte("locks")
    locks = locks.prefix_with("MATERIALIZED", dialect="postgresql")
    return sa.select(sa.func.count()).select_from(locks).scalar_subquery() > sa.literal_column("0")


def _events(schema: str) -> sa.Table:
    return _table("events", schema, COLUMNS)


def _table(name: str, schema: str, columns: Sequence[str]) -> sa.Table:
    # Only the columns that are written, not outbox_tables(): SQLAlchemy 2.0 does not know all of its options.
    return sa.Table(name, sa.MetaData(), *map(sa.Column, columns), schema=schema)


def _plain(name: str) -> sa.types.TypeEngine[Any]:
    return pg.BYTEA() if name == "payload_bytes" else sa.Text()


def _typed(name: str, value: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    return sa.cast(sa.type_coerce(value, sa.Text()), _TYPES[name]) if name in _TYPES else value
