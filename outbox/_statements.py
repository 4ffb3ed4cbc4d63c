"""The writer's statements, as text: a service whose driver is psycopg or asyncpg need not import SQLAlchemy.

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
pg_catalog's, so that none that is planted in a schema of that path is used instead. Parameters have the type of their
cast: a driver that encodes JSON itself must not do so with JSON that is encoded. The only name in a text is the
schema's, quoted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import sqlalchemy as sa

COLUMNS: Final = ("event_id", "aggregate_type", "aggregate_id", "event_type", "payload", "payload_bytes", "headers")
KEY: Final = "idempotency_key"
KEY_COLUMNS: Final = ("aggregate_type", KEY, "event_id", "aggregate_id", "event_type")

_TYPES: Final = {"event_id": "uuid", "payload": "jsonb", "headers": "jsonb"}
SCHEMA: Final = "{schema}."
_PARAMETER: Final = re.compile(r"%(?:\((\w+)\)s|%)")

LOCK_SEED: Final = 0x6F7574626F78
"""Keeps a key's advisory lock apart from the application's own locks on a hash of the same text. Spells "outbox"."""


class Statement:
    """A statement with ``%(name)s`` parameters, as each driver wants it. In a template SCHEMA is the place of that."""

    def __init__(self, template: str, schema: str) -> None:
        self._template = template
        self._schema = schema
        self.psycopg = _in_schema(template, schema).encode()

    def asyncpg(self, values: Mapping[str, Any]) -> list[Any]:
        """Return what asyncpg's methods take: the text, and the values in their order."""
        text, names = self._numbered
        return [text, *(values[name] for name in names)]

    def sqlalchemy(self, translated: Mapping[str | None, str | None]) -> sa.TextClause:
        """Return what SQLAlchemy executes with the values. ``translated``: the connection's schema_translate_map."""
        return _clause(self._template, translated.get(self._schema, self._schema))

    @cached_property
    def _numbered(self) -> tuple[str, list[str]]:
        text = self.psycopg.decode()
        names = list(dict.fromkeys(name for name in _PARAMETER.findall(text) if name))
        return _PARAMETER.sub(lambda found: f"${names.index(found[1]) + 1}" if found[1] else "%", text), names


@cache
def _clause(template: str, schema: str | None) -> sa.TextClause:
    import sqlalchemy as sa

    text = _in_schema(template, schema).replace(":", r"\:")
    return sa.text(_PARAMETER.sub(lambda found: f":{found[1]}" if found[1] else "%", text))


def _in_schema(template: str, schema: str | None) -> str:
    quoted = "" if schema is None else '"' + schema.replace('"', '""').replace("%", "%%") + '".'
    return template.replace(SCHEMA, quoted)


@cache
def insert_one(schema: str) -> Statement:
    """Return a statement that binds one value for each of COLUMNS: text, or bytes for payload_bytes."""
    # No RETURNING, which would need the right to SELECT; a writer has only INSERT.
    values = ", ".join(_typed(name, f"CAST(%({name})s AS {_plain(name)})") for name in COLUMNS)
    return Statement(f"INSERT INTO {SCHEMA}events ({_listed(COLUMNS)}) VALUES ({values})", schema)


@cache
def insert_many(schema: str, *, lock_key: bool) -> Statement:
    """Return a statement that binds one list for each of COLUMNS, all of the same length."""
    locks, condition = _locks() if lock_key else ("", "")
    given = f"given AS (SELECT * FROM {_rows(COLUMNS)})"
    return Statement(
        f"WITH {given}{locks} INSERT INTO {SCHEMA}events ({_listed(COLUMNS)}) "
        f"SELECT {_CHOSEN} FROM given AS new WHERE true{condition} ORDER BY new.n",
        schema,
    )


@cache
def schedule_many(schema: str) -> Statement:
    """Return a statement that binds one list for each of COLUMNS, all of the same length, ``not_before`` and ``delay``.

    One of the two is NULL; ``delay`` is the text of an interval.
    """
    return Statement(
        f"INSERT INTO {SCHEMA}scheduled ({_listed(COLUMNS)}, not_before) "
        f"SELECT {_CHOSEN}, {_NOT_BEFORE} FROM {_rows(COLUMNS)} ORDER BY new.n",
        schema,
    )


@cache
def insert_unique(schema: str, *, scheduled: bool, lock_key: bool) -> Statement:
    """Return a statement that binds a list for each of COLUMNS and for the keys, and those of ``schedule_many``.

    It inserts the events without a key and those whose key is new, and returns KEY_COLUMNS of the new keys, the last
    three NULL. If a key is known as that of another event it inserts nothing, and returns that event's.
    """
    table, more, time = ("scheduled", ", not_before", f", {_NOT_BEFORE}") if scheduled else ("events", "", "")
    keys = f"{SCHEMA}idempotency_keys"
    locks, condition = _locks() if lock_key else ("", "")
    # Keys are always in the same order: two transactions that add the same keys can't deadlock.
    text = f"""
WITH rows AS (SELECT * FROM {_rows((*COLUMNS, KEY))}),
reused AS (
    SELECT {_TEXTS} FROM {keys} AS k, rows AS r
     WHERE {_same_key("k", "r")} AND (k.aggregate_id <> r.aggregate_id OR k.event_type <> r.event_type)),
given AS (SELECT * FROM rows WHERE NOT EXISTS (SELECT FROM reused)),
fresh AS (
    INSERT INTO {keys} ({_listed(KEY_COLUMNS)})
    SELECT {", ".join(_typed(name, f"g.{name}") for name in KEY_COLUMNS)} FROM given AS g
     WHERE g.{KEY} IS NOT NULL ORDER BY g.aggregate_type, g.{KEY}
        ON CONFLICT DO NOTHING RETURNING aggregate_type, {KEY}){locks},
written AS (
    INSERT INTO {SCHEMA}{table} ({_listed(COLUMNS)}{more}) SELECT {_CHOSEN}{time} FROM given AS new
     WHERE (new.{KEY} IS NULL OR EXISTS (SELECT FROM fresh AS f WHERE {_same_key("f", "new")})){condition}
     ORDER BY new.n)
SELECT aggregate_type, {KEY}, NULL::text, NULL::text, NULL::text FROM fresh UNION ALL SELECT * FROM reused"""
    return Statement(text, schema)


@cache
def known_keys(schema: str) -> Statement:
    """Return a statement that binds lists of aggregate types and keys, and returns KEY_COLUMNS of the known ones."""
    keys, rows = f"{SCHEMA}idempotency_keys", _rows(("aggregate_type", KEY))
    return Statement(f"SELECT {_TEXTS} FROM {keys} AS k, {rows} WHERE {_same_key('k', 'new')}", schema)


@cache
def cancel(schema: str) -> Statement:
    """Return a statement that binds ``event_id``, deletes the scheduled event, and returns how many there were.

    The event's key is free again: what was cancelled has not happened.
    """
    text = f"""
WITH gone AS (
    DELETE FROM {SCHEMA}scheduled WHERE event_id = CAST(%(event_id)s AS uuid) RETURNING event_id),
freed AS (DELETE FROM {SCHEMA}idempotency_keys AS k USING gone WHERE k.event_id = gone.event_id)
SELECT pg_catalog.count(event_id) FROM gone"""
    return Statement(text, schema)


@cache
def reschedule(schema: str) -> Statement:
    """Return a statement that binds ``event_id``, ``not_before`` and ``delay``, and returns the id if there was one."""
    text = f"UPDATE {SCHEMA}scheduled SET not_before = {_NOT_BEFORE} WHERE event_id = CAST(%(event_id)s AS uuid)"
    return Statement(f"{text} RETURNING event_id", schema)


@cache
def check() -> Statement:
    """Return a statement that binds ``schema`` and lists of ``tables``, ``names`` of columns and ``rights`` or ''.

    Without a schema it looks into those of the search path.

    It returns what is wrong: the problem, the table and the column. It reads nothing but pg_catalog.
    """
    text = """
SELECT problem, relation, name FROM (
    SELECT CASE WHEN pg_catalog.current_setting('transaction_read_only') = 'on' THEN 'read-only'
                WHEN a.attnum IS NULL THEN 'missing'
                WHEN NOT pg_catalog.has_schema_privilege(n.oid, 'USAGE') THEN 'USAGE'
                WHEN needed."right" <> '' AND NOT pg_catalog.has_column_privilege(c.oid, a.attnum, needed."right")
                THEN needed."right" END AS problem, needed.*
      FROM unnest(CAST(%(tables)s AS text[]), CAST(%(names)s AS text[]), CAST(%(rights)s AS text[]))
           WITH ORDINALITY AS needed(relation, name, "right", n)
      LEFT JOIN pg_catalog.pg_namespace AS n
             ON n.nspname = CAST(CAST(%(schema)s AS text) AS name)
             OR (CAST(%(schema)s AS text) IS NULL AND n.oid = (
                SELECT relnamespace FROM pg_catalog.pg_class WHERE oid = pg_catalog.to_regclass(needed.relation)))
      LEFT JOIN pg_catalog.pg_class AS c ON c.relnamespace = n.oid AND c.relname = CAST(needed.relation AS name)
      LEFT JOIN pg_catalog.pg_attribute AS a
             ON a.attrelid = c.oid AND a.attname = CAST(needed.name AS name) AND NOT a.attisdropped) AS found
 WHERE problem IS NOT NULL ORDER BY n"""
    return Statement(text, "")


# statement_timestamp(): the same for all events of a statement.
_NOT_BEFORE: Final = (
    "coalesce(CAST(%(not_before)s AS timestamp with time zone), "
    "pg_catalog.statement_timestamp() + CAST(CAST(%(delay)s AS text) AS interval))"
)


def _rows(names: tuple[str, ...]) -> str:
    """Return SQL that makes rows of ``new``, numbered by ``n``, of a bound array for each name.

    There are several, so unnest is syntax, and pg_catalog's.
    """
    arrays = ", ".join(f"CAST(%({name})s AS {_plain(name)}[])" for name in names)
    return f"unnest({arrays}) WITH ORDINALITY AS new({_listed(names)}, n)"


def _locks() -> tuple[str, str]:
    """Return CTEs that lock every key of ``given``, and a condition that does it and is then true."""
    # hashtextextended as in events.lane, with another seed.
    of_type = f"pg_catalog.hashtextextended(aggregate_type, {LOCK_SEED}::bigint)"
    key = f"pg_catalog.hashtextextended(aggregate_id, {of_type})"
    keys = f"SELECT DISTINCT {key} AS key FROM given ORDER BY 1"
    ctes = f", locks AS MATERIALIZED (SELECT pg_catalog.pg_advisory_xact_lock(key) FROM ({keys}) AS keys)"
    return ctes, " AND (SELECT pg_catalog.count(*) FROM locks) > 0::bigint"


def _same_key(one: str, other: str) -> str:
    return f"{one}.aggregate_type = {other}.aggregate_type AND {one}.{KEY} = {other}.{KEY}"


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names)


def _plain(name: str) -> str:
    return "bytea" if name == "payload_bytes" else "text"


def _typed(name: str, value: str) -> str:
    return f"CAST({value} AS {_TYPES[name]})" if name in _TYPES else value


_CHOSEN: Final = ", ".join(_typed(name, f"new.{name}") for name in COLUMNS)
_TEXTS: Final = ", ".join(f"CAST(k.{name} AS text) AS {name}" for name in KEY_COLUMNS)
