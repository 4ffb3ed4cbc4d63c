"""The writer's statements, in SQLAlchemy Core; for psycopg and asyncpg each is compiled to text once.

One event takes ``INSERT … VALUES``. Several events, or any with ``lock_key``, take one ``INSERT … SELECT`` over arrays:
its text is the same for any number of events, and rows get their ids in the list's order.

The locks are taken in the same statement, before it draws an id: the count over the locking CTE is a
subquery that does not depend on a row, so the server evaluates it before the first row. Keys are always locked in the
same order, so two transactions that add many events at once can't deadlock.

A scheduled event is a row of another table, without a lane: a relay copies it when it is due.

Where keys are unique, one statement inserts the keys and the events whose key was new, so that there is never one
without the other. It waits while another transaction has inserted the same key, and does not see what that one commits
then: who has a key that was not new is a statement of its own.

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
KEY: Final = "idempotency_key"
KEY_COLUMNS: Final = ("aggregate_type", KEY, "event_id", "aggregate_id", "event_type")
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
    chosen = sa.select(*(_typed(name, rows.c[name]) for name in COLUMNS), _not_before()).order_by(rows.c.n)
    names = [*COLUMNS, "not_before"]
    return sa.insert(_table("scheduled", schema, names)).inline().from_select(names, chosen)


@cache
def insert_unique(schema: str, *, scheduled: bool, lock_key: bool) -> sa.CompoundSelect[Any]:
    """Return a statement that binds a list for each of COLUMNS and for the keys, and ``not_before`` if ``scheduled``.

    It inserts the events without a key and those whose key is new, and returns KEY_COLUMNS of the new keys, the last
    three NULL. If a key is known as that of another event it inserts nothing, and returns that event's.
    """
    table, names = ("scheduled", [*COLUMNS, "not_before"]) if scheduled else ("events", list(COLUMNS))
    keys, target = _table("idempotency_keys", schema, KEY_COLUMNS), _table(table, schema, names)
    given = sa.select(_rows(*COLUMNS, KEY)).cte("given")
    differs = sa.or_(keys.c.aggregate_id != given.c.aggregate_id, keys.c.event_type != given.c.event_type)
    reused = sa.select(*_texts(keys)).where(_same_key(keys, given), differs).cte("reused")
    new = sa.select(given).where(~sa.select(reused.c[KEY]).exists()).cte("new")
    fresh = (
        pg.insert(keys)
        .from_select(
            KEY_COLUMNS,
            # Always in the same order: two transactions that add the same keys can't deadlock.
            sa.select(*(_typed(name, new.c[name]) for name in KEY_COLUMNS))
            .where(new.c[KEY].is_not(None))
            .order_by(new.c.aggregate_type, new.c[KEY]),
        )
        .on_conflict_do_nothing()
        .returning(keys.c.aggregate_type, keys.c[KEY])
        .cte("fresh")
    )
    is_fresh = sa.select(sa.literal_column("1")).where(_same_key(fresh, new)).exists()
    values = [*(_typed(name, new.c[name]) for name in COLUMNS), *([_not_before()] if scheduled else [])]
    chosen = sa.select(*values).where(sa.or_(new.c[KEY].is_(None), is_fresh)).order_by(new.c.n)
    if lock_key:
        chosen = chosen.where(_locked(new))
    # What it returns needs no right to SELECT.
    written = sa.insert(target).from_select(names, chosen).returning(sa.literal_column("1").label("one")).cte("written")
    rest = (sa.cast(sa.null(), sa.Text()) for _ in KEY_COLUMNS[2:])
    return sa.union_all(sa.select(fresh.c.aggregate_type, fresh.c[KEY], *rest).add_cte(written), sa.select(*reused.c))


@cache
def known_keys(schema: str) -> sa.Select[Any]:
    """Return a statement that binds lists of aggregate types and keys, and returns KEY_COLUMNS of the known ones."""
    keys, rows = _table("idempotency_keys", schema, KEY_COLUMNS), _rows("aggregate_type", KEY)
    return sa.select(*_texts(keys)).where(_same_key(keys, rows))


@cache
def cancel(schema: str) -> sa.Select[Any]:
    """Return a statement that binds ``event_id``, deletes the scheduled event, and returns how many there were.

    The event's key is free again: what was cancelled has not happened.
    """
    scheduled, keys = (_table(name, schema, ["event_id"]) for name in ("scheduled", "idempotency_keys"))
    event_id = sa.cast(sa.bindparam("event_id", type_=sa.Text()), pg.UUID())
    gone = sa.delete(scheduled).where(scheduled.c.event_id == event_id).returning(scheduled.c.event_id).cte("gone")
    freed = sa.delete(keys).where(keys.c.event_id == gone.c.event_id).returning(keys.c.event_id).cte("freed")
    return sa.select(sa.func.pg_catalog.count(gone.c.event_id, type_=sa.BigInteger())).add_cte(freed)


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


def _not_before() -> sa.ColumnElement[Any]:
    time = sa.DateTime(timezone=True)
    return sa.cast(sa.bindparam("not_before", type_=time), time)


def _texts(keys: sa.Table) -> list[sa.ColumnElement[Any]]:
    return [sa.cast(keys.c[name], sa.Text()).label(name) for name in KEY_COLUMNS]


def _same_key(one: sa.FromClause, other: sa.FromClause) -> sa.ColumnElement[bool]:
    return sa.and_(*(one.c[name] == other.c[name] for name in ("aggregate_type", KEY)))


def _locked(rows: sa.FromClause) -> sa.ColumnElement[bool]:
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
